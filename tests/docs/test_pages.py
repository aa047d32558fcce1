"""Pages of mixers and of memories agree with the code, and pages of operators have every mode."""

import dataclasses
import functools
import importlib
import inspect
import math
import re
import shlex

import memory_pages
import mixer_pages
import pytest
import tables
import torch

from linrec import mixers, ops
from linrec.cli.parsing import option_names, peek
from linrec.cli.train import options_type
from linrec.lab.bench.variants import parse_variant
from linrec.lab.train import get_recipe
from linrec.literals import OTHER_NAMES
from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.models.slot_memory import SlotMemory
from linrec.models.token_turing_machine import TokenTuringMachine
from tests.markdown import FENCE, ROOT
from tests.test_export import BY_LENGTH
from tests.tiers import thorough

# the pages of all mixers are made
pytestmark = thorough

every_mixer = pytest.mark.parametrize("name", mixers.names())
every_memory = pytest.mark.parametrize("name", memory_pages.names())
page_of = functools.cache(mixer_pages.before_reference)
OPERATORS = {name: function for name, function in vars(ops).items() if hasattr(function, "operator")}


def section(page, title):
    """Return the text of a section of a page."""
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@every_mixer
def test_a_page_has_the_paper_and_its_equations(name):
    page = page_of(name)
    first, *rest = inspect.getdoc(inspect.getmodule(mixers.get(name))).splitlines()
    assert page.startswith(f"# {mixers.get(name).__name__}\n\n{first}")
    equations = [line for line in rest if line.startswith("    ")]
    assert equations and set(equations) <= set(section(page, "Equations").splitlines())


@every_mixer
def test_a_page_has_the_recurrence_and_the_state(name):
    page = page_of(name)
    linked = re.findall(r"operators/(\w+)\.md", section(page, "Recurrence"))
    assert list(dict.fromkeys(linked)) == list(tables.operators_of(name))
    state = section(page, "State")
    for width in mixer_pages.WIDTHS:
        assert f"| {width:,} | {mixers.build(name, width).state_size:,} |" in state
    # an encoder has no state
    start, *after = columns(state) or [[]]
    by_segments = tables.by_segments(name)
    assert bool(after) == by_segments
    # a tensor that grows has no elements yet
    if all(start) or by_segments:
        assert sum(after[0] if by_segments else start) == mixers.build(name, mixer_pages.WIDTHS[0]).state_size


def columns(state):
    """Return the elements of each tensor of a state, a list for each column of shapes."""
    rows = [line.split(" | ") for line in state.splitlines() if line.startswith("| `state")]
    sizes = [
        [math.prod(int(n) for n in re.findall(r"\d+", cell)) for cell in row if cell.startswith("(")]
        for row in rows
    ]
    return [list(column) for column in zip(*sizes, strict=True)]


@pytest.mark.parametrize("name", ["attention", "falcon_h1", "gate_loop_attention", "hyena", "mega", "tnn"])
def test_a_state_that_grows_grows_by_the_state_size(name):
    assert "is the number of elements that a step adds" in section(page_of(name), "State")
    mixer = tables.built(name)
    held = [mixer_pages.elements(mixer(torch.zeros(1, steps, mixer.d_model))[1]) for steps in (3, 4)]
    assert held[1] - held[0] == mixer.state_size


LISTS = {
    "concepts.md": (r"These mixers keep\s+more with every step:(.*?)###", "grows"),
    "export.md": (r"- The programs of(.*?)have\s+the length of their example", "has one length"),
    "which-mixer.md": (r"The last row is per step. The states of (.*?), and of `aft`", "grows"),
}


@pytest.mark.parametrize("page", LISTS)
def test_a_list_of_mixers_has_all_of_them(page):
    pattern, what = LISTS[page]
    listed = re.search(pattern, (ROOT / "docs" / page).read_text(), re.DOTALL)[1]
    names = [name for name in re.findall(r"`(\w+)`", listed) if name in mixers.names() and name != "aft"]
    true = {
        "grows": [name for name in mixers.names() if tables.built(name).state_grows],
        "has one length": sorted(BY_LENGTH),
    }
    assert sorted(names) == true[what]


