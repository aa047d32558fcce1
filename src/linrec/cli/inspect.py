"""`linrec inspect RUN`: what a model remembers and forgets."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from linrec.cli.device import DeviceName, device_of
from linrec.cli.parsing import one_line_errors, parse
from linrec.errors import printable
from linrec.inspection import write_inspection
from linrec.inspection.page import table
from linrec.inspection.write import N_TOKENS
from linrec.tasks import SplitName
from linrec.train import load_run


@dataclass(frozen=True)
class Options:
    """Show forget values, token-mixing matrices, and transitions over a text.

    Writes inspection.html, its pictures as PNG files, and inspection.json.

    Args:
        run: run folder.
        prompt: the text to show the model.
        data: a text file, a folder of them, or a glob; without either, the run's own text or task.
        split: which split; by default one that was held out.
        tokens: how many tokens of it, from its beginning.
        matrices: token-mixing matrices, which are possible up to 1,024 tokens.
        out: folder to write to; by default RUN/inspection.
        device: where to compute; "auto" takes CUDA, then MPS, then the CPU.
        trust_code: run the code of a mixer that the run names by an import path.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    prompt: str | None = None
    data: Annotated[Path | None, tyro.conf.arg(name="data.path", aliases=["--data"])] = None
    split: SplitName | None = None
    tokens: int = N_TOKENS
    matrices: bool = True
    out: Path | None = None
    device: DeviceName = "auto"
    trust_code: bool = False


def run(words: list[str]) -> int:
    """Run `linrec inspect`."""
    options = parse(Options, words, "linrec inspect")
    with one_line_errors():
        found = write_inspection(
            load_run(options.run, trust_code=options.trust_code),
            prompt=options.prompt,
            path=options.data,
            split=options.split,
            n_tokens=options.tokens,
            matrices=options.matrices,
            out=options.out,
            device=device_of(options.device),
            command=shlex.join(["linrec", "inspect", *words]),
        )
    n_tokens, tokens, console = len(found.tokens.labels), found.tokens, Console(markup=False)
    some = f"the first {n_tokens:,} of" if n_tokens < tokens.of else "all"
    console.print(printable(f"{tokens.source}: {some} {tokens.of:,} tokens"), soft_wrap=True, highlight=False)
    head, rows = table(found.layers)
    shown = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for title in head:
        shown.add_column(title, justify="left" if title == "layer" else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for sentence in found.missing:
        console.print(printable(sentence), soft_wrap=True, highlight=False)
    console.print(printable(f"wrote {found.page}"), soft_wrap=True, highlight=False)
    return 0
