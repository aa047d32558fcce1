"""docs/stability.md lists the public names."""

import importlib
import inspect
import pkgutil
import re
from types import ModuleType

import pytest

import linrec

from .markdown import ROOT

PAGE = (ROOT / "docs/stability.md").read_text()
LISTED = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `linrec\.(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
}
# modules of the inside: the reference describes them under "Inside"
INTERNAL = {"__main__", "cli", "demo", "extras", "field_types", "files", "literals", "restored", "rules"}
INTERNAL |= {"tensor_files", "trees"}


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
    modules = {module.name for module in pkgutil.iter_modules(linrec.__path__)}
    assert modules == {*LISTED, *INTERNAL}
    assert INTERNAL.isdisjoint(LISTED)


@pytest.mark.parametrize("module", LISTED)
def test_the_row_of_a_module_has_the_names_that_it_exports(module: str) -> None:
    expected = sorted(public(importlib.import_module(f"linrec.{module}")))
    row = ", ".join(f"`{name}`" for name in expected)
    assert LISTED[module] == expected, f"docs/stability.md needs the row | `linrec.{module}` | {row} |"
