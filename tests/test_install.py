"""The extras: what imports without them, and which line names a missing extra."""

import re
import subprocess
import sys

import pytest

from linrec import __version__, extras
from linrec.cli.dispatch import COMMANDS
from linrec.errors import ConfigError, DataError, MissingExtraError
from tests.tiers import thorough

from .markdown import ROOT

# modules that draw pictures, make the command line, or are classes of transformers
NEED_EXTRA = [
    "cli",
    "hf",
    *(f"serve.{name}" for name in ("bodies", "connections", "http", "workbench")),
    *(f"vllm.{name}" for name in ("checks", "layers", "metadata", "model", "private")),
    *(f"lab.{name}" for name in ("bench", "evaluation", "inspection", "pages", "publishing", "report")),
    "lab.style",
]
BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

REFUSED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
"""
IMPORT = """
import importlib, pkgutil, linrec

def modules(package, prefix):
    for module in pkgutil.iter_modules(package.__path__, prefix):
        name = module.name.partition(".")[2]
        if name in NEED_EXTRA or name.endswith(("__main__", "tiles")) or "triton" in name:
            continue
        imported = importlib.import_module(module.name)
        print(module.name)
        if module.ispkg:
            yield from modules(imported, f"{module.name}.")

list(modules(linrec, "linrec."))
"""
RUN = """
from linrec.cli import main

for command in sys.argv[2].split(","):
    print(main([command, "memory-horizon"]), "torch" in sys.modules)
"""
ALONE = """
from linrec.cli import main

print(main(["--version"]), main(["--help"]), "torch" in sys.modules)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def listed(extra: str) -> set[str]:
    """Return the packages that an extra of pyproject.toml names, "" for the dependencies."""
    start = rf"^{extra or 'dependencies'} = \["
    block = re.search(rf"{start}(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    return {name.replace("-", "_") for name in re.findall(r'"([\w-]+)>', block[1])}


def test_the_dependencies_are_those_of_the_layers() -> None:
    assert listed("") == {"torch", "numpy", "numba", "jaxtyping", "safetensors", "typing_extensions"}


@pytest.mark.parametrize("extra", extras.EXTRAS)
def test_the_packages_of_an_extra_are_those_of_pyproject(extra: str) -> None:
    assert set(extras.EXTRAS[extra]) == listed(extra)


@thorough
def test_layers_tasks_and_training_import_without_any_extra() -> None:
    refused = {name for packages in extras.EXTRAS.values() for name in packages}
    refused |= {"pytest", "hypothesis", "beartype", "triton", "jax", "fla"}
    code = BLOCK + f"NEED_EXTRA = {NEED_EXTRA}" + IMPORT
    ended = python(code, ",".join(sorted(refused)))
    assert ended.returncode == 0, ended.stderr
    imported = ended.stdout.split()
    layers = "ops nn mixers models hippo parallel testing convert export generation"
    layers += " lab.tasks lab.train.loop"
    assert {f"linrec.{layer}" for layer in layers.split()} <= {*imported}


@pytest.mark.parametrize("package", extras.EXTRAS["lab"])
def test_every_command_names_the_missing_extra_in_one_line(package: str) -> None:
    ended = python(BLOCK + RUN, package, ",".join(COMMANDS))
    assert ended.stdout.splitlines() == ["2 False"] * len(COMMANDS)
    said = ended.stderr.splitlines()
    for command, line in zip(COMMANDS, said, strict=True):
        assert line == (
            f"linrec: `linrec {command}` needs the package {package!r}, which cannot be imported (No module "
            f"named {package!r}). Install linrec's extra \"lab\": pip install 'linrec[lab]'."
        )


def test_help_and_version_need_neither_an_extra_nor_pytorch() -> None:
    ended = python(BLOCK + ALONE, ",".join(extras.EXTRAS["lab"]))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{__version__}\nusage: linrec COMMAND")
    assert ended.stdout.endswith("0 0 False\n")


@pytest.mark.parametrize("kind", [ConfigError, DataError, ImportError])
def test_a_missing_package_is_named(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(kind, match=r"^Parquet needs the package 'pyarrow'.*pip install 'linrec\[bench\]'"):
        extras.import_extra("pyarrow.parquet", "Parquet")


def test_training_in_python_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from linrec.lab.train import fit, get_recipe

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"^training needs the package 'tensorboard'"):
        fit(get_recipe("memory-horizon-demo"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