def test_pages_begin_with_the_other_names():
    for key, names in OTHER_NAMES.items():
        if not key.startswith("preset"):
            name = re.match(r'MemoryConfig\(kind="(\w+)"|(\w+)', key)
            pages = memory_pages if name[1] else mixer_pages
            assert f"{names}." in pages.before_reference(name[1] or name[2]).split("\n## ")[0]
    entries = {uri: entry for part in mixer_pages.navigation() for entry, uri in pairs(part)}
    assert entries["mixers/hgru.md"] == "HGRU (HGRN)" and entries["mixers/hgrn2.md"] == "HGRN2"


def pairs(part):
    """Return the entries of a section of the navigation, each with its page."""
    return [pair for section in part.values() for page in section for pair in page.items()]


@pytest.mark.parametrize("name", ["transformer_xl", "compressive_transformer"])
def test_keys_and_values_come_on_top_of_the_state_size(name):
    state = section(page_of(name), "State")
    _, size, held, _ = re.search(r"^\| 64 \|.*$", state, re.MULTILINE)[0].strip("| ").split(" | ")[:4]
    trained, inferred = (sum(column) for column in columns(state)[1:])
    assert (f"{trained:,}", f"{inferred:,}") == (size, held)
    # as counted by hand: keys and values of 64 channels for each step
    mixer = mixers.build(name, 64, segment_length=16).eval()
    with torch.no_grad():
        _, after = mixer(torch.zeros(1, 47, 64))
    steps = sum(x.shape[1] for path, x in mixer_pages.leaves(after) if path.endswith(("h`", "segment[0]`")))
    assert mixer_pages.elements(after) == mixer.state_size + 2 * 64 * steps


def test_the_recurrence_of_segments_is_a_loop_over_segments():
    for name in mixers.names():
        text = section(page_of(name), "Recurrence")
        assert ("a loop runs over the segments" in text) == tables.by_segments(name)
        assert not (tables.by_segments(name) and "loop over time" in text)
    assert "short_conv" in section(page_of("lfm2"), "Recurrence")
    assert "short_conv" not in tables.operators_of("mamba")


@every_mixer
def test_a_page_has_the_comparisons_with_released_code(name):
    cure = f'add tests/released/{name}.json: a comparison, or {{"mixer": "{name}", "without": "the reason"}}'
    assert tables.released(name), cure
    assert section(page_of(name), "Comparison with released code").strip()


def test_every_mixer_is_in_a_family():
    names = [name for _, names in tables.families() for name in names]
    assert sorted(names) == mixers.names()
    table = tables.family_tables()
    assert all(f"](mixers/{name}.md)" in table for name in names)


def test_links_of_papers_are_of_pages():
    assert mixer_pages.PAPERS.keys() <= {*mixers.names(), *memory_pages.names()}
    assert mixer_pages.PAPERS.keys() >= set(memory_pages.names())
    # papers without a preprint are at their publisher
    known = (
        r"arxiv\.org/abs/\d{4}\.\d{4,5}|github\.com/[\w/]+|doi\.org/10\.\d+/\S+|openaccess\.thecvf\.com/\S+"
        r"|openreview\.net/forum\?id=\w+"
    )
    assert all(re.fullmatch(f"https://({known})", link) for link in mixer_pages.PAPERS.values())


@pytest.mark.parametrize("pages", [mixer_pages, memory_pages])
def test_additions_to_pages_have_a_page(pages):
    for path in (ROOT / "docs" / pages.uri("name")).parent.glob("*.md"):
        assert path.stem in pages.names()
        assert path.read_text().strip() in section(f"{pages.before_reference(path.stem)}\n", "Use")


@every_memory
def test_a_page_of_a_memory_has_its_equations_and_arguments(name):
    page = memory_pages.before_reference(name)
    text = inspect.getdoc(importlib.import_module(memory_pages.module(name)))
    assert page.startswith(f"# {memory_pages.title(name)}\n\n{text.splitlines()[0]}")
    assert text.partition("\n")[2].strip("\n") in section(page, "Equations")
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.+) \|$", section(page, "Arguments"), re.MULTILINE)
    assert {row[0] for row in rows} == MemoryConfig.fields_of(name) - {"kind"}
    assert all(default == repr(getattr(MemoryConfig(), argument)) for argument, default, _ in rows)


