"""`linrec train RECIPE`: train a model, or resume a run."""

import dataclasses
import math
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linrec.cli.help import train_help
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors, parse, peek
from linrec.cli.stopping import CtrlC
from linrec.lab.tasks import LanguageModeling, judged_by
from linrec.lab.train import ConfigError, Progress, TrainConfig, fit, get_recipe, load_run, recipe_names
from linrec.lab.train.display import Display
from linrec.lab.train.options import config_of, most_used, options_type
from linrec.lab.train.processes import program as this_program
from linrec.lab.train.start import Start, open_start


def run(words: list[str]) -> int:
    """Run `linrec train`."""
    if not words:
        print(train_help(), end="", file=sys.stderr)
        return 2
    name, rest = ("", words) if words[0].startswith("-") else (words[0], words[1:])
    folder_to_resume = peek(rest, "--resume")
    if folder_to_resume == []:
        raise ConfigError("--resume needs a run folder: `linrec train --resume runs/memory-horizon`.")
    resume = None if folder_to_resume is None else folder_to_resume[0]
    if not name and resume is None:
        listed = ", ".join(recipe_names())
        raise ConfigError(f"name a recipe first, or a run folder after --resume; recipes: {listed}.")

    trust_code = "--trust-code" in rest
    given = peek(rest, "--init-from")
    if given is not None and (not given or resume is not None):
        raise ConfigError("--init-from needs a run folder or a checkpoint, and excludes --resume.")
    config = _base_config(name, resume, trust_code=trust_code)
    start = None
    if given is not None:
        start = open_start(given[0], trust_code=trust_code)
        config = _continued(config, start)
    with one_line_errors():
        options_of_mixers = options_type(config, peek(rest, "--model.mixer"))
    program = f"linrec train {config.name}"
    if {"-h", "--help"} & {*rest}:
        print(f"The most common options; `{program} --help-all` shows every option.\n")
        options_of_mixers = most_used(options_of_mixers)
    rest = ["--help" if word == "--help-all" else word for word in rest]
    options = parse(options_of_mixers, rest, program)
    if options.resume is not None and options.out not in (None, options.resume):
        raise ConfigError("--resume continues in its own folder; leave --out out.")
    folder = options.resume or options.out or Path("runs") / config.name
    with one_line_errors():
        config = config_of(options, config.name, config.task.section)
    ctrl_c = signal.getsignal(signal.SIGINT)

    def report(progress: Progress) -> None:
        if isinstance(ctrl_c, CtrlC):
            # from the first step on, the run takes the first Ctrl-C, and hands over the second
            ctrl_c.again = True
        display.update(config.name, progress)

    with Display([config.name]) as display:
        result = fit(
            config,
            folder,
            resume=options.resume is not None,
            progress=report,
            command=shlex.join([*this_program(), "train", *words]),
            init=None if start is None else start.model,
        )
    scores = {"test": result.test, "validation": result.validation}
    told = [_told(name, of, judged_by(config.task)) for name, of in scores.items() if of]
    say(", ".join(told) or "no scores: the task has neither test nor validation data")
    best = "" if result.best_step is None else f", kept the model of step {result.best_step}"
    say(f"{result.steps} steps in {result.seconds:.0f} s{best}; all in {folder}")
    return 0


def _base_config(name: str, resume: str | None, *, trust_code: bool) -> TrainConfig:
    """Return the configuration of the recipe or the run, before command line options change it."""
    if resume is None:
        with one_line_errors():
            return get_recipe(name)
    config = load_run(resume, trust_code=trust_code).config
    if name.replace("_", "-") not in ("", config.name):
        raise ConfigError(f"{resume} was trained with the recipe {config.name!r}, not {name!r}.")
    return config


def _continued(config: TrainConfig, start: Start) -> TrainConfig:
    """Return the configuration with the model that training starts from, and with the model's tokenizer."""
    if not isinstance(config.task, LanguageModeling):
        raise ConfigError(
            f"--init-from is for language models; the recipe {config.name!r} does not train a language model."
        )
    tokenizer = start.tokenizer or config.task.tokenizer
    task = dataclasses.replace(config.task, tokenizer=tokenizer, vocab_size=start.model.config.vocab_size)
    return dataclasses.replace(config, task=task, model=start.model.config)


def _told(name: str, scores: Mapping[str, Any], by: str) -> str:
    """Format the scores of a split by the task's metric: accuracy, mean squared error, or loss."""
    score = scores.get("accuracy" if by == "accuracy" else "loss")
    if score is None:
        # of a file that linrec did not write
        return f"{name}: no score"
    if by == "accuracy":
        return f"{name} accuracy {score:.4f}"
    if by == "mse":
        # the NRMSE is None where the targets' standard deviation is 0
        share = "" if scores.get("nrmse") is None else f" (NRMSE {scores['nrmse']:.4f})"
        return f"{name} mean squared error {score:.4g}{share}"
    return f"{name} loss {score:.4f} (perplexity {math.exp(min(score, 700)):.2f})"
