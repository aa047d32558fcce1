"""`linrec eval RUN`: perplexity of a language model over the length of its context."""

import math
import shlex

from rich.console import Console
from rich.table import Table

from linrec.cli.device import device_of
from linrec.cli.options import EvalOptions
from linrec.cli.parsing import one_line_errors, parse
from linrec.errors import printable
from linrec.evaluation import Evaluation, Score, choose_text, evaluate_run, parse_lengths
from linrec.train import load_run


def run(words: list[str]) -> int:
    """Run `linrec eval`."""
    options = parse(EvalOptions, words, "linrec eval")
    with one_line_errors():
        lengths = None if options.lengths is None else parse_lengths(options.lengths)
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
            command=shlex.join(["linrec", "eval", *words]),
        )
    # file names may contain square brackets, which rich would read as markup
    console = Console(markup=False)
    counts = found.text.tokens.counts
    console.print(
        printable(
            f"{found.text.title}: {counts.tokens:,} tokens, {counts.words:,} words in {counts.lines:,} "
            f"lines, {counts.bytes:,} bytes"
        ),
        soft_wrap=True,
        highlight=False,
    )
    console.print(_table(found))
    if any(score.length == found.trained for score in found.scores):
        console.print("* the length in training", style="dim")
    console.print(
        printable(f"wrote perplexity.json and perplexity.png to {found.folder}"),
        soft_wrap=True,
        highlight=False,
    )
    return 0


def _table(found: Evaluation) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("window", no_wrap=True)
    # perplexities first, then bits
    for title in ("per token", "per word", "per byte", "bits/byte", "bits/char"):
        table.add_column(title, justify="right", no_wrap=True)
    for score in found.scores:
        table.add_row(_window(score, found.trained), *map(_number, _values(score)))
    return table


def _window(score: Score, trained: int) -> str:
    if score.length is None:
        return "carried"
    return f"{score.length:,}{'*' * (score.length == trained)}"


def _values(score: Score) -> list[float]:
    bits = [score.bits_per_byte, score.bits_per_character]
    return [score.perplexity, score.word_perplexity, score.byte_perplexity, *bits]


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    if value < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.2e}"
