"""Tables that the documentation takes from the code, so that no list of names is kept by hand.

A Markdown file says where a table goes:

    <!-- table: families -->
    <!-- end of table -->

The page of an operator says where its backends and the mixers that call it go:

    <!-- backends: scan -->
    <!-- mixers: scan -->

The pages of the site are filled when it is built. README.md is read without being built, so its tables stand
in the file, as the names and classes of mixers stand in files for type checkers, and recipes and suites in a
file of the command line. This brings them up to date, and a test fails as long as they are not:

    python docs/tables.py
"""

import functools
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from linrec import learning, mixers, ops
from linrec.lab import streams, tasks
from linrec.lab.bench import STREAMS, SUITES
from linrec.lab.train import recipe_names
from linrec.lab.train.recipes import recipe_summary
from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.models.config import ARGUMENTS
from linrec.nn.mixer import Mixer
from linrec.ops.core.backends import Pair
from linrec.ops.core.call import Call, Result, TimeSplit, handling, unhandled
from linrec.parallel.operators import OPERATORS as PARALLEL

# tests load this file by its path, so what lies beside it is not on the path of imports
sys.path.insert(0, str(Path(__file__).parent))

import coverage_tables
import stream_tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
LISTING = ROOT / "src/linrec/cli/listing.json"
FILLED = (README, ROOT / "src/linrec/mixers/__init__.py", ROOT / "src/linrec/literals.py")
Pairs: TypeAlias = Sequence[Pair]
# of this project's Python
WIDEST_LINE = 110
# of the mixers whose state is counted
WIDTH = 64
# in Python, the place is two comments
PLACE = re.compile(r"((?:<!--|#) table: (\w+)(?: -->)?\n).*?( *(?:<!--|#) end of table)", re.DOTALL)
PART = re.compile(r"<!-- (released|backends|mixers): (\w+) -->")


class Family(NamedTuple):
    """Mixers whose memory is the same kind of recurrence, by the operators that compute it."""

    title: str
    about: str
    operators: tuple[str, ...]


# in the place of an operator, for mixers with a memory that changes at the ends of segments
SEGMENTS = "by_segments"

FAMILIES = (
    Family(
        "Matrix states",
        "The state of a head is a matrix, which decays and adds outer products of keys and values.",
        ("gate_loop", "normalized_gate_loop"),
    ),
    Family(
        "Delta rule",
        "The state of a head is a matrix, and each step corrects the value that it stores under a key.",
        ("delta_rule", "generalized_delta_rule"),
    ),
    Family(
        "Vector states",
        "The state is a vector, and each channel decays at its own rate.",
        ("scan",),
    ),
    Family(
        "State-space models",
        "Each channel drives a linear system of several states, which is discretised in time.",
        ("diagonal_ssm", "growing_ssm", "dense_ssm", "dplr_ssm", "selective_scan"),
    ),
    Family(
        "Convolutions",
        "Each channel is convolved with a filter, which may be as long as the sequence.",
        ("long_conv", "short_conv"),
    ),
    Family(
        "Attention",
        "Each step weighs all earlier steps, and the state is a cache that grows.",
        ("softmax_attention", "gate_loop_attention", "laplace_attention"),
    ),
    Family(
        "Memory of segments",
        "Attention within a segment of steps, and a memory that each segment leaves to the next.",
        (SEGMENTS,),
    ),
    Family(
        "Nonlinear recurrences",
        "The state passes through a nonlinearity at each step, so the steps run one after another.",
        (),
    ),
)


def operators() -> str:
    """Every function of `linrec.ops`: its equation, and the modes and backends where there is a choice."""
    rows = [
        (f"`{name}`", _equation(function), _by_mode(pairs) if pairs else "–")
        for name, (function, pairs) in _operators().items()
    ]
    return markdown_table(
        ("operator", "equation", "mode: backends"), sorted(rows, key=lambda row: row[0].strip("`"))
    )


def irregular_table() -> str:
    """Every mixer that takes irregular steps, and the effect of `dt` that its documentation states."""
    rows = []
    for name in mixers.names():
        kind = mixers.get(name)
        if kind.takes_dt:
            found = re.search(r"With irregular steps, (.*?)[.:]\s", inspect.getdoc(kind) or "", re.DOTALL)
            assert found is not None, f"the docstring of {name} must say what irregular steps do"
            rows.append((f"[`{name}`](mixers/{name}.md)", paper(name), " ".join(found[1].split())))
    return markdown_table(("mixer", "from", "effect of `dt`"), rows)


