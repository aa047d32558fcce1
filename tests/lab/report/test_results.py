"""The results of the repository: tables that reports read, with the numbers that README and docs name."""

import json
import re
import shlex
import string
import subprocess
from pathlib import Path

import pytest

from linrec.cli.bench import with_names_apart
from linrec.cli.options import BenchOptions
from linrec.cli.parsing import parse, peek
from linrec.cli.train import config_of, options_type
from linrec.lab.bench import get_suite, make_jobs
from linrec.lab.bench.queue import read_queue
from linrec.lab.bench.rows import make_row, standings
from linrec.lab.report import group_runs, read_runs
from linrec.lab.report.records import CURVES, POINTS, read_stored
from linrec.lab.report.write import means
from linrec.lab.style import FORMATS, format_mean_and_spread
from linrec.lab.train import get_recipe
from tests.tiers import thorough

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
TABLES = sorted(path.parent for path in RESULTS.rglob("rows.jsonl"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]
SEED = re.compile(r" (--loop\.seed|--seeds) \d+")
NUMBER = re.compile(r"[\d.,]+ ± [\d.]+")


@pytest.fixture(scope="module")
def reported() -> set[str]:
    """Return every mean with its spread that reports of the tables show."""
    found: set[str] = set()
    for table in TABLES:
        stored = read_stored([table])
        if stored[0].job is not None:
            of_jobs = standings([make_row(job) for job in stored])
            found |= {format_mean_and_spread(each.scores, FORMATS[each.metric]) for each in of_jobs}
        else:
            found |= {text for arm in group_runs(read_runs([table])) for text in means(arm).values()}
    return found


@thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_readme_and_docs_have_the_digits_of_reports(page: Path, reported: set[str]) -> None:
    assert set(NUMBER.findall(page.read_text(encoding="utf-8"))) <= reported


def test_the_readme_has_the_test_accuracies_of_memory_horizon() -> None:
    arms = group_runs(read_runs([RESULTS / "memory-horizon" / "memory-horizon-tuned"]))
    sentence = " data-controlled and ".join(means(arm)["test accuracy"] for arm in arms)
    assert f"{sentence} fixed" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_curves_of_the_results_are_short() -> None:
    for table in TABLES:
        for line in (table / CURVES).read_text(encoding="utf-8").splitlines():
            assert sum(len(curve["step"]) for curve in json.loads(line)["curves"].values()) <= POINTS


@thorough
def test_jobs_of_the_queue_are_commands(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(100 * string.printable)
    # jobs of other seeds are the same command
    jobs = {SEED.sub("", job.command): job for job in read_queue(RESULTS / "queue.ini")}
    for job in jobs.values():
        command, name, *words = shlex.split(job.command)
        if command == "train":
            config = get_recipe(name)
            of_mixers = options_type(
                config, peek(words, "--model.mixer"), of_encoder=peek(words, "--model.encoder.mixer")
            )
            options = parse(of_mixers, words, job.name)
            config_of(options, config.name, config.task.section)
        else:
            options = with_names_apart(parse(BenchOptions, [name, *words], job.name))
            reading = {word.partition("=")[0] for word in options.data}
            entries = [
                entry.reading(text) if entry.name in reading else entry
                for entry in get_suite(name)
                if entry.name in options.tasks or not options.tasks
            ]
            # entries of a suite have models of the same kind
            made = make_jobs(entries[:1], options.mixers, options.seeds[:1], parameters=options.parameters)
            assert made and all(each.ended is None for each in made), job.name


def test_pages_have_all_short_runs_of_text_and_their_number() -> None:
    runs = read_runs([RESULTS / "shakespeare-char-cpu"])
    listed = []
    for page, count in ("matrix-states", "\n{} mixers,"), ("state-spaces", "\n{} such mixers,"):
        text = (ROOT / "docs" / "results" / f"{page}.md").read_text(encoding="utf-8")
        table = re.search(r"^\| mixer \| training \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
        assert table is not None
        names = re.findall(r"^\| `(\w+)`", table[1], re.MULTILINE)
        assert count.format(len(names)) in text
        listed += names
    assert sorted(listed) == sorted(run.config.model.mixer for run in runs)
    page = (ROOT / "docs" / "which-mixer.md").read_text(encoding="utf-8")
    assert f"\n{len(runs)} of the mixers ran 500 steps" in page
    assert {run.result["steps"] for run in runs if run.result is not None} == {500}


def test_results_are_few_and_small_files() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("counts the files that git knows")
    listed = subprocess.run(
        ["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.splitlines()]
    assert 13 * 2 <= len(files) <= 110
    sizes = [path.stat().st_size for path in files]
    assert max(sizes) <= 1_000_000 and sum(sizes) <= 10_000_000
    assert not {path.name for path in files} & {"config.json", "result.json", "metrics.jsonl"}
