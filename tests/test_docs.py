"""Code, commands and links of README, CONTRIBUTING and the pages of docs are right."""

import re
from importlib.util import find_spec

import pytest
import torch

from linrec.cli.dispatch import COMMANDS
from linrec.cli.parsing import option_names, peek
from linrec.cli.train import options_type
from linrec.lab.train import get_recipe
from tests.markdown import PAGES, ROOT, blocks, commands, execute, prose
from tests.tiers import thorough, tiered

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
# their blocks train a suite, or compile
SLOW = [ROOT / "docs" / name for name in ("bench.md", "export.md", "models.md")]
NAMED = re.compile(r"`((?:src|tests|docs|examples|perf)/[\w/.]*|[A-Z]\w+\.(?:md|cff)|\w+\.txt)`")

MADE = [ROOT / "docs" / name for name in ("mixers", "memories", "reference")]


@thorough
@pytest.mark.parametrize(
    "page",
    tiered([page for page in PAGES if page not in SLOW], SLOW),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_python_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    """Blocks run one after the other; a text block right below one is what it prints."""
    monkeypatch.chdir(tmp_path)
    namespace, printed = {}, ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in blocks(page):
            if block.language == "python":
                printed = execute(block.text, page.name, namespace)
            elif block.language == "text" and block.follows:
                assert printed == block.text


def test_the_mixer_of_the_tutorial_is_complete_and_short():
    mixer = next(block.text for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "python")
    assert mixer.startswith('"""') and "__all__" in mixer and len(mixer.splitlines()) <= 60


@every_page
def test_commands_name_what_exists(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, first, *others in commands(page):
        if program == "make":
            assert first in targets
        elif program == "python" and not first.startswith("-"):
            assert (ROOT / first).is_file()
        elif program == "python" and first == "-m":
            assert find_spec(others[0])
        elif program == "pytest":
            assert first == "-m" or (ROOT / first).exists()
        elif program == "linrec":
            assert first in COMMANDS
            if first == "train" and not others[0].startswith("-"):
                options = options_type(get_recipe(others[0]), peek(others, "--model.mixer"))
                known = {"--help", *option_names(options)}
                assert {word for word in others if word.startswith("--")} <= known


@every_page
def test_links_and_named_files_exist(page):
    text = prose(page)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'<img src="([^"]+)"', text):
        # the pages of mixers and of the reference are made when the site is built, which checks them
        if not target.startswith("https://") and (page.parent / target).resolve().parent not in MADE:
            assert (page.parent / target).is_file(), target
    for name in NAMED.findall(text):
        # capitals stand for a name that the reader chooses
        if not re.search(r"/\w*[A-Z]{4}", name):
            assert (ROOT / name).exists(), name


def test_every_page_has_a_place_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        # the hooks find the pages of results and of mixers
        if page.parent in (ROOT / "docs", ROOT / "docs/operators"):
            assert f": {page.relative_to(ROOT / 'docs')}\n" in navigation