def family_tables() -> str:
    """Every mixer with a link to its page, in a table for each family."""
    parts = []
    for family, names in families():
        rows = [
            (
                f"[`{name}`](mixers/{name}.md)",
                paper(name),
                ", ".join(f"[`{each}`](operators/{each}.md)" for each in operators_of(name))
                or f"a loop over {'segments' if by_segments(name) else 'steps'}",
                f"{built(name).state_size:,}",
            )
            for name in names
        ]
        table = markdown_table(("name", "from", "operator", f"state at width {WIDTH}"), rows)
        parts.append(f"### {family.title}\n\n{family.about}\n{table}")
    return "\n" + "\n".join(parts)


def memory_table() -> str:
    """Every memory across the stack with a link to its page, and the mixers that it takes."""
    rows = []
    for name in ARGUMENTS:
        paper = first_line(importlib.import_module(f"linrec.models.{name}"))
        mixed = ", ".join(f"`{mixer}`" for mixer in taken(name)) if taken(name) != causal() else "all"
        rows.append((f"[`{name}`](memories/{name}.md)", paper, mixed))
    return markdown_table(("name", "from", "mixers"), rows)


def causal() -> list[str]:
    """Return the mixers that are causal with their default arguments."""
    return [name for name in mixers.names() if built(name).is_causal]


@functools.cache
def taken(memory: str) -> list[str]:
    """Return the mixers that a memory across the stack takes with their default arguments."""
    return [name for name in mixers.names() if takes(MemoryConfig(kind=memory), name)]


def takes(memory: MemoryConfig, mixer: str, **arguments: Any) -> bool:
    """Return whether a memory across the stack takes a mixer with some arguments."""
    config = ModelConfig(vocab_size=1, n_layers=1, mixer=mixer, mixer_args=arguments, memory=memory)
    try:
        with torch.device("meta"):
            LanguageModel(config)
    except ValueError:
        return False
    return True


def family_list() -> str:
    """Every family in a row, with the names of its mixers."""
    rows = [
        (family.title, family.about, ", ".join(f"`{name}`" for name in names)) for family, names in families()
    ]
    return markdown_table(("family", "state", "mixers"), rows)


def families() -> list[tuple[Family, list[str]]]:
    """Return every family with its mixers; a mixer belongs to the operator that is its memory."""
    return [
        (family, [name for name in mixers.names() if _family(name) is family])
        for family in FAMILIES
    ]  # fmt: skip


def paper(mixer: str) -> str:
    """Return the first line of the mixer's file: the paper."""
    return first_line(importlib.import_module(f"linrec.mixers.{mixer}"))


@functools.cache
def operators_of(mixer: str) -> dict[str, Pairs]:
    """Return the operators that a call of the mixer runs, in their order, with their pairs.

    The short convolution in front of a recurrence is left out.
    """
    called = _operators_called(lambda: built(mixer)(torch.zeros(1, 3, WIDTH)))
    return {
        name: pairs
        for name, pairs in called.items()
        if name != "short_conv" or name == built(mixer).recurrence
    }


@functools.cache
def built(mixer: str) -> Mixer:
    """Return the mixer with its default arguments."""
    return mixers.build(mixer, WIDTH)


