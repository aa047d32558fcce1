"""The first line of other packages' errors."""

__all__ = ["one_line"]


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message.

    Example:
        >>> one_line(OSError("no connection.\\nSee the manual."))
        'no connection'
    """
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
