"""Errors that a user can act on, each with a message of one line, and helpers that write such messages.

This module does not import PyTorch, because the command line imports it at startup.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping

# Unicode controls of writing direction: they can make a text look like a different text
DIRECTIONS = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}


def folded(name: str) -> str:
    """Return a name in lower case, with its letters and digits only, to compare spellings."""
    return re.sub(r"[\W_]+", "", name.lower())


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the choice whose spelling is closest to `name`; case, spaces and punctuation do not count.

    Args:
        name: the requested name.
        choices: the existing names; at least one.

    Returns:
        The closest choice; the first of several that are equally close.
    """
    ordered = list(choices)
    if not ordered:
        raise ValueError(f"`choices` must hold at least one name to compare with {name!r}; got 0.")

    def likeness(choice: str) -> float:
        return difflib.SequenceMatcher(None, folded(name), folded(choice)).ratio()

    return max(ordered, key=likeness)


def unknown(
    kind: str, name: object, choices: Iterable[str], others: Mapping[str, tuple[str, ...]] | None = None
) -> ValueError:
    """Return, without raising it, the error for a name that does not exist.

    Args:
        kind: the kind of the name, in the singular: "mixer", "mode", "recipe".
        name: the requested name.
        choices: the existing names.
        others: further names that users may know, each with the choices that it stands for.

    Returns:
        A ValueError that gives the nearest match, or the choices that the nearest name stands for, and lists
        all choices.
    """
    ordered = list(choices)
    if not ordered:
        return ValueError(f"there is no {kind} {name!r}, and none to choose from.")
    others = others or {}
    closest = nearest(str(name), [*ordered, *others])
    *first, last = map(repr, others.get(closest, (closest,)))
    meant = f"{', '.join(first)} or {last}" if first else last
    listed = ", ".join(map(repr, ordered))
    return ValueError(f"there is no {kind} {name!r}; did you mean {meant}? Choose from: {listed}.")


def unknown_argument(of: str, name: str, known: Iterable[str]) -> ValueError:
    """Return, without raising it, the error for an argument that something does not take; see `unknown`."""
    return unknown(f"argument of {of} called", name, known)


def printable(text: object) -> str:
    r"""Return a text with its control characters escaped, such as the start of a terminal escape sequence.

    Newlines and tabs stay. Bytes of a file name that are not valid UTF-8 cannot be printed and are escaped.
    """
    return "".join(map(_spelt, str(text)))


class DataError(ValueError):
    """Text, a tokenizer or images cannot be used; the message is one line that a user can act on."""


class TrainError(Exception):
    """Base class of the errors below: catch it to report a run that ended early in one line."""


class ConfigError(TrainError, ValueError):
    """The configuration cannot be trained."""


class UntrustedCodeError(ConfigError):
    """A stored configuration would run code from a third party."""


class RunFolderError(TrainError, ValueError):
    """The folder is not a run, is not finished, or already contains a run."""


class CheckpointError(TrainError):
    """A checkpoint could not be written or read."""


class DivergedError(TrainError, ValueError):
    """The loss or its gradient became NaN or infinite, or the data of a stream are."""


class InterruptedRunError(TrainError):
    """The run was asked to stop, and stopped after writing its checkpoint."""


class LostProcessError(TrainError):
    """Another process that trains the model has ended, or cannot be reached."""


class MissingExtraError(ConfigError, DataError, ImportError):
    """A package of an extra is not installed; the message names the extra.

    A configuration or data may need the package, so handlers of either kind of error catch this error.
    """


class StepSizeError(ValueError):
    """A tensor of step sizes has a value that is zero, negative or NaN; learned step sizes may reach it."""


def memory_error(error: BaseException) -> str | None:
    """Return the failed allocation in one line, or None if the error is not about memory.

    Args:
        error: the exception. PyTorch raises a plain RuntimeError when the CPU's memory runs out.
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    for words in ("can't allocate memory: ", "Storage size calculation overflowed"):
        if isinstance(error, RuntimeError) and words in line:
            return line.partition(words)[2] if words.endswith(" ") else line
    # compared by name, because this module does not import PyTorch
    return line if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" else None


def _spelt(character: str) -> str:
    harmless = unicodedata.category(character) not in ("Cc", "Cs") and character not in DIRECTIONS
    return character if harmless or character in "\n\t" else ascii(character)[1:-1]
