"""Run the command that a command line names; turn errors into a message of one line and an exit status."""

import contextlib
import importlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from linrec import __version__
from linrec.cli.output import say
from linrec.cli.stopping import ignore_ctrl_c, stopped_in_one_line
from linrec.errors import (
    ConfigError,
    DataError,
    InterruptedRunError,
    LostProcessError,
    RunFolderError,
    TrainError,
    memory_error,
    unknown,
)
from linrec.extras import check_extra

# each command is a file of this folder, imported when it is called
COMMANDS = {
    "train": "train RECIPE   train a model",
    "generate": "generate RUN   continue a text with a language model",
    "serve": "serve RUN      answer OpenAI's clients over HTTP",
    "eval": "eval RUN       measure perplexity by context length",
    "inspect": "inspect RUN    show what a model remembers and forgets",
    "report": "report RUN...  write pictures and tables of trained models",
    "bench": "bench SUITE    compare mixers on the tasks of a suite",
    "learn": "learn STREAM   learn online from a stream without end",
    "convert": "convert FOLDER turn another library's checkpoint into a run folder",
    "publish": "publish RUN    write a folder that Hugging Face transformers loads",
    "demo": "demo           train two small models, and write a report",
}

# beside "lab"
EXTRAS_OF = {"serve": ("serve",)}

# for every command, the options that reduce its memory use
LESS_MEMORY = {
    "train": "Pass a smaller --loop.batch-size, a larger --loop.accumulate, or a smaller --model.d-model.",
    "generate": "Pass a shorter prompt, or another --device.",
    "serve": "Pass fewer --slots, smaller --snapshots, or another --device.",
    "eval": "Pass fewer --batch-tokens, shorter --lengths, or another --device.",
    "inspect": "Pass fewer --tokens, --no-matrices, or another --device.",
    "bench": "Pass fewer --parameters, or fewer --workers.",
    "learn": "Pass fewer --rows, a smaller --chunk, or a smaller --d-model.",
}

# seconds that a failed process waits, so that the first process can report the error itself
PATIENCE = 20

HELP = """\
usage: linrec COMMAND ...

Linear recurrent sequence models.

commands:
{commands}

options:
  --version      print the version

`linrec COMMAND --help` shows the options of a command.
"""


def run(words: list[str]) -> int:
    """Run the command that the words after "linrec" name, and return the exit status."""
    with _one_voice():
        return _run(words)


def _is_first() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def _one_voice() -> Iterator[None]:
    """Silence all processes of torchrun except the first; the traceback of a bug comes from every process."""
    if _is_first():
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _run(words: list[str]) -> int:
    text = HELP.format(commands="\n".join(f"  {line}" for line in COMMANDS.values()))
    if not words:
        print(text, end="", file=sys.stderr)
        return 2
    if words[0] in ("-h", "--help"):
        print(text, end="")
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    try:
        if words[0] not in COMMANDS:
            raise ConfigError(unknown("command", words[0], COMMANDS))
        for extra in ("lab", *EXTRAS_OF.get(words[0], ())):
            check_extra(extra, f"`linrec {words[0]}`")
        with warnings.catch_warnings(), _quiet_threads():
            warnings.showwarning = _show_warning
            # complex states have their own kernels, so the warning describes no loss that users could avoid
            warnings.filterwarnings(
                "ignore", message="Torchinductor does not support code generation for complex"
            )
            return _run_command(words)
    except (ConfigError, DataError, RunFolderError) as error:
        return _say(error, 2)
    except InterruptedRunError as error:
        return _say(error, 130)
    except LostProcessError as error:
        from linrec.lab.train.fabric import says_first

        # any process may be the one that is left, and the others have no voice
        return _say(error, 1, aloud=says_first())
    except KeyboardInterrupt:
        return _say("stopped.", 130)
    except SystemExit:
        # the help was requested and has been printed
        return 0
    except TrainError as error:
        return _say(error, 1)
    except (MemoryError, RuntimeError) as error:
        missing = memory_error(error)
        if missing is None:
            raise
        return _say(f"memory ran out: {missing}. {LESS_MEMORY.get(words[0], '')}".strip(), 1)


def _run_command(words: list[str]) -> int:
    """Print the help of a command, or import its file and run it with its options."""
    from linrec.cli.help import of_command
    from linrec.cli.options import OPTIONS_OF
    from linrec.cli.parsing import parse

    # a command of one word or of two
    name = " ".join(words[: 2 if " ".join(words[:2]) in OPTIONS_OF else 1])
    given: Any = words[len(name.split()) :]
    if of_command(name, given):
        return 0
    if name in OPTIONS_OF:
        # before the slow imports of the command; the options of `train` depend on the recipe
        given = parse(OPTIONS_OF[name], given, f"linrec {name}")
    with stopped_in_one_line():
        command = importlib.import_module(f"linrec.cli.{name.split()[-1]}")
    status: int = command.run(given, words)
    return status


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Hide OSErrors of TensorBoard's thread, such as a full disk; the main thread's next write raises too."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, OSError):
            before(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _show_warning(message: Warning | str, *rest: Any, **named: Any) -> None:
    say(f"linrec: {message}", file=sys.stderr)


def _say(message: object, status: int, *, aloud: bool | None = None) -> int:
    """Write a message, and return the status; `aloud` decides in place of the rank."""
    if status == 130:
        ignore_ctrl_c()
    stream = sys.stderr
    if aloud is not None:
        if aloud:
            say(f"linrec: {message}", file=sys.__stderr__ or stream)
        return status
    # a process that has not imported torch.distributed is not connected
    distributed = sys.modules.get("torch.distributed")
    connected = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if not _is_first() and not connected and status != 130:
        # torchrun ends all processes when a process has failed; give the first process time to report first
        time.sleep(PATIENCE)
        stream = sys.__stderr__ or stream
    say(f"linrec: {message}", file=stream)
    return status
