"""The suite `streams`: jobs of learners on streams, their rows, their page, and how they go on."""

import json
import shutil

import pytest

from linrec.cli.dispatch import run
from linrec.lab.bench import (
    LEARNERS,
    STREAMS,
    StreamEntry,
    make_rows,
    make_stream_jobs,
    write_page,
    write_rows,
)
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.rows import make_row, stream_scores
from linrec.lab.bench.worker import run_job
from linrec.lab.report import collect_runs
from linrec.lab.report.records import read_stored
from linrec.lab.streams.learn import learn
from linrec.lab.train import ConfigError, RunFolderError
from tests.tiers import thorough

ENTRIES = [
    StreamEntry("delay-copy", {"every": 500, "delays": (2, 4)}, steps=1500),
    StreamEntry("sines", steps=1500),
]
COMPARED = ["rtrl", "tbptt(window=50)", "frozen_rls"]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Return a folder with jobs that have ended."""
    out = tmp_path_factory.mktemp("suite")
    jobs = make_stream_jobs(ENTRIES, COMPARED, [0])
    folders = [write_job(job, out, {"command": "linrec bench streams"}) for job in jobs]
    assert [run_job(folder) for folder in folders] == ["done"] * len(folders)
    return out, folders


def test_every_learner_has_a_job_on_every_stream():
    jobs = make_stream_jobs(STREAMS, [], [0, 1])
    assert len({job.folder for job in jobs}) == len(STREAMS) * len(LEARNERS) * 2
    assert len({(job.task, job.config.rows, job.steps) for job in jobs}) == len(STREAMS)
    assert {job.described["metric"] for job in jobs} == {"loss", "mse"}
    with pytest.raises(ConfigError, match="rtrl"):
        make_stream_jobs(STREAMS, ["rtlr"], [0])


def test_rows_have_scores_costs_and_bounds(suite):
    rows = make_rows(suite[1])
    assert {(row["task"], row["mixer"]) for row in rows} == {
        (entry.name, label) for entry in ENTRIES for label in COMPARED
    }
    by = {(row["task"], row["mixer"]): row for row in rows}
    copied = by["delay-copy", "rtrl"]
    assert (
        copied["score"]
        == copied["stream"]["loss"]
        < copied["trivial_score"]
        == pytest.approx(1.3863, abs=1e-4)
    )
    assert len(copied["curve"]) == 6 and copied["steps"] == 1500
    assert copied["stream"]["recovery"] > 0 and copied["stream"]["retained"] is not None
    assert set(by["sines", "rtrl"]["stream"]["bounds"]) == {"last value", "16 values by least squares"}
    for row in rows:
        early, late = row["stream"]["at"]
        assert early["step"] == 1000 and late["step"] == 1250
        assert early["memory_bytes"] == late["memory_bytes"] > 0
        assert early["microseconds_per_step"] > 0 < row["tokens_per_second"]
        assert row["speed_by_length"][0]["step_bytes"] > 0


def test_a_table_of_streams_is_read_as_its_folders(suite, tmp_path):
    out, folders = suite
    write_rows(folders, out)
    collect_runs([out], tmp_path / "table")
    stored = read_stored([tmp_path / "table"])
    rows = {row["mixer"]: row for row in map(make_row, stored) if row["task"] == "sines"}
    for row in make_rows(folders):
        if row["task"] == "sines":
            assert rows[row["mixer"]]["stream"] == row["stream"]


def test_the_page_has_a_picture_of_every_stream(suite, tmp_path):
    page = write_page(make_rows(suite[1]), tmp_path, title="streams").read_text()
    assert all(f"{entry.name}: loss over time" in page for entry in ENTRIES)
    assert "Dotted lines are drifts" in page and "µs/step late" in page and "frozen_rls" in page
    # explained, and models of other sizes are no fault
    assert "Recovery counts the steps after a drift" in page and "What is missing" not in page
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        f"{entry.name}-curves.png" for entry in ENTRIES
    }


def test_a_job_that_was_stopped_goes_on_to_the_same_scores(suite, tmp_path):
    (job,) = make_stream_jobs(ENTRIES[:1], ["rtrl"], [0])
    folder = write_job(job, tmp_path, {"command": ""})
    learn(job.config, folder / "run", steps=700)
    (folder / "run/result.json").unlink()
    assert run_job(folder) == "done"
    whole = next(row for row in make_rows(suite[1]) if row["mixer"] == "rtrl" and row["task"] == job.task)
    (row,) = make_rows([folder])
    assert row["curve"] == whole["curve"] and row["score"] == whole["score"]
    # the same job is not another one; the same job of other length is
    assert write_job(job, tmp_path, {"command": ""}) == folder
    with pytest.raises(ConfigError, match="another configuration"):
        write_job(make_stream_jobs(ENTRIES[:1], ["rtrl"], [0], steps=8)[0], tmp_path, {"command": ""})


def test_means_are_of_drifts_and_of_returns():
    record = {"split": "stream", "loss": 1.0, "memory_bytes": 8}
    metrics = [record | {"step": step, "seconds": step / 1000} for step in (500, 1000, 1500)]
    result = {"curve": [1.0], "recoveries": [{"steps": 10}, {"steps": 20}], "forgotten": []}
    found = stream_scores(metrics, result)
    assert found["recovery"] == 15 and found["retained"] is None and "curve" not in found
    assert [part["step"] for part in found["at"]] == [1000, 1000]
    assert found["at"][0]["microseconds_per_step"] == pytest.approx(1000)


@pytest.mark.parametrize(
    "words, said",
    [
        (["streams", "--mixers", "lru"], "--learners"),
        (["smoke", "--mixers", "lru", "--learners", "rtrl"], "streams"),
        (["streams", "--learners", "rtlr"], "rtrl"),
        (["streams", "--tasks", "sinus"], "sines"),
        (["streams", "--steps", "0"], "--steps"),
        (["strems"], "streams"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@thorough
def test_the_command_runs_the_suite_and_skips_what_is_done(tmp_path, capsys, here):
    here(run_job)
    words = ["bench", "streams", "--tasks", "delay-copy", "--learners", "frozen_rls,rtrl", "--seeds", "0"]
    words += ["--steps", "300", "--out", str(tmp_path / "out")]
    assert run(words) == 0
    assert run(words) == 0
    assert "2 of 2 jobs are already done" in capsys.readouterr().out
    lines = (tmp_path / "out/rows.jsonl").read_text().splitlines()
    assert "--learners frozen_rls --tasks delay-copy" in json.loads(lines[0])["command"]
    assert run(["report", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    "file, field", [("job.json", "config"), ("run/result.json", "recoveries"), ("run/result.json", "bounds")]
)
def test_what_is_damaged_is_named(suite, tmp_path, file, field):
    folder = tmp_path / "job"
    shutil.copytree(suite[1][0], folder)
    content = json.loads((folder / file).read_text())
    content.pop("checksum")
    content[field] = {"stream": "sines"} if field == "config" else 3
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match="d_model|mixer_args" if field == "config" else field):
        make_rows([folder])
