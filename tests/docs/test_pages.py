"""Pages of mixers agree with the code, and pages of operators have every mode."""

import functools
import inspect
import math
import re

import mixer_pages
import pytest
import tables

from linrec import mixers, ops
from tests.markdown import ROOT

every_mixer = pytest.mark.parametrize("name", mixers.names())
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
    shapes = re.findall(r"^\| `state.*?` \| \(([\d, ]*)\)", state, re.MULTILINE)
    sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes]
    # a tensor that grows has no elements yet
    if all(sizes):
        assert sum(sizes) == mixers.build(name, mixer_pages.WIDTHS[0]).state_size


@every_mixer
def test_a_page_has_the_comparisons_with_released_code(name):
    assert section(page_of(name), "Comparison with released code").strip()


def test_every_mixer_is_in_a_family():
    names = [name for _, names in tables.families() for name in names]
    assert sorted(names) == mixers.names()
    table = tables.family_tables()
    assert all(f"](mixers/{name}.md)" in table for name in names)


def test_links_of_papers_are_of_mixers():
    assert mixer_pages.PAPERS.keys() <= set(mixers.names())
    # papers without a preprint are at their publisher
    known = (
        r"arxiv\.org/abs/\d{4}\.\d{4,5}|github\.com/[\w/]+|doi\.org/10\.\d+/\S+|openaccess\.thecvf\.com/\S+"
    )
    assert all(re.fullmatch(f"https://({known})", link) for link in mixer_pages.PAPERS.values())


def test_additions_to_pages_are_of_mixers():
    assert {path.stem for path in (ROOT / "docs/mixers").glob("*.md")} <= set(mixers.names())


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
