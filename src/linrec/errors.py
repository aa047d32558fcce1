"""Errors: those that a user can act on, each with a message of one line, and the words of such messages.

This module does without PyTorch, because the command line starts with it.
"""

import difflib
import unicodedata
from collections.abc import Iterable

# writing direction and isolation, which make a text look like another one
DIRECTIONS = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is spelt most like `name`, letter case, hyphens and underscores aside.

    Args:
        name: what was asked for.
        choices: what exists; at least one name.

    Returns:
        The closest choice; the first of several that are equally close.

    Raises:
        ValueError: there are no choices.

    Example:
        >>> nearest("Gate-Lop", ["attention", "gate_loop"])
        'gate_loop'
    """
    ordered = list(choices)
    if not ordered:
        raise ValueError(f"`choices` must hold at least one name to compare {name!r} with; got none.")

    def likeness(choice: str) -> float:
        return difflib.SequenceMatcher(None, _folded(name), _folded(choice)).ratio()

    return max(ordered, key=likeness)


def unknown(kind: str, name: object, choices: Iterable[str]) -> ValueError:
    """Return (not raise) the error for a name that does not exist.

    Args:
        kind: what the name was meant to be, in the singular: "mixer", "mode", "recipe".
        name: what was asked for.
        choices: what exists.

    Returns:
        A ValueError that gives the nearest match and lists all choices.

    Example:
        >>> print(unknown("mixer", "gateloop", ["attention", "gate_loop"]))
        there is no mixer 'gateloop'; did you mean 'gate_loop'? Choose from: 'attention', 'gate_loop'.
    """
    ordered = list(choices)
    if not ordered:
        return ValueError(f"there is no {kind} {name!r}, and none to choose from.")
    listed = ", ".join(repr(choice) for choice in ordered)
    return ValueError(
        f"there is no {kind} {name!r}; did you mean {nearest(str(name), ordered)!r}? Choose from: {listed}."
    )


def printable(text: object) -> str:
    r"""Return a text with control characters spelt out, such as the escape that begins a terminal's commands.

    New lines and tabs stay. Bytes of a file's name that are no UTF-8, which cannot be printed, are spelt out.

    Example:
        >>> printable("run\x1b[31m")
        'run\\x1b[31m'
    """
    return "".join(map(_spelt, str(text)))


class DataError(ValueError):
    """Text, a tokenizer or images that cannot be used; the message is one line that a user can act on."""


class TrainError(Exception):
    """Base of all errors below: catch it to report a run that ended early in one line."""


class ConfigError(TrainError, ValueError):
    """A configuration that cannot be trained."""


class UntrustedCodeError(ConfigError):
    """A stored configuration that would run code of others."""


class RunFolderError(TrainError, ValueError):
    """A folder that is not, or not yet, or already a run."""


class CheckpointError(TrainError):
    """A checkpoint that could not be written or read."""


class DivergedError(TrainError):
    """The loss is no longer a number."""


class InterruptedRunError(TrainError):
    """The run was asked to stop, and has stopped after writing its checkpoint."""


class MissingExtraError(ConfigError, DataError, ImportError):
    """A package of an extra is not installed; the message names the extra.

    A configuration or data may need the package, so handlers of either kind of error catch this error.
    """


class StepSizeError(ValueError):
    """A tensor of step sizes of which one is zero or no number, as a learned one may become."""


def memory_error(error: BaseException) -> str | None:
    """Return the allocation that failed, in one line, or None for another error.

    Args:
        error: the exception. PyTorch raises a plain RuntimeError where the CPU's memory runs out.

    Example:
        >>> memory_error(RuntimeError("can't allocate memory: you tried to allocate 8 bytes"))
        'you tried to allocate 8 bytes'
        >>> memory_error(RuntimeError("shapes do not match")) is None
        True
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    for words in ("can't allocate memory: ", "Storage size calculation overflowed"):
        if isinstance(error, RuntimeError) and words in line:
            return line.partition(words)[2] if words.endswith(" ") else line
    # by name, without PyTorch
    return line if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def _spelt(character: str) -> str:
    harmless = unicodedata.category(character) not in ("Cc", "Cs") and character not in DIRECTIONS
    return character if harmless or character in "\n\t" else ascii(character)[1:-1]
