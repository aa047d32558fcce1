"""`linrec eval RUN`: perplexity of a language model over the length of its context, or tasks of lm-eval."""

import logging
import math
import shlex
from collections.abc import Sequence

from linrec.cli.display import show_table
from linrec.cli.options import EvalOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors
from linrec.errors import ConfigError
from linrec.lab.evaluation import choose_text, evaluate_run, parse_lengths
from linrec.lab.train import load_run
from linrec.lab.train.fabric import device_of


def run(options: EvalOptions, words: Sequence[str]) -> int:
    """Run `linrec eval`."""
    command = shlex.join(["linrec", *words])
    if options.tasks:
        return _run_tasks(options, command)
    with one_line_errors():
        lengths = None if options.lengths is None else parse_lengths(options.lengths)
        _check(options, OF_TASKS, "needs --tasks")
        device, trained = device_of(options.device), load_run(options.run, trust_code=options.trust_code)
        text = choose_text(trained, **vars(options.data), split=options.split)
        found = evaluate_run(
            trained,
            text,
            lengths=lengths,
            carry=options.carry,
            out=options.out,
            device=device,
            precision=options.precision,
            batch_tokens=options.batch_tokens,
            command=command,
        )
    counts = found.text.tokens.counts
    say(
        f"{found.text.title}: {counts.tokens:,} tokens, {counts.words:,} words in {counts.lines:,} "
        f"lines, {counts.bytes:,} bytes"
    )
    titles = ("window", "per token", "per word", "per byte", "bits/byte", "bits/char")
    rows = []
    for score in found.scores:
        window = "carried" if score.length is None else f"{score.length:,}"
        bits = (score.bits_per_byte, score.bits_per_character)
        numbers = (score.perplexity, score.word_perplexity, score.byte_perplexity, *bits)
        rows.append((window + "*" * (score.length == found.trained), *map(_number, numbers)))
    show_table(titles, rows)
    if any(score.length == found.trained for score in found.scores):
        say("* the length in training")
    say(f"wrote perplexity.json and perplexity.png to {found.folder}")
    return 0


# options that tasks do without, and options of tasks alone
OF_TEXTS = ("data", "split", "lengths", "carry", "out")
OF_TASKS = ("tasks_path", "shots", "limit")


def _check(options: EvalOptions, names: tuple[str, ...], reason: str) -> None:
    defaults = EvalOptions(options.run)
    for name in names:
        if getattr(options, name) != getattr(defaults, name):
            raise ConfigError(f"--{name.replace('_', '-')} {reason}.")


def _run_tasks(options: EvalOptions, command: str) -> int:
    """Run tasks of lm-eval."""
    with one_line_errors():
        _check(options, OF_TEXTS, "and --tasks exclude each other; leave one of them out")
        # it needs an extra
        from linrec.lab.publishing.harness import evaluate_tasks

        # notes on arguments of its own
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        trained = load_run(options.run, trust_code=options.trust_code)
        found = evaluate_tasks(
            trained,
            options.tasks,
            include=options.tasks_path,
            shots=options.shots,
            limit=options.limit,
            batch_tokens=options.batch_tokens,
            device=device_of(options.device),
            precision=options.precision,
            command=command,
        )
    rows = [
        (task, measure, f"{value:.4f}")
        for task, measures in found.items()
        for measure, value in measures.items()
    ]
    show_table(("task", "measure", "value"), rows, left=2)
    say(f"wrote tasks.json to {options.run}")
    return 0


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    if value < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.2e}"
