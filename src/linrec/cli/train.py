"""`linrec train RECIPE`: train a model, or go on with a run."""

import functools
import math
import shlex
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors, parse, peek
from linrec.tasks import judged_by
from linrec.train import ConfigError, TrainConfig, fit, get_recipe, load_run, recipe_names
from linrec.train.display import Display
from linrec.train.options import config_of, options_type
from linrec.train.processes import program
from linrec.train.recipes import recipe_summary

HELP = """\
usage: linrec train RECIPE [--section.option VALUE ...]
       linrec train --resume RUN

Train a model into a run folder, by default runs/RECIPE.

recipes:
{recipes}

examples:
  linrec train memory-horizon --loop.seed 1 --out runs/one
  linrec train memory-horizon \\
      --model.mixer-args.transition fixed
  linrec train memory-horizon \\
      --model.mixer gla gla attention \\
      --model.mixer-args.attention.window 128
  linrec train --resume runs/one
  torchrun --nproc-per-node 2 -m linrec train memory-horizon \\
      --loop.strategy fsdp

`linrec train RECIPE --help` lists all options.
"""


def run(words: list[str]) -> int:
    """Run `linrec train`."""
    if not words or words[0] in ("-h", "--help"):
        recipes = [f"  {name}\n{_indented(recipe_summary(name))}" for name in recipe_names()]
        text = HELP.format(recipes="\n".join(recipes))
        print(text, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, rest = ("", words) if words[0].startswith("-") else (words[0], words[1:])
    folder_to_resume = peek(rest, "--resume")
    if folder_to_resume == []:
        raise ConfigError("--resume needs a run folder: `linrec train --resume runs/memory-horizon`.")
    resume = None if folder_to_resume is None else folder_to_resume[0]
    if not name and resume is None:
        listed = ", ".join(recipe_names())
        raise ConfigError(f"name a recipe first, or a run folder after --resume; recipes: {listed}.")

    config = _base_config(name, resume, trust_code="--trust-code" in rest)
    with one_line_errors():
        options_of_mixers = options_type(config, peek(rest, "--model.mixer"))
    options = parse(options_of_mixers, rest, f"linrec train {config.name}")
    if options.resume is not None and options.out not in (None, options.resume):
        raise ConfigError("--resume continues in its own folder; leave --out out.")
    folder = options.resume or options.out or Path("runs") / config.name
    with one_line_errors():
        config = config_of(options, config.name, config.task.section)
    with Display([config.name]) as display:
        result = fit(
            config,
            folder,
            resume=options.resume is not None,
            progress=functools.partial(display.update, config.name),
            command=shlex.join([*program(), "train", *words]),
        )
    scores = {"test": result.test, "validation": result.validation}
    told = [_told(name, of, judged_by(config.task)) for name, of in scores.items() if of]
    say(", ".join(told) or "no scores: the task has neither test nor validation data")
    best = "" if result.best_step is None else f", the model of step {result.best_step} kept"
    say(f"{result.steps} steps in {result.seconds:.0f} s{best}; all in {folder}")
    return 0


def _base_config(name: str, resume: str | None, *, trust_code: bool) -> TrainConfig:
    """Return the configuration that the options start from."""
    if resume is None:
        with one_line_errors():
            return get_recipe(name)
    config = load_run(resume, trust_code=trust_code).config
    if name.replace("_", "-") not in ("", config.name):
        raise ConfigError(f"{resume} was trained with the recipe {config.name!r}, not {name!r}.")
    return config


def _told(name: str, scores: Mapping[str, Any], by: str) -> str:
    """Return what is said of a split: how much is right, how likely or how far off it is."""
    if by == "accuracy":
        return f"{name} accuracy {scores['accuracy']:.4f}"
    if by == "mse":
        # the error as a share of the targets' spread, where they have any
        share = "" if scores["nrmse"] is None else f" (NRMSE {scores['nrmse']:.4f})"
        return f"{name} mean squared error {scores['loss']:.4g}{share}"
    return f"{name} loss {scores['loss']:.4f} (perplexity {math.exp(min(scores['loss'], 700)):.2f})"


def _indented(text: str) -> str:
    # narrow enough for half a screen
    return textwrap.fill(text, 60, initial_indent=" " * 6, subsequent_indent=" " * 6)
