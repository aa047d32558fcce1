"""Wheel and sdist of a copy of the source, and the wheel in an environment of its own."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from linrec import __version__
from tests.tiers import thorough

from .markdown import ROOT

pytestmark = thorough

# the hooks of PEP 517, as `python -m build --no-isolation` calls them
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
USE = """
import importlib, importlib.metadata, pathlib, pkgutil, torch, linrec

folder = pathlib.Path(linrec.__file__).parent
for module in pkgutil.walk_packages(linrec.__path__, "linrec."):
    # these modules need packages that tests do not install
    without = "triton" in module.name or module.name.startswith("linrec.vllm.")
    if not without and not module.name.endswith(("tiles", "__main__")):
        assert pathlib.Path(importlib.import_module(module.name).__file__).is_relative_to(folder)
y, state = linrec.mixers.build("gate_loop", 8)(torch.randn(2, 5, 8))
assert y.isfinite().all()
print(folder, importlib.metadata.version("linrec"))
"""


def tree(folder: Path) -> Path:
    """Copy the files that make a package into a new folder."""
    folder.mkdir()
    copytree(ROOT / "src", folder / "src", ignore=ignore_patterns("*.egg-info", "__pycache__"))
    (folder / "tests").mkdir()
    (folder / "tests" / "test_nothing.py").touch()
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix in ("", ".cff", ".in", ".md", ".toml", ".txt"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def run(*words: str | Path, cwd: Path) -> str:
    """Run a program in a folder without the variables of this environment; return its output."""
    ended = subprocess.run([*map(str, words)], cwd=cwd, env={"PATH": ""}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    return out / run(sys.executable, "-c", BUILD, f"build_{kind}", out, cwd=source).split()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist."""
    folder = tmp_path_factory.mktemp("built")
    source = tree(folder / "source")
    return build("wheel", source, folder), build("sdist", source, folder)


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment that has the wheel, and the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(packages)
    # behind the wheel: this environment may have linrec too
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield folder / "bin"


def test_the_wheel_has_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    package = ROOT / "src" / "linrec"
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert {"linrec/py.typed", "linrec/cli/listing.json"} <= expected
    assert {name for name in contents(built[0]) if name.startswith("linrec/")} == expected


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        archive.extractall(tmp_path, filter="data")
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE"} <= {*names}
    assert not any(name.startswith("tests") for name in names)
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_everything_imports_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    folder, version = run(installed / "python", "-c", USE, cwd=tmp_path).split()
    assert Path(folder).is_relative_to(installed.parent) and version == __version__


def test_the_installed_command_line_answers(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "python", "-m", "linrec", "--version", cwd=tmp_path) == f"{__version__}\n"
    # the recipes of listing.json
    assert "memory-horizon" in run(installed / "python", "-m", "linrec", "train", "--help", cwd=tmp_path)


def test_wheel_and_sdist_have_the_version_of_the_package(built: tuple[Path, Path]) -> None:
    assert [path.name.split("-")[1].removesuffix(".tar.gz") for path in built] == [__version__] * 2
