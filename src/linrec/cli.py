"""The command line: `linrec train`, `linrec report`, `linrec demo`; one function per command.

What the user got wrong is answered in one line on standard error, with exit status 2; a run that could not go
on ends with status 1, one that was stopped with 130. A traceback is a bug of linrec.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
import shlex
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from linrec import __version__
from linrec.demo import run_demo
from linrec.errors import nearest, unknown
from linrec.tasks import ScoredTask
from linrec.train import (
    ConfigError,
    InterruptedRunError,
    RunFolderError,
    TrainConfig,
    TrainError,
    fit,
    get_recipe,
    load_run,
    recipe_names,
)
from linrec.train.display import Display
from linrec.train.options import config_of, option_names, options_type
from linrec.train.recipes import recipe_summary

T = TypeVar("T")

HELP = """\
usage: linrec COMMAND ...

Linear recurrent sequence models.

commands:
  train RECIPE   train a model
  report RUN...  pictures and tables of trained models
  demo           train two small models, and report

options:
  --version      print the version

`linrec COMMAND --help` says more.
"""

TRAIN_HELP = """\
usage: linrec train RECIPE [--section.option VALUE ...]
       linrec train --resume RUN

Train a model into a run folder, by default runs/RECIPE.

recipes:
{recipes}

examples:
  linrec train memory-horizon --loop.seed 1 --out runs/one
  linrec train memory-horizon \\
      --model.mixer-args.transition fixed
  linrec train --resume runs/one

`linrec train RECIPE --help` lists all options.
"""


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html with its pictures, from run folders alone.

    Args:
        runs: run folders.
        out: folder for the report; by default that of the one run, or the one that all runs lie in.
    """

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")
    ]
    out: Path | None = None