@every_memory
def test_the_example_of_a_memory_has_the_state_of_the_page(name):
    page = memory_pages.before_reference(name)
    made = {}
    exec(FENCE.search(page)[2], made)
    model, state = made["model"], section(page, "State")
    start, trained, *inferred = columns(state)
    assert sum(start) == mixer_pages.elements(model.init_state(1))
    found = [model(torch.zeros(1, 31, dtype=torch.int64))[1]]
    with torch.no_grad():
        found.append(model.eval()(torch.zeros(1, 31, dtype=torch.int64))[1])
    assert sum(trained) == mixer_pages.elements(found[0])
    assert sum((inferred or [trained])[0]) == mixer_pages.elements(found[1])
    # the memory without states of layers and without `alive` and `position`
    after = found[0]
    layers = after.memory if name == "enhanced_recurrence" else after.segment
    if isinstance(model.memory, SlotMemory | TokenTuringMachine):
        layers = after.segment[0]
    own = mixer_pages.elements(after) - mixer_pages.elements(layers) - after.alive.numel() - 1
    plain = LanguageModel(dataclasses.replace(model.config, memory=MemoryConfig()))
    added = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
    assert own == model.memory.state_size
    assert f"| 64 | {own:,} | {added:,} |" in state


@every_memory
def test_a_page_of_a_memory_says_which_calls_and_mixers_it_takes(name):
    page = memory_pages.before_reference(name)
    answers = dict(re.findall(r"^\| (\w.*?) \| (.*) \|$", section(page, "Splits"), re.MULTILINE))
    del answers["three whole segments"]
    assert answers.keys() == memory_pages.SPLITS.keys()
    refused = {call for call, answer in answers.items() if "refused" in answer}
    if name == "enhanced_recurrence":
        assert not refused and "[`transformer_xl`](../mixers/transformer_xl.md)." in section(page, "Mixers")
    else:
        within = {"a call that ends within a segment", "calls of one step", "a reset within a segment"}
        assert refused == within and all(answers[call] == "allowed | refused" for call in within)
        assert "[`attention`](../mixers/attention.md)" in section(page, "Mixers").split("the future:")[1]
    assert f"[`{name}`](memories/{name}.md)" in tables.memory_table()


@every_memory
def test_commands_of_a_memory_are_known_and_make_the_model(name):
    text = FENCE.search(section(memory_pages.before_reference(name), "Commands"))[2]
    train, bench = (shlex.split(line) for line in text.replace("\\\n", " ").splitlines())
    options = options_type(get_recipe(train[2]), peek(train, "--model.mixer"))
    assert {word for word in train if word.startswith("--")} <= {*option_names(options)}
    variant = parse_variant(bench[-1])
    assert (variant.memory.kind, variant.memory.segment_length) == (name, 24)
    LanguageModel(
        ModelConfig(
            vocab_size=6, mixer=variant.mixer, mixer_args=dict(variant.mixer_args), memory=variant.memory
        )
    )


@every_memory
def test_a_page_of_a_memory_names_the_commit_of_the_compared_code(name):
    compared = section(memory_pages.before_reference(name), "Comparison with released code")
    assert re.search(
        r"\(https://github\.com/[\w-]+/[\w-]+/blob/(\w{7})\w{33}/\S+\.(?:py|md)\) at commit `\1`", compared
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_a_page_with_every_mode(name):
    page = (ROOT / f"docs/operators/{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    assert f"<!-- backends: {name} -->" in page
    assert re.search(rf"<!-- reference: linrec\.ops\.\w+\.{name} -->", page)
    modes = section(page, "Modes")
    assert "$$" in section(page, "Definition")
    for mode, _ in OPERATORS[name].operator.pairs:
        assert re.search(rf"^### .*\b{mode}\b|`{mode}`", modes, re.MULTILINE), mode


def test_the_table_of_backends_has_every_entry():
    entries = ops.delta_rule.operator.backends
    rows = tables.backends("delta_rule").strip().splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [(mode, backend) for mode, backend, *_ in cells] == [(entry.mode, entry.name) for entry in entries]
    assert [cell[3] for cell in cells if cell[1] == "triton"] == ["any input", "keys of at most 512 channels"]


def test_a_page_says_which_mixers_call_the_operator():
    assert "[`gated_delta_net`](../mixers/gated_delta_net.md)" in tables.users("delta_rule")
    assert tables.users("laplace_attention").startswith("No mixer")