class _Observed(TimeSplit):
    """A split of time into one part, which lists the functions that would run in turn."""

    operators = tuple(PARALLEL)

    def __init__(self) -> None:
        self.turns: list[str] = []

    def run(self, call: Call) -> Result:
        """Run the operator."""
        with unhandled():
            return call.operator.run(call.inputs, call.backend)

    def halo(self, x: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the state, and the last inputs."""
        return state, torch.cat([state, x], 1)[:, x.shape[1] :]

    def in_turn(self, name: str, run: Any, state: Any, given: Any) -> Any:
        """Run the function, and list its name."""
        self.turns.append(name)
        with unhandled():
            return run(state)


@functools.cache
def turns(mixer: str) -> tuple[str, ...] | None:
    """Return what `time_parallel` runs in one process after another; None if it refuses the mixer."""
    if not built(mixer).is_causal:
        return None
    observed = _Observed()
    with handling(observed):
        built(mixer)(torch.zeros(1, 3, WIDTH))
    return tuple(dict.fromkeys(observed.turns))


def parallel_table() -> str:
    """Return all mixers by what runs in one process after another where processes share sequences."""
    kinds: dict[str, list[str]] = {}
    for mixer in mixers.names():
        names = turns(mixer)
        kind = "refused: steps see later steps"
        if names is not None:
            own = "the whole mixer" if built(mixer).takes_turns else "a loop over its steps or segments"
            kind = ", ".join(f"`{name}`" if name != mixer else own for name in names)
        kinds.setdefault(kind or "nothing", []).append(f"`{mixer}`")
    rows = sorted(kinds.items(), key=lambda row: (row[0] != "nothing", -len(row[1]), row[0]))
    return markdown_table(("in turn", "mixers"), [(kind, ", ".join(names)) for kind, names in rows])


def by_segments(mixer: str) -> bool:
    """Return whether the memory of the mixer changes at the ends of segments."""
    return built(mixer).segment_length is not None


def _family(mixer: str) -> Family:
    memory = built(mixer).recurrence or next(iter(operators_of(mixer)), None)
    if by_segments(mixer):
        memory = SEGMENTS
    return next(family for family in FAMILIES if memory in family.operators or not family.operators)


def task_table() -> str:
    """Every task, by the name that users type."""
    named = [(name.replace("_", "-"), tasks.get(name)) for name in tasks.names()]
    rows = [(f"`{name}`", f"`{kind.__name__}`", first_line(kind)) for name, kind in named]
    return markdown_table(("name", "class", "what it is"), rows)


def recipe_table() -> str:
    """Every recipe of `linrec train`."""
    return markdown_table(
        ("recipe", "what it is"), [(f"`{name}`", recipe_summary(name)) for name in recipe_names()]
    )


def released(mixer: str) -> str:
    """Return a line for each comparison of a mixer with released code."""
    lines = []
    for path in sorted((ROOT / "tests/released").glob("*.json")):
        case = json.loads(path.read_text())
        if case["mixer"] != mixer:
            continue
        if "without" in case:
            lines.append(case["without"])
            continue
        arguments = ", ".join(f"{name}={value!r}" for name, value in case.get("arguments", {}).items())
        lines.append(
            f"Compared with `{case['layer']}` of {link(case)}: "
            f"relative error below {case['error']:.0e}" + (f", with `{arguments}`" if arguments else "") + "."
            + (f" {case['note']}" if "note" in case else "")
        )  # fmt: skip
    return "\n\n".join(lines)


def link(case: Mapping[str, str]) -> str:
    """Return a link to the released code of a comparison, with its commit."""
    repository, commit = case["repository"], case["commit"]
    address = f"https://github.com/{repository}/blob/{commit}/{case['path']}"
    return f"[{repository}]({address}) at commit `{commit[:7]}`"


def backends(operator: str) -> str:
    """Return the table of an operator's backends, in order of preference."""
    entries = getattr(ops, operator).operator.backends
    rows = [(entry.mode, entry.name, entry.about, entry.requires or "any input") for entry in entries]
    return markdown_table(("mode", "backend", "how it computes", "takes"), rows)


def users(operator: str) -> str:
    """Return links to the mixers that run an operator with default arguments."""
    names = [name for name in mixers.names() if operator in operators_of(name)]
    if not names:
        return "No mixer calls this operator with its default arguments."
    links = ", ".join(f"[`{name}`](../mixers/{name}.md)" for name in names)
    return f"Mixers that call it with their default arguments: {links}."


def mixer_literal(names: Sequence[str] = tuple(mixers.names())) -> str:
    """Return lines with the names, by default of the `Literal` of all mixers."""
    return textwrap.fill(
        ", ".join(f'"{name}"' for name in names) + ",",
        width=110, initial_indent=" " * 4, subsequent_indent=" " * 4,
    ) + "\n"  # fmt: skip


def mixer_imports() -> str:
    """Return the imports of the classes of all mixers."""
    named = [(name, mixers.get(name).__name__) for name in mixers.names()]
    lines = []
    for file, name in named:
        start, names = f"    from linrec.mixers.{file} import", f"{name} as {name}"
        line = f"{start} {names}\n"
        # as ruff formats it
        lines.append(line if len(line) <= WIDEST_LINE + 1 else f"{start} (\n        {names},\n    )\n")
    return "".join(lines)


def coverage() -> str:
    """Return a table for every section of the sources: the systems that the section names."""
    parts = [f"## {title}\n{markdown_table(*table)}" for title, table in coverage_tables.sections()]
    return "\n" + "\n".join(parts)


PARTS: dict[str, Callable[[str], str]] = {"released": released, "backends": backends, "mixers": users}


TABLES: dict[str, Callable[[], str]] = {
    "operators": operators,
    "families": family_tables,
    "family_list": family_list,
    "memories": memory_table,
    "tasks": task_table,
    "recipes": recipe_table,
    "irregular": irregular_table,
    "mixer_literal": mixer_literal,
    "mixers_with_dt": lambda: mixer_literal([name for name in mixers.names() if mixers.get(name).takes_dt]),
    "mixer_imports": mixer_imports,
    "coverage": coverage,
    "parallel": parallel_table,
}
TABLES |= {
    name: functools.partial(lambda table: markdown_table(*table()), table)
    for name, table in (stream_tables.TABLES | coverage_tables.TABLES).items()
}


def filled(markdown: str) -> str:
    """Return the Markdown with every table and every other part in its place.

    Raises:
        KeyError: a place asks for a table that does not exist.
    """
    markdown = PLACE.sub(lambda place: f"{place[1]}{TABLES[place[2]]()}{place[3]}", markdown)
    return PART.sub(lambda place: PARTS[place[1]](place[2]), markdown)


def _operators() -> dict[str, tuple[FunctionType, Pairs]]:
    """Every function of `linrec.ops` by its name, with its (mode, backend) pairs, if there is a choice."""
    functions = {name: function for name, function in vars(ops).items() if inspect.isfunction(function)}
    return {
        name: (function, function.operator.pairs if hasattr(function, "operator") else ())
        for name, function in functions.items()
    }


def _operators_called(call: Callable[[], object]) -> dict[str, Pairs]:
    """Recurrences that the call runs, in their order, each with its (mode, backend) pairs."""
    called: dict[str, Pairs] = {}

    def look(each: Call, proceed: Callable[[], Result]) -> Result:
        # one that no function offers is made of others
        if each.operator.name not in _operators():
            return proceed()
        called[each.operator.name] = each.operator.pairs
        # what an operator calls is its own affair
        with unhandled():
            return proceed()

    with handling(look):
        call()
    return called


def _by_mode(pairs: Pairs) -> str:
    modes = dict.fromkeys(mode for mode, _ in pairs)
    return "<br>".join(
        f"{mode}: {', '.join(backend for other, backend in pairs if other == mode)}" for mode in modes
    )


def _equation(function: Callable[..., object]) -> str:
    # docstrings open with one line, and then the equation, indented
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    equation = next(text for text in paragraphs if text.startswith("    "))
    # several equations of one line stand far apart
    parts = re.split(r"[,;]? {3,}|\n", equation.strip())
    return "<br>".join(f"`{part}`" for part in parts if part)


def first_line(documented: object) -> str:
    """Return the first line of a docstring, without its full stop."""
    return (inspect.getdoc(documented) or "").split("\n")[0].rstrip(".")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def listing() -> str:
    """Recipes, suites, streams and learners in JSON, for the help that is printed without PyTorch."""
    recipes = {name: recipe_summary(name) for name in recipe_names()}
    suites = {name: ", ".join(entry.name for entry in entries) for name, entries in SUITES.items()}
    suites["streams"] = ", ".join(entry.name for entry in STREAMS)
    suites["all"] = "the tasks of every suite"
    listed = {
        "recipes": recipes,
        "suites": suites,
        "streams": {name: _summary(streams.get(name)) for name in streams.names()},
        "learners": {name: _summary(learning.get(name)) for name in learning.names()},
    }
    return json.dumps(listed, indent=2) + "\n"


def _summary(of: type[Any]) -> str:
    """Return the first line of a class's documentation."""
    return inspect.cleandoc(of.__doc__ or "").partition("\n")[0]


if __name__ == "__main__":
    for path in FILLED:
        path.write_text(filled(path.read_text()))
    LISTING.write_text(listing())
