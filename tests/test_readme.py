"""The README is short, its code runs, its table has every mixer; tables of pages say what the code says."""

import importlib.util
import inspect
import re

import pytest
import torch

from linrec import mixers, ops
from tests.markdown import README, ROOT, blocks, execute

PYTHON = [block.text for block in blocks(README) if block.language == "python"]
OPERATORS = {name: function for name, function in vars(ops).items() if inspect.isfunction(function)}


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_short_and_shows_code_first():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert lines.index("```python") < 40


@pytest.mark.parametrize("code", PYTHON)
def test_each_block_can_be_copied_without_the_others(code):
    assert "assert_close" in code
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        execute(code, "README.md", {})


def rows(markdown, header):
    """Cells of the table whose first column has this header."""
    _, _, *lines = markdown[markdown.index(f"| {header} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_mixer_is_in_one_family_of_the_readme():
    listed = [name for row in rows(README.read_text(), "family") for name in re.findall(r"`(\w+)`", row[-1])]
    assert sorted(listed) == mixers.names()


def test_every_dependency_has_a_row():
    # of the package itself, and of the command line
    pyproject = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r"^(?:dependencies|lab) = \[(.*?)^\]", pyproject, re.M | re.S)
    page = (ROOT / "docs/dependencies.md").read_text()
    assert sorted(row[0] for row in rows(page, "package")) == sorted(
        re.findall(r'"([\w-]+)>', "".join(listed))
    )


def test_every_package_that_is_installed_has_a_licence_and_a_version():
    _, _, pyproject = (ROOT / "pyproject.toml").read_text().partition("[project]")
    page, pinned = ((ROOT / name).read_text() for name in ("docs/dependencies.md", "constraints.txt"))
    extras = re.findall(
        r"^(dependencies|\w+) = \[(.*?)\]$", pyproject.partition("[project.scripts]")[0], re.M | re.S
    )
    packages = {name for _, listed in extras for name in re.findall(r'"([\w-]+)(?:\[\w+\])?[<>=]', listed)}
    assert {"torch", "mkdocstrings", "jax"} <= packages
    for name in packages:
        assert re.search(rf"\b{name}\b", page), name
    _, _, peers = pyproject.partition("peers = [")
    # torch pins triton; nobody installs the peers but who measures, and vLLM has an environment of its own
    others = {"triton", "vllm", *re.findall(r'"([\w-]+)>', peers.partition("]")[0])}
    lines = {line.partition("==")[0].lower().replace("_", "-") for line in pinned.splitlines()}
    assert packages - others <= lines


def test_tables_are_up_to_date(tables):
    for path in tables.FILLED:
        assert tables.filled(path.read_text()) == path.read_text(), "run: python docs/tables.py"
    assert tables.LISTING.read_text() == tables.listing(), "run: python docs/tables.py"


# the next two read the tables back from the text, so that what writes them is checked too
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_row_with_all_its_pairs(tables, name):
    (cell,) = (row[-1] for row in rows(tables.operators(), "operator") if row[0] == f"`{name}`")
    if "mode" in inspect.signature(OPERATORS[name]).parameters:
        modes = (part.split(": ") for part in cell.split("<br>"))
        pairs = [(mode, backend) for mode, backends in modes for backend in backends.split(", ")]
        assert sorted(pairs) == sorted(OPERATORS[name].operator.pairs)
