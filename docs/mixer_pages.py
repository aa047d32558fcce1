"""Pages of mixers, one for each, made from the code.

A page has the paper, the equations of the module's docstring, the operator and its modes, the state, the
comparisons with released code, and the reference of the class. A file `docs/mixers/NAME.md`, where there is
one, is the section "Use" of the page. `memory_pages` makes its pages of the same parts.
"""

import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tables
import torch
from torch import Tensor, nn

from linrec import mixers
from linrec.errors import folded
from linrec.literals import OTHER_NAMES
from linrec.mixers import State

HERE = Path(__file__).parent
PAPERS: dict[str, str] = json.loads((HERE / "papers.json").read_text())
WIDTHS = (64, 256, 1024)
INFERRED = "in evaluation, without gradients"
SEGMENTS = "Steps of a segment attend in parallel, and a loop runs over the segments."


def names() -> list[str]:
    """Return the names of all mixers."""
    return mixers.names()


def title(name: str) -> str:
    """Return the name of a mixer's class."""
    return mixers.get(name).__name__


def module(name: str) -> str:
    """Return the module of a mixer."""
    return f"linrec.mixers.{name}"


def uri(name: str) -> str:
    """Return where the page of a mixer is."""
    return f"mixers/{name}.md"


def navigation() -> list[dict[str, Any]]:
    """Return the families for the navigation, each with the pages of its mixers."""
    families = tables.families()
    return [{family.title: [{_entry(name): uri(name)} for name in each]} for family, each in families]


def _entry(name: str) -> str:
    """Return the name of the class, and the paper's own name if that is another word."""
    kind, other = title(name), OTHER_NAMES.get(name, "").split(", ")[0]
    alike = folded(other) in folded(kind) or folded(kind) in folded(other)
    return kind if alike or " " in other else f"{kind} ({other})"


@functools.cache
def before_reference(name: str) -> str:
    """Return the page of a mixer up to its reference, as Markdown."""
    return joined(
        name,
        title(name),
        module(name),
        f'from linrec import mixers\n\nmixer = mixers.build("{name}", d_model)',
        {
            "Recurrence": _recurrence(name),
            "State": _state(name),
            "Time parallelism": _over_processes(name),
            "Use": written(uri(name)),
            "Comparison with released code": tables.released(name),
        },
    )


def joined(name: str, heading: str, path: str, example: str, sections: Mapping[str, str]) -> str:
    """Return a page: the paper, an example, the equations of the module at `path`, and the sections."""
    described = importlib.import_module(path)
    equations = (inspect.getdoc(described) or "").partition("\n")[2].strip("\n")
    link = f" [Paper]({PAPERS[name]})" if name in PAPERS else ""
    parts = [f"# {heading}", f"{tables.first_line(described)}.{link}", *called(name)]
    parts.append(f"```python\n{example}\n```")
    parts += [f"## {each}\n\n{text}" for each, text in {"Equations": equations, **sections}.items() if text]
    return "\n\n".join(parts)


def called(name: str) -> Iterator[str]:
    """Yield a paragraph with the other names, by which searches find the page, if there are any."""
    of_page = re.compile(rf'{name}\b|MemoryConfig\(kind="{name}"')
    mine = {key: names for key, names in OTHER_NAMES.items() if of_page.match(key)}
    told = [f"With `{key}`: {names}." for key, names in mine.items() if key != name]
    if name in mine:
        told.insert(0, f"Other names: {mine[name]}.")
    if told:
        yield " ".join(told)


def written(page: str) -> str:
    """Return the text of the file in the place of a page; nothing without a file."""
    return (HERE / page).read_text().strip() if (HERE / page).exists() else ""


def _recurrence(name: str) -> str:
    called, by_segments = tables.operators_of(name), tables.by_segments(name)
    if not called:
        loop = SEGMENTS if by_segments else "It runs its own loop over time, in the mode `recurrent`."
        return f"The mixer calls no operator with its default arguments. {loop}"
    rows = [
        (f"[`{operator}`](../operators/{operator}.md)", mode, ", ".join(b for m, b in pairs if m == mode))
        for operator, pairs in called.items()
        for mode in dict.fromkeys(mode for mode, _ in pairs)
    ]
    table = tables.markdown_table(("operator", "mode", "backends"), rows)
    return f"With its default arguments, the mixer calls:\n{table}" + (SEGMENTS if by_segments else "")


