"""Optional packages: how they are imported, and the first line of their errors."""

import importlib
from types import ModuleType

from linrec.errors import DataError

__all__ = ["one_line", "require"]


def require(package: str, purpose: str) -> ModuleType:
    """Import a package of the extra "text".

    Args:
        package: the package's name, such as "tokenizers".
        purpose: what needs it; the message begins with it.

    Returns:
        The package.

    Raises:
        DataError: it is not installed.

    Example:
        >>> require("json", "reading JSON").__name__
        'json'
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs the package {package!r}, which cannot be imported ({error}). "
            "Install linrec's extra \"text\": pip install 'linrec[text]'."
        ) from error


def one_line(error: BaseException) -> str:
    """Return the first line of what an error of another package says.

    Example:
        >>> one_line(OSError("no connection.\\nSee the manual."))
        'no connection'
    """
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
