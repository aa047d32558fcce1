"""The page of coverage agrees with the code: names build, tests mention them, results are there."""

import functools
import importlib
import inspect
import re
import shlex

import coverage_tables
import pytest
import tables
import torch

from linrec import learning, mixers, ops
from linrec.cli.dispatch import COMMANDS
from linrec.lab import streams, tasks
from linrec.lab.bench import SUITES
from linrec.lab.train import get_recipe
from linrec.models import LanguageModel, MemoryConfig, ModelConfig, image_preset, image_preset_names, preset
from linrec.models.config import ARGUMENTS
from perf.__main__ import COMMANDS as MEASUREMENTS
from tests.markdown import ROOT
from tests.mixers.variants import VARIANTS

ROWS = coverage_tables.rows()
NAMES = list(dict.fromkeys(name for row in ROWS for name in row.names))


def make_memory(name, **arguments):
    config = MemoryConfig(kind=name, segment_length=4, **arguments)
    # which mixers a memory takes depends on its form
    mixer = "transformer_xl" if name == "enhanced_recurrence" else "attention"
    given = {"causal": False} if arguments.get("form") == "encoder" else {}
    given |= {"segment_length": 4} if mixer == "transformer_xl" else {}
    return LanguageModel(ModelConfig(vocab_size=5, n_layers=1, mixer=mixer, mixer_args=given, memory=config))


def check_pair(name, mode=None):
    assert mode is None or mode in [found for found, _ in getattr(ops, name).operator.pairs]


def make_learner(name, **arguments):
    # learners of cells need a real state
    mixer = "lru" if name.endswith(("rtrl", "lru")) else "elman"
    model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=2, mixer=mixer))
    learning.get(name)(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def check_command(text):
    program, command, *others = shlex.split(text.removeprefix("python -m "))
    assert command in {"linrec": COMMANDS, "perf": MEASUREMENTS}[program]
    if command == "train":
        get_recipe(*others)
    elif command == "bench":
        assert set(others) <= {*SUITES, "streams"}
    else:
        assert not others


def check_object(path):
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


MAKE = {
    "mixer": functools.partial(mixers.build, d_model=64),
    "operator": check_pair,
    "memory": make_memory,
    "preset": lambda name: (image_preset if name in image_preset_names() else preset)(name),
    "learner": lambda name, **arguments: make_learner(name, **arguments) if arguments else learning.get(name),
    "task": lambda name, **arguments: tasks.get(name)(**arguments),
    "stream": streams.get,
    "command": check_command,
    "object": check_object,
}


@pytest.mark.parametrize("kind", MAKE)
def test_names_are_of_what_linrec_has(kind):
    named = [name for name in NAMES if name.kind == kind]
    assert named
    for name in named:
        try:
            MAKE[kind](name.base, **name.arguments)
        except Exception as error:
            raise AssertionError(f"{name.text}: {error}") from error


@functools.cache
def read(path):
    return (ROOT / path).read_text()


def spellings(name):
    """Return the words that a test may use for a name."""
    if name.kind == "object":
        return [name.base.rpartition(".")[2]]
    if name.kind == "command":
        return [name.text.split()[-1]]
    rooms = {"mixer": mixers, "task": tasks, "stream": streams, "learner": learning}
    # sizes of a preset may be parameters of its test
    found = [name.base, name.base.replace("-", "_"), f"{name.base.rpartition('-')[0]}-{{size"]
    return found + ([rooms[name.kind].get(name.base).__name__] if name.kind in rooms else [])


def given_in(text, name, argument, value):
    """Whether tests, or the variants that the laws run, give this value to an argument of a mixer."""
    default = inspect.signature(mixers.get(name)).parameters[argument].default
    variants = VARIANTS.get(name, {}).values()
    return value == default or f'"{value}"' in text or any(of.get(argument) == value for of in variants)


@pytest.mark.parametrize("section", dict.fromkeys(row.section for row in ROWS))
def test_tests_exist_and_mention_the_names(section):
    for row in (row for row in ROWS if row.section == section and row.names):
        assert row.tests and all(path.startswith("tests/") for path in row.tests), row.what
        text = "\n".join(map(read, row.tests))
        for name in row.names:
            assert any(re.search(rf"\b{re.escape(word)}\b", text) for word in spellings(name)), row.what
            for argument, value in name.arguments.items() if name.kind == "mixer" else ():
                assert not isinstance(value, str) or given_in(text, name.base, argument, value), row.what


def test_results_exist():
    for row in ROWS:
        for path in row.results:
            page, _, anchor = path.partition("#")
            if page.endswith(".md"):
                assert not anchor or anchor in coverage_tables.headings(page), path
            else:
                assert (ROOT / path).exists(), path


def test_everything_public_has_a_row():
    named = {(name.kind, name.base) for name in NAMES}
    public = {
        "mixer": mixers.names(),
        "learner": learning.names(),
        "task": [name.replace("_", "-") for name in tasks.names()],
        "stream": streams.names(),
        "memory": list(ARGUMENTS),
    }
    assert not {(kind, name) for kind, names in public.items() for name in names} - named


def test_rows_beyond_the_sources_are_of_names_without_another_row():
    beyond, others = set(), set()
    for row in ROWS:
        of = beyond if row.section == coverage_tables.BEYOND else others
        of.update((name.kind, name.base) for name in row.names)
    assert beyond and not beyond & others


def test_the_summary_counts_the_rows():
    header, lines = coverage_tables.summary()
    *counted, total = ([int(cell) for cell in cells] for _, *cells in lines)
    assert list(map(sum, zip(*counted, strict=True))) == total and total[0] == len(ROWS)
    # a row is in linrec, open or left out
    assert header[1:] == ("rows", "in linrec", "with a result", "open", "left out")
    assert all(rows == done + still + out for rows, done, _, still, out in counted)


def test_the_page_has_every_row_with_its_names():
    page = tables.filled(read("docs/coverage.md"))
    cells = [line.strip("| ").split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert all(row.what in cells for row in ROWS)
    assert '[`linear_attention`](mixers/linear_attention.md) with `feature_map="performer"`' in page
    assert "operator [`gate_loop`](operators/gate_loop.md)" in page
    assert "[`hippo.matrices`][linrec.hippo.matrices]" in page


@pytest.mark.parametrize(
    "value", ["", "open: names | a | b | c", "lru; left out: a name has no reason", "left out", "LRU layer"]
)
def test_rows_that_are_not_understood_are_refused(value):
    with pytest.raises(ValueError, match=r"coverage\.ini"):
        coverage_tables.parsed("section", "what", value)
