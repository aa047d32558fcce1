"""`linrec inspect RUN`: show the memory of a trained model: transitions, time scales, token mixing."""

import shlex

from rich.console import Console
from rich.table import Table

from linrec.cli.options import InspectOptions
from linrec.cli.parsing import one_line_errors, parse
from linrec.errors import printable
from linrec.lab.inspection import write_inspection
from linrec.lab.inspection.page import table
from linrec.lab.train import load_run
from linrec.lab.train.fabric import device_of


def run(words: list[str]) -> int:
    """Run `linrec inspect`."""
    options = parse(InspectOptions, words, "linrec inspect")
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
