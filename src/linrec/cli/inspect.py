"""`linrec inspect RUN`: show the memory of a trained model: transitions, time scales, token mixing."""

import shlex
from collections.abc import Sequence

from linrec.cli.display import show_table
from linrec.cli.options import InspectOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors
from linrec.lab.inspection import choose_tokens, write_inspection
from linrec.lab.inspection.write import table
from linrec.lab.train import load_run
from linrec.lab.train.fabric import device_of


def run(options: InspectOptions, words: Sequence[str]) -> int:
    """Run `linrec inspect`."""
    with one_line_errors():
        trained = load_run(options.run, trust_code=options.trust_code)
        tokens = choose_tokens(
            trained, options.tokens, prompt=options.prompt, path=options.data, split=options.split
        )
        found = write_inspection(
            trained,
            tokens,
            matrices=options.matrices,
            out=options.out,
            device=device_of(options.device),
            command=shlex.join(["linrec", *words]),
        )
    n_tokens = len(tokens.labels)
    some = f"the first {n_tokens:,} of" if n_tokens < tokens.of else "all"
    say(f"{tokens.source}: {some} {tokens.of:,} tokens")
    shown = table(found.layers)
    show_table(shown.head, [[cell.text for cell in row] for row in shown.rows])
    for sentence in found.missing:
        say(sentence)
    say(f"wrote {found.page}")
    return 0
