"""Private names of torch: one file of linrec uses them, and this version of torch has all."""

import ast
import importlib
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import linrec
from linrec import torch_private

SOURCE = Path(linrec.__file__).parent


def private_names(path: Path) -> Iterator[str]:
    """Yield the dotted names of torch with a part that begins with an underscore."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if names[0].startswith("forward_ad."):
                names = [f"torch.autograd.{names[0]}"]
        for name in names:
            parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if parts[0] == "torch" and private and all(map(str.isidentifier, parts)):
                yield name


def exists(name: str) -> bool:
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        # a module may hide beneath a function of its name, so the longest module goes first
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:n]))
            with suppress(AttributeError):
                return n == len(parts) or attrgetter(".".join(parts[n:]))(module) is not None
    return False


def test_one_file_uses_private_names_of_torch() -> None:
    users = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if any(private_names(path))}
    assert users == {"torch_private.py"}


def test_torch_has_every_private_name_that_linrec_uses() -> None:
    names = {*private_names(Path(torch_private.__file__))}
    assert len(names) > 15
    went = sorted(name for name in names if not exists(name))
    assert not went, f"this version of torch has no {', '.join(went)}; linrec.torch_private says what breaks"
