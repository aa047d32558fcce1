"""Pages of mixers, one for each, made from the code.

A page has the paper, the equations of the module's docstring, the operator and its modes, the state, the
comparisons with released code, and the reference of the class. A file `docs/mixers/NAME.md`, where there is
one, is the section "Use" of the page.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tables
from torch import Tensor

from linrec import mixers

HERE = Path(__file__).parent
PAPERS: dict[str, str] = json.loads((HERE / "papers.json").read_text())
WIDTHS = (64, 256, 1024)


def uri(name: str) -> str:
    """Return where the page of a mixer is."""
    return f"mixers/{name}.md"


def navigation() -> list[dict[str, Any]]:
    """Return the families for the navigation, each with the pages of its mixers."""
    return [
        {family.title: [{mixers.get(name).__name__: uri(name)} for name in names]}
        for family, names in tables.families()
    ]


def module(name: str) -> str:
    """Return the module of a mixer."""
    return f"linrec.mixers.{name}"


@functools.cache
def before_reference(name: str) -> str:
    """Return the page of a mixer up to its reference, as Markdown."""
    equations = (inspect.getdoc(importlib.import_module(module(name))) or "").partition("\n")[2].strip("\n")
    link = f" [Paper]({PAPERS[name]})" if name in PAPERS else ""
    use = HERE / uri(name)
    parts = [
        f"# {mixers.get(name).__name__}",
        f"{tables.paper(name)}.{link}",
        f'```python\nfrom linrec import mixers\n\nmixer = mixers.build("{name}", d_model)\n```',
        f"## Equations\n\n{equations}",
        f"## Recurrence\n\n{_recurrence(name)}",
        f"## State\n\n{_state(name)}",
        f"## Use\n\n{use.read_text().strip()}" if use.exists() else "",
        f"## Comparison with released code\n\n{tables.released(name)}",
    ]
    return "\n\n".join(part for part in parts if part)


def _recurrence(name: str) -> str:
    called = tables.operators_of(name)
    if not called:
        return (
            "The mixer calls no operator with its default arguments. It runs its own loop over time, in the "
            "mode `recurrent`."
        )
    rows = [
        (f"[`{operator}`](../operators/{operator}.md)", mode, ", ".join(b for m, b in pairs if m == mode))
        for operator, pairs in called.items()
        for mode in dict.fromkeys(mode for mode, _ in pairs)
    ]
    table = tables.markdown_table(("operator", "mode", "backends"), rows)
    return f"With its default arguments, the mixer calls:\n{table}"


def _state(name: str) -> str:
    built = [mixers.build(name, width) for width in WIDTHS]
    state = built[0].init_state(1, device="meta")
    tensors = [
        (path, str(tuple(x.shape)), f"`{str(x.dtype).removeprefix('torch.')}`") for path, x in _leaves(state)
    ]
    shapes = tables.markdown_table(("tensor", f"shape for batch 1, `d_model={WIDTHS[0]}`", "dtype"), tensors)
    sizes = tables.markdown_table(
        ("`d_model`", "state size", "parameters"),
        [
            (f"{mixer.d_model:,}", f"{mixer.state_size:,}", f"{sum(p.numel() for p in mixer.parameters()):,}")
            for mixer in built
        ],
    )
    text = "The state size is the number of elements that a sequence keeps between calls."
    if built[0].segment_length is not None:
        text += (
            " A tensor with an axis of size 0 caches the steps of an unfinished segment, and the state size "
            "counts the steps of the longest one."
        )
    elif any(0 in x.shape for _, x in _leaves(state)):
        text += (
            " A tensor with an axis of size 0 grows with each step, and the state size then counts a step."
        )
    return f"{shapes}\n{text}\n{sizes}"


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state, each after its name."""
    if isinstance(state, Tensor):
        yield f"`{path or 'state'}`", state
    elif isinstance(state, tuple):
        for index, branch in enumerate(state):
            fields = getattr(state, "_fields", None)
            step = f".{fields[index]}" if fields else f"[{index}]"
            yield from _leaves(branch, f"{path or 'state'}{step}")
