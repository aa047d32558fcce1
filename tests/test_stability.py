"""docs/stability.md lists the public names, and the library does without the laboratory."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import linrec
from linrec import lab

from .markdown import ROOT

PAGE = (ROOT / "docs/stability.md").read_text()
LISTED = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `linrec\.([\w.]+)` \| (`.*) \|$", PAGE, re.MULTILINE)
}
# modules of the inside: the reference describes them under "Inside"
INTERNAL = {
    "__main__",
    "cli",
    "discovery",
    "extras",
    "field_types",
    "files",
    "literals",
    "restored",
    "rules",
    "torch_private",
}
INTERNAL |= {"lab.pages", "lab.publishing", "lab.style", "tensor_files", "trees"}


def public(module: ModuleType) -> list[str]:
    """Return the names that a module exports; of the errors, every exception."""
    if module.__name__ == "linrec.errors":
        return [
            name for name, value in vars(module).items() if inspect.isclass(value) and name.endswith("Error")
        ]
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not (name.startswith("_") or inspect.ismodule(value))
        ]
    return list(names)


def test_every_module_is_public_or_internal() -> None:
    modules = {module.name for module in pkgutil.iter_modules(linrec.__path__)} - {"lab"}
    modules |= {f"lab.{module.name}" for module in pkgutil.iter_modules(lab.__path__)}
    assert modules == {*LISTED, *INTERNAL}
    assert INTERNAL.isdisjoint(LISTED)


@pytest.mark.parametrize("module", LISTED)
def test_the_row_of_a_module_has_the_names_that_it_exports(module: str) -> None:
    expected = sorted(public(importlib.import_module(f"linrec.{module}")))
    row = ", ".join(f"`{name}`" for name in expected)
    assert LISTED[module] == expected, f"docs/stability.md needs the row | `linrec.{module}` | {row} |"


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # a name may be a module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_library_does_without_the_laboratory() -> None:
    package = ROOT / "src" / "linrec"
    files = [path.relative_to(package) for path in package.rglob("*.py")]
    library = [path for path in files if path.parts[0] not in ("lab", "cli", "__main__.py")]
    assert len(library) > 300
    for path in library:
        wrong = [name for name in imported(package / path) if re.match(r"linrec\.(lab|cli)\b", name)]
        assert not wrong, f"{path} imports {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("room", "others"),
    [("matrix", "gate_loop|delta_rule"), ("gate_loop", "delta_rule"), ("delta_rule", "gate_loop")],
)
def test_operators_with_matrix_states_share_without_a_circle(room: str, others: str) -> None:
    for path in (ROOT / "src/linrec/ops" / room).glob("*.py"):
        wrong = [name for name in imported(path) if re.match(rf"linrec\.ops\.({others})\b", name)]
        assert not wrong, f"{path} imports {', '.join(wrong)}"
