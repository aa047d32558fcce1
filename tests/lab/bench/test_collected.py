"""Suites as tables: `linrec report` of the folder and of the table are the same page."""

import json
import shutil
from pathlib import Path

import pytest

from linrec.cli import main
from linrec.files import parse_json
from linrec.lab.bench import make_jobs, make_rows
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.rows import make_row
from linrec.lab.bench.worker import run_job
from linrec.lab.report import compare_runs
from linrec.lab.report.records import read_stored
from tests.lab.bench.test_running import OWN, TINY
from tests.tiers import thorough

# one worker trains the suite, and not each
pytestmark = [pytest.mark.xdist_group("a suite as a table"), thorough]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jobs that are done, that diverged, and that have not begun."""
    out = tmp_path_factory.mktemp("suite") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linrec.lab.bench.worker.speed_by_length", lambda *_, **__: [])
        for job in make_jobs([TINY], ["gla", f"{OWN}:Divergent", "lru"], [0, 1]):
            command = f"linrec bench tiny --mixers {job.mixer} --seeds {job.seed}"
            folder = write_job(job, out, {"command": command})
            if (job.mixer, job.seed) != ("lru", 1):
                run_job(folder)
    # speeds have more digits than a table keeps
    for path in out.rglob("metrics.jsonl"):
        records = [parse_json(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({k: rounded(v) for k, v in r.items()}) + "\n" for r in records))
    return out


def rounded(value: object) -> object:
    return float(f"{value:.7g}") if isinstance(value, float) else value


@pytest.fixture
def table(suite: Path, tmp_path: Path) -> Path:
    """The table alone, under the same name as the folder."""
    out = tmp_path / "tables" / suite.name
    assert main(["report", "--collect", str(suite), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["curves.jsonl", "rows.jsonl"]
    return out


def test_rows_from_a_table_are_rows_from_the_folders(suite: Path, table: Path) -> None:
    rows = make_rows(sorted(path.parent for path in suite.glob("*/*/*/job.json")))
    collected = [make_row(stored) for stored in read_stored([table])]
    assert [row["status"] for row in rows] == ["done", "done", "done", "not run", "diverged", "diverged"]
    for row, again in zip(rows, collected, strict=True):
        assert Path(again.pop("folder")).relative_to(table) == Path(row.pop("folder")).relative_to(suite)
        assert again == row


def test_pages_from_a_table_are_pages_from_the_folders(suite: Path, table: Path, tmp_path: Path) -> None:
    pages = []
    for name, folder in (("old", suite), ("new", table)):
        assert main(["report", str(folder), "--out", str(tmp_path / name)]) == 0
        page = (tmp_path / name / "report.html").read_text()
        pages.append(page.replace(str(folder), "FOLDER"))
    assert "<h1>linrec bench tiny</h1>" in pages[0]
    assert "3 of 6 jobs are done" in pages[0]
    assert pages[0] == pages[1]


def test_runs_of_a_suite_are_a_baseline(suite: Path, table: Path) -> None:
    for baseline in (table, table / "rows.jsonl", suite):
        found = compare_runs([suite / "copying" / "gla"], [baseline])
        assert [(len(each.scores), len(each.baseline), each.verdict) for each in found] == [
            (2, 2, "as before")
        ]


def test_a_job_that_was_done_and_lost_its_run_is_refused(suite: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(suite / "copying" / "gla" / "seed-0", tmp_path / "job")
    (tmp_path / "job" / "run" / "config.json").unlink()
    assert main(["report", "--collect", str(tmp_path / "job"), "--out", str(tmp_path / "table")]) == 2
    assert "is not a run folder: it has no config.json" in capsys.readouterr().err
    (tmp_path / "job" / "job.json").write_text('{"task": "copying"}')
    assert main(["report", str(tmp_path / "job")]) == 2
    assert "cannot be used: it has no 'mixer'" in capsys.readouterr().err
