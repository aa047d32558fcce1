"""Packages of linrec's extras: which extra brings a package, and the error where the package is missing.

This module does without PyTorch, because the command line starts with it.
"""

import importlib
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

from linrec.errors import MissingExtraError

__all__ = ["EXTRAS", "check_extra", "check_version", "import_extra", "one_line"]

EXTRAS = {
    "lab": ("lightning_fabric", "tyro", "rich", "tensorboard", "matplotlib", "jinja2", "filelock"),
    "text": ("tokenizers", "transformers", "datasets", "sacrebleu"),
    "hf": ("transformers", "tokenizers", "accelerate"),
    "eval": ("lm_eval",),
    "bench": ("pyarrow",),
    "babyai": ("minigrid", "gymnasium"),
    "ode": ("torchdiffeq",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "vllm": ("vllm",),
}
"""The packages of each extra that `src/linrec` imports, by the name of the import."""


def import_extra(package: str, purpose: str, *, extra: str | None = None) -> ModuleType:
    """Return a package of an extra.

    Args:
        package: name of the import, such as "tokenizers" or "rich.console".
        purpose: the feature that needs the package; the error begins with it.
        extra: the extra to install, where several have the package; None is the first.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(package, purpose, error, extra) from error


def check_extra(extra: str, purpose: str) -> None:
    """Raise an error if a package of an extra is not installed; import none of the packages.

    Args:
        extra: name of the extra, such as "lab".
        purpose: the feature that needs the extra; the error begins with it.
    """
    for package in EXTRAS[extra]:
        try:
            if find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        except (ImportError, ValueError) as error:
            raise _missing(package, purpose, error, extra) from error


def check_version(package: str, least: str, purpose: str, *, extra: str) -> None:
    """Raise an error if an installed package of an extra is too old.

    Args:
        package: name of the import and of the distribution.
        least: the oldest version that works, such as "5.13".
        purpose: the feature that needs the package; the error begins with it.
        extra: the extra to install.
    """
    found = version(package)
    if _numbers(found) < _numbers(least):
        raise MissingExtraError(
            f"{purpose} needs {package} {least} or newer; got {found}. "
            f"Install linrec's extra \"{extra}\": pip install -U 'linrec[{extra}]'."
        )


def one_line(error: BaseException) -> str:
    """Return the first line of the message of another package's error."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def _numbers(version: str) -> list[int]:
    """Return the first two numbers of a version."""
    return [int(number) for number in version.split(".")[:2]]


def _missing(package: str, purpose: str, error: Exception, extra: str | None) -> MissingExtraError:
    package = package.partition(".")[0]
    extra = extra or next(extra for extra, packages in EXTRAS.items() if package in packages)
    return MissingExtraError(
        f"{purpose} needs the package {package!r}, which cannot be imported ({error}). "
        f"Install linrec's extra \"{extra}\": pip install 'linrec[{extra}]'."
    )