@dataclass(frozen=True)
class DemoOptions:
    """Train two small GateLoops side by side and write a report.

    Args:
        out: folder for both runs and the report; runs of an earlier demo in it are replaced.
    """

    out: Path = Path("runs/demo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after "linrec"; None takes those of the process.

    Returns:
        The exit status: 0; 2 for what the user got wrong, 1 for a run that failed, 130 for one stopped.

    Example:
        >>> main(["--version"])
        0.1.0
        0
    """
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read our output has left, as `head` does; the interpreter flushes again, and must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(words: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"train": train, "report": report, "demo": demo}
    if not words:
        print(HELP, end="", file=sys.stderr)
        return 2
    if words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    try:
        if words[0] not in commands:
            raise ConfigError(unknown("command", words[0], commands))
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # complex states have kernels of their own; nothing is lost, and users can change nothing about it
            warnings.filterwarnings(
                "ignore", message="Torchinductor does not support code generation for complex"
            )
            return commands[words[0]](words[1:])
    except (ConfigError, RunFolderError) as error:
        return _say(error, 2)
    except InterruptedRunError as error:
        return _say(error, 130)
    except KeyboardInterrupt:
        return _say("stopped.", 130)
    except SystemExit:
        # help was asked for and given
        return 0
    except TrainError as error:
        return _say(error, 1)


def train(words: list[str]) -> int:
    """Run `linrec train`."""
    if not words or words[0] in ("-h", "--help"):
        recipes = [f"  {name}\n{_indented(recipe_summary(name))}" for name in recipe_names()]
        text = TRAIN_HELP.format(recipes="\n".join(recipes))
        print(text, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, rest = ("", words) if words[0].startswith("-") else (words[0], words[1:])
    resume = _peek(rest, "--resume")
    if resume == "":
        raise ConfigError("--resume needs a run folder: `linrec train --resume runs/memory-horizon`.")
    if not name and resume is None:
        listed = ", ".join(recipe_names())
        raise ConfigError(f"name a recipe first, or a run folder after --resume; recipes: {listed}.")

    config = _base_config(name, resume, _peek(rest, "--model.mixer") or None)
    options = _parse(options_type(config), rest, f"linrec train {config.name}")
    if options.resume is not None and options.out not in (None, options.resume):
        raise ConfigError("--resume continues in its own folder; leave --out out.")
    folder = options.resume or options.out or Path("runs") / config.name
    with _one_line_errors():
        config = config_of(options, config.name, config.task.section)
    with Display([config.name]) as display:
        result = fit(
            config,
            folder,
            resume=options.resume is not None,
            progress=functools.partial(display.update, config.name),
            command=shlex.join(["linrec", "train", *words]),
        )
    scores = {"test": result.test, "validation": result.validation}
    told = [_told(name, of, isinstance(config.task, ScoredTask)) for name, of in scores.items() if of]
    print(", ".join(told) or "no scores: the task has neither test nor validation data")
    print(f"{result.steps} steps in {result.seconds:.0f} s; all in {folder}")
    return 0


def report(words: list[str]) -> int:
    """Run `linrec report`."""
    # imported here: matplotlib takes its time
    from linrec.report import write_report

    options = _parse(ReportOptions, words, "linrec report")
    if not options.runs:
        raise ConfigError("name at least one run folder: linrec report RUN ...")
    for run in options.runs:
        load_run(run)
    together = Path(os.path.commonpath([run.absolute().parent for run in options.runs]))
    out = options.out or (options.runs[0] if len(options.runs) == 1 else together)
    print(f"wrote {write_report(options.runs, out)}")
    return 0


def demo(words: list[str]) -> int:
    """Run `linrec demo`."""
    run_demo(_parse(DemoOptions, words, "linrec demo").out)
    return 0


def _base_config(name: str, resume: str | None, mixer: str | None) -> TrainConfig:
    """Return the configuration that the options start from."""
    if resume is None:
        with _one_line_errors():
            config = get_recipe(name)
    else:
        config = load_run(resume).config
        if name.replace("_", "-") not in ("", config.name):
            raise ConfigError(f"{resume} was trained with the recipe {config.name!r}, not {name!r}.")
    if mixer is None or mixer == config.model.mixer:
        return config
    # another mixer has other arguments: its own defaults, not those of the recipe's mixer
    with _one_line_errors():
        return dataclasses.replace(
            config, model=dataclasses.replace(config.model, mixer=mixer, mixer_args={})
        )


def _parse(options: type[T], words: list[str], program: str) -> T:
    """Parse options; what is wrong with them comes as a ConfigError of one line."""
    complaint = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            if not {"-h", "--help"} & {*words}:
                # what is no terminal gets no colours and no frames
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
            raise ConfigError(f"unexpected {word!r}; `{program} --help` lists what can be given.")
        hint = nearest(word, option_names(options))
        raise ConfigError(f"there is no option {word}; did you mean {hint}? `{program} --help` lists all.")
    return parsed


def _message(text: str) -> str:
    """Return what tyro says as one line, without the frame, the title above and the references below."""
    blocks: list[list[str]] = [[]]
    # some versions draw the frame whatever they write to
    for line in map(str.strip, text.translate(str.maketrans("╭╮╰╯─", "-----", "│")).splitlines()):
        if line.startswith("-") and line.endswith("-"):
            blocks.append([])
        else:
            blocks[-1].append(line)
    # what follows an empty line is tyro's reasoning
    return " ".join(itertools.takewhile(bool, blocks[min(1, len(blocks) - 1)]))


def _told(name: str, scores: Mapping[str, Any], scored: bool) -> str:
    """Return what is said of a split: how much is right, or, of language, how likely it is."""
    if scored:
        return f"{name} accuracy {scores['accuracy']:.4f}"
    return f"{name} loss {scores['loss']:.4f} (perplexity {math.exp(min(scores['loss'], 700)):.2f})"


def _peek(words: list[str], option: str) -> str | None:
    """Return the value of an option that others depend on: None without it, "" where it has none."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == option:
            return value or next((w for w in words[place + 1 : place + 2] if not w.startswith("-")), "")
    return None


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn the ValueErrors of names and values that the user gave into ConfigErrors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _indented(text: str) -> str:
    # narrow enough for half a screen
    return textwrap.fill(text, 60, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _show_warning(message: Warning | str, *rest: Any, **named: Any) -> None:
    print(f"linrec: {message}", file=sys.stderr)


def _say(message: object, status: int) -> int:
    print(f"linrec: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
