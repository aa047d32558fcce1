"""`linrec eval RUN`: perplexity of a language model over the length of its context."""

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from linrec.cli.device import DeviceName, device_of
from linrec.cli.parsing import one_line_errors, parse
from linrec.errors import printable
from linrec.evaluation import Evaluation, Score, choose_text, evaluate_run, parse_lengths
from linrec.evaluation.perplexity import BATCH_TOKENS
from linrec.generation.precision import Precision
from linrec.tasks import SplitName
from linrec.train import load_run


@dataclass(frozen=True)
class Data:
    """Another text than the run's own, in the tokens of the run's tokenizer.

    A text without splits is taken whole.

    Args:
        path: a text file, a folder of them, or a glob.
        dataset: name or path of a data set of Hugging Face.
        dataset_config: which configuration of the data set, where it has several.
        text_column: the column of the data set that holds the text.
    """

    path: Annotated[Path | None, tyro.conf.arg(aliases=["--data"])] = None
    dataset: str | None = None
    dataset_config: str | None = None
    text_column: str = "text"


@dataclass(frozen=True)
class Options:
    """Measure perplexity from windows of several lengths: train short, test long.

    Windows do not overlap, and each window starts from an empty state.

    Every token but the first is predicted once, whatever the length.

    Writes perplexity.json and perplexity.png.

    Args:
        run: run folder of a language model.
        data: another text than the run's own.
        split: which split; by default the test split, or the validation split where there is none.
        lengths: tokens of a window, separated by commas; three dots go on in equal steps. By default that of
            training and 512,768,...,2048,3072,...,14336, as far as the text goes.
        carry: also evaluate with the state carried through the whole text.
        out: folder for the results; by default the run folder.
        device: where to compute; "auto" takes CUDA, then MPS, then the CPU.
        trust_code: run the code of a mixer that the run names by an import path.
        precision: float32 throughout, or bfloat16 autocast.
        batch_tokens: tokens that go through the model at once; fewer need less memory.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    data: Data = field(default_factory=Data)
    split: SplitName | None = None
    lengths: str | None = None
    carry: bool = False
    out: Path | None = None
    device: DeviceName = "auto"
    trust_code: bool = False
    precision: Precision = "32-true"
    batch_tokens: int = BATCH_TOKENS


def run(words: list[str]) -> int:
    """Run `linrec eval`."""
    options = parse(Options, words, "linrec eval")
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
    # names of files may have square brackets
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
        console.print("* the length of training", style="dim")
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
