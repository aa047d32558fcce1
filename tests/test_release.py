"""Files of a release: the version, the changelog, and the workflow of continuous integration."""

import re
from pathlib import Path

import pytest
import yaml

from linrec import __version__

from .markdown import ROOT

FORMS = sorted((ROOT / ".github").rglob("*.yml"))
JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def test_citation_and_changelog_have_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert citation["version"] == newest[1] == __version__


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_or_workflow_is_yaml(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert content["name"] and content["description"]
        names = [field["id"] for field in content["body"]]
        assert len(names) == len({*names}) > 0


def test_the_workflow_pins_actions_and_calls_targets_that_exist() -> None:
    steps = [step for job in JOBS.values() for step in job["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    commands = [step["run"] for step in steps if "run" in step]
    called = {target for text in commands for target in re.findall(r"^make (\w+)$", text, re.MULTILINE)}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"docs", "release"} <= called <= {*targets}
    assert ".ci/run" in commands


def test_the_workflow_runs_the_oldest_torch_and_the_pinned_version() -> None:
    matrix = JOBS["test"]["strategy"]["matrix"]["include"]
    pyproject = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'"torch>=([\d.]+)"', pyproject)
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert oldest and pinned
    assert {entry["torch"] for entry in matrix} == {oldest[1], pinned[1]}
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)
    assert {pythons[0], pythons[-1]} < {entry["python"] for entry in matrix} <= {*pythons}
    assert f'requires-python = ">={pythons[0]}"' in pyproject
