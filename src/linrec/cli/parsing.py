"""Parsing of command options, with error messages of one line."""

import ast
import contextlib
import dataclasses
import io
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tyro

from linrec.errors import ConfigError, TrainError, nearest

T = TypeVar("T")


def parse(options: type[T], words: list[str], program: str) -> T:
    """Parse options; an invalid option raises a ConfigError with a message of one line."""
    complaint = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            if not {"-h", "--help"} & {*words}:
                # tyro omits colours and frames where the output is not a terminal
                stack.enter_context(contextlib.redirect_stdout(complaint))
            stack.enter_context(contextlib.redirect_stderr(complaint))
            parsed, unknown_words = tyro.cli(options, args=words, prog=program, return_unknown_args=True)
    except SystemExit as stop:
        if stop.code:
            raise ConfigError(_message(complaint.getvalue())) from None
        raise
    if unknown_words:
        word = unknown_words[0].split("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected {word!r}; `{program} --help` lists all options.")
        hint = nearest(word, option_names(options))
        raise ConfigError(f"there is no option {word}; did you mean {hint}? `{program} --help` lists all.")
    return parsed


def _message(text: str) -> str:
    """Return tyro's message as one line, without its frame, its title and the references below it."""
    blocks: list[list[str]] = [[]]
    # some versions of tyro draw the frame even where the output is not a terminal
    for line in map(str.strip, text.translate(str.maketrans("╭╮╰╯─", "-----", "│")).splitlines()):
        if line.startswith("-") and line.endswith("-"):
            blocks.append([])
        else:
            blocks[-1].append(line)
    # tyro's explanation follows after an empty line
    return " ".join(itertools.takewhile(bool, blocks[min(1, len(blocks) - 1)]))


def option_names(options: type[Any], prefix: str = "--") -> list[str]:
    """Return the names of all options as users type them, such as "--optim.weight-decay"."""
    names = []
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        name = prefix + field.name.replace("_", "-")
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            names += option_names(typing.cast(type, kind), f"{name}.")
        else:
            names.append(name)
            if kind is bool:
                names.append(f"{prefix}no-{field.name.replace('_', '-')}")
    return names


def peek(words: list[str], option: str) -> list[str] | None:
    """Return the values of an option before parsing: None if it is absent, [] if it has no values."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == option:
            following = itertools.takewhile(lambda w: not w.startswith("-"), words[place + 1 :])
            return [value, *following] if value else [*following]
    return None


def named_arguments(option: str, words: Sequence[str]) -> Mapping[str, Any]:
    """Return the arguments in words such as "r_min=0.9"; values that are no Python literals are texts."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise ConfigError(f"--{option.replace('_', '-')} must be name=value; got {word!r}.")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[name] = value
    return found


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a TypeError or ValueError about a name or value that the user gave into a ConfigError."""
    try:
        yield
    except TrainError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