def _over_processes(name: str) -> str:
    """Return how `time_parallel` runs the mixer."""
    turns, link = tables.turns(name), "[`time_parallel`](../parallel.md)"
    if turns is None:
        return f"{link} refuses the mixer, whose steps depend on later steps."
    if not turns:
        return f"Under {link}, all processes run their steps in parallel."
    own = "the mixer" if tables.built(name).takes_turns else "its loop over steps or segments"
    what = " and ".join(own if turn == name else f"`{turn}`" for turn in turns)
    return f"Under {link}, {what} runs in one process after another; the rest runs in parallel."


def _state(name: str) -> str:
    built = [mixers.build(name, width).to("meta") for width in WIDTHS]
    start, after = built[0].init_state(1), {}
    counts = {"state size": [mixer.state_size for mixer in built]}
    text = "The state size is the number of elements that a sequence keeps between calls."
    if (length := built[0].segment_length) is not None:
        steps = 2 * length - 1
        inputs = [torch.zeros(1, steps, width, device="meta") for width in WIDTHS]
        after = held(built[0], inputs[0])
        text = (
            f"The state is largest at the last step before the end of a segment, as after {steps:,} steps. "
            "The state size is its number of elements."
        )
        if len(after) > 1:
            ends = [held(mixer, x)[INFERRED] for mixer, x in zip(built, inputs, strict=True)]
            counts["elements in evaluation"] = [elements(end) for end in ends]
            text += (
                " After `eval()`, calls without gradients also keep keys and values, which the state size "
                "does not count. "
                "The second table has the number of elements with them."
            )
    elif any(0 in x.shape for _, x in leaves(start)):
        text = (
            "A tensor with an axis of size 0 grows with each step. The state size is the number of elements "
            "that a step adds; tensors of fixed size come on top."
        )
    counts["parameters"] = [sum(p.numel() for p in mixer.parameters()) for mixer in built]
    return f"{shapes(start, after)}\n{text}\n{sizes(counts)}"


def held(run: nn.Module, x: Tensor) -> dict[str, State]:
    """Return the state after the steps of `x`, and that of inference where it holds more."""
    _, trained = run(x)
    training = run.training
    with torch.no_grad():
        _, inferred = run.eval()(x)
    run.train(training)
    states = {f"after {x.shape[1]:,} steps": trained}
    return states if elements(trained) == elements(inferred) else states | {INFERRED: inferred}


def elements(state: State) -> int:
    """Return the number of elements of a state."""
    return sum(x.numel() for _, x in leaves(state))


def shapes(start: State, after: Mapping[str, State]) -> str:
    """Return the table of the tensors of the first width: at the start, and in the other states."""
    first, *others = (dict(leaves(state)) for state in (start, *after.values()))
    rows = [
        (
            path,
            *(str(tuple(state[path].shape)) for state in (first, *others)),
            f"`{str(x.dtype).removeprefix('torch.')}`",
        )
        for path, x in first.items()
    ]
    header = ("tensor", f"shape for batch 1, `d_model={WIDTHS[0]}`", *after, "dtype")
    return tables.markdown_table(header, rows)


def sizes(counts: Mapping[str, Sequence[int]]) -> str:
    """Return the table of numbers for each width."""
    rows = [tuple(f"{number:,}" for number in row) for row in zip(WIDTHS, *counts.values(), strict=True)]
    return tables.markdown_table(("`d_model`", *counts), rows)


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state, each after its name."""
    if isinstance(state, Tensor):
        yield f"`{path or 'state'}`", state
    elif isinstance(state, tuple):
        for index, branch in enumerate(state):
            fields = getattr(state, "_fields", None)
            step = f".{fields[index]}" if fields else f"[{index}]"
            yield from leaves(branch, f"{path or 'state'}{step}")
