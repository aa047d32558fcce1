"""How jobs end, and what is left of them."""

import dataclasses
import html
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

# now, for doctests leave their last result among the builtins, which tyro cannot be imported with
import tyro  # noqa: F401
from filelock import FileLock

from linrec.cli import main
from linrec.lab.bench import Entry, make_jobs, make_rows, run_jobs, write_page, write_rows
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.rows import make_row
from linrec.lab.bench.schedule import outcome_of
from linrec.lab.bench.variants import folder_name
from linrec.lab.bench.worker import _main, run_job, stop_without
from linrec.lab.report.records import read_table
from linrec.lab.train import InterruptedRunError, load_run
from linrec.lab.train.progress import Interrupt
from tests.tiers import thorough

OWN = f"{__package__}.own_mixers"
TINY = Entry(
    "copying",
    "copying",
    task={"length": 3, "n_copied": 3, "n_train": 64, "n_validation": 8, "n_test": 8, "test_lengths": (6,)},
    model={"d_model": 8, "d_channel_mixing": 16, "n_layers": 1},
    optim={"warmup_steps": 1},
    loop={"steps": 4, "batch_size": 8, "eval_every": 2, "log_every": 2, "compile": "off", "device": "cpu"},
)


@pytest.fixture
def folder_of(tmp_path):
    """Make the folder of a small job."""

    def make(mixer, seed=0, **task):
        entry = dataclasses.replace(TINY, task={**TINY.task, **task})
        (job,) = make_jobs([entry], [mixer], [seed])
        return write_job(job, tmp_path, {"command": f"linrec bench smoke --mixers {mixer}"})

    return make


@thorough
def test_a_row_has_all_of_a_job_that_is_done(folder_of):
    folder = folder_of("gla")
    assert make_rows([folder])[0]["status"] == "not run"
    assert run_job(folder) == "done"
    (row,) = make_rows([folder])
    expected = {"task": "copying", "mixer": "gla", "seed": 0, "status": "done", "steps": 4}
    assert {name: row[name] for name in expected} == expected
    assert row["metric"] == "accuracy" and row["score"] == row["test"]["accuracy"]
    assert row["test"].keys() == {"loss", "accuracy", "exact"} and row["probes"].keys() == {"6"}
    assert [step for step, _, _ in row["curve"]] == [2, 4]
    assert row["tokens_per_second"] > 0 and row["seconds"] > 0 and row["peak_bytes"]["process"] > 2**20
    assert row["chance"] == 1 / 8 and row["parameters"] > 0 and row["state_size"] > 0
    assert row["trivial_score"] == load_run(folder / "run").config.task.trivial_score
    assert [found["length"] for found in row["speed_by_length"]][:2] == [2, 9]
    assert row["state_elements"] == row["state_size"]
    assert row["config"]["model"]["mixer"] == "gla" and row["command"].endswith("--mixers gla")
    assert row["device"]["type"] == "cpu" and row["versions"]["torch"]
    # what has ended is not trained again
    before = (folder / "run" / "result.json").read_text()
    assert run_job(folder) == "done"
    assert (folder / "run" / "result.json").read_text() == before
    # what is lost is said to be so
    (folder / "run" / "result.json").unlink()
    assert make_rows([folder])[0]["message"] == f"{folder / 'run'} has no result; run the job again."
    (folder / "run" / "config.json").unlink()
    (row,) = make_rows([folder])
    assert row["status"] == "failed" and "config.json" in row["message"]


PEAK = """
import subprocess, sys
held = b"1" * 2**30
child = "from linrec.lab.bench.worker import _process_peak_bytes; print(_process_peak_bytes())"
subprocess.run([sys.executable, "-c", child], check=True)
"""


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_the_peak_of_a_job_is_not_that_of_the_command(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    found = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    assert 2**26 < int(found.stdout) < 2**30


def test_a_model_that_cannot_be_measured_is_trained_all_the_same(folder_of, monkeypatch):
    def measured(*_, **__):
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr("linrec.lab.bench.worker.speed_by_length", measured)
    folder = folder_of("gla")
    assert run_job(folder) == "done"
    (row,) = make_rows([folder])
    assert (row["status"], row["chance"], row["speed_by_length"]) == ("done", 1 / 8, None)


def test_a_regression_has_errors_and_no_accuracies(tmp_path):
    fields = {"length": 6, "n_train": 16, "n_validation": 8, "n_test": 8}
    entry = dataclasses.replace(TINY, name="adding", recipe="adding", task=fields)
    (job,) = make_jobs([entry], ["gla"], [0])
    folder = write_job(job, tmp_path, {"command": "linrec bench memory"})
    assert run_job(folder) == "done"
    (row,) = make_rows([folder])
    assert row["test"].keys() == {"loss", "mse", "nrmse"} and row["chance"] == 1 / 6
    assert [(step, accuracy) for step, _, accuracy in row["curve"]] == [(2, None), (4, None)]


@pytest.mark.parametrize(
    ("mixer", "task", "status", "message"),
    [
        (f"{OWN}:Divergent", {}, "diverged", "the loss is not finite at step "),
        (f"{OWN}:DivergentLater", {}, "diverged", "the loss on the validation split is not finite"),
        (f"{OWN}:Centred", {}, "failed", f"ConfigError: the mixer {OWN}:Centred breaks the law of causality"),
        (f"{OWN}:Narrow", {}, "failed", f"ConfigError: the mixer {OWN}:Narrow breaks the law of outputs"),
        (f"{OWN}:Hungry", {}, "out of memory", "OutOfMemoryError: tried to allocate 900 GiB"),
        (f"{OWN}:Huge", {}, "out of memory", "RuntimeError: "),
        (f"{OWN}:Wordless", {}, "out of memory", "MemoryError"),
        ("gla", {"n_test": 2000}, "failed", "ValueError: the split 'test' of Copying has too few"),
    ],
)
def test_a_job_that_fails_says_how(folder_of, tmp_path, mixer, task, status, message):
    folder = folder_of(mixer, **task)
    assert run_job(folder) == status
    (row,) = make_rows([folder])
    assert row["status"] == status and row["message"].startswith(message) and "\n" not in row["message"]
    assert "test" not in row and ("--lrs" in row["message"]) == (status == "diverged")
    page = write_page([row], tmp_path, title="suite").read_text()
    assert f"{status}: {row['message']}" in html.unescape(page) and "0 of 1 jobs are done" in page


@thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_is_killed_takes_nothing_else_with_it(folder_of, tmp_path, workers):
    folders = [folder_of(f"{OWN}:Killed"), folder_of("lru")]
    ended = []
    run_jobs(folders, workers=workers, ended=ended.append)
    assert {*ended} == {*folders}
    killed, done = make_rows(folders)
    assert (killed["status"], done["status"]) == ("killed", "done")
    assert killed["message"].startswith("killed by SIGKILL, possibly by the system")
    assert "step 2/4" in (folders[1] / "log.txt").read_text()
    files = write_rows(folders, tmp_path)
    assert [make_row(job)["status"] for job in read_table(tmp_path)] == ["killed", "done"]
    assert killed["message"] in write_page([killed, done], tmp_path, title="suite").read_text()
    table = pytest.importorskip("pyarrow.parquet").read_table(files[2]).to_pylist()
    assert [row["mixer"] for row in table] == [killed["mixer"], "lru"]
    assert json.loads(table[1]["test"]) == done["test"] and table[0]["test"] is None


def test_after_the_deadline_no_job_is_started(folder_of):
    folder = folder_of("gla")
    run_jobs([folder], deadline=time.monotonic() - 1)
    assert make_rows([folder])[0]["status"] == "not run"


@thorough
def test_a_command_that_is_ended_leaves_a_page(tmp_path, capsys, monkeypatch, here):
    pages = []

    def ended(folder):
        # what a command that is killed now has left
        pages.append((tmp_path / "report.html").read_text())
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("linrec.lab.bench.suites.SUITES", {"tiny": (TINY,)})
    here(ended)
    before = signal.getsignal(signal.SIGTERM)
    words = ["bench", "tiny", "--mixers", "gla", "lru", "--seeds", "0", "--out"]
    assert main([*words, str(tmp_path)]) == 130
    assert "stopped; the same command resumes" in capsys.readouterr().err
    assert len(pages) == 1 and "Jobs that have not been run: 2" in pages[0]
    assert signal.getsignal(signal.SIGTERM) == before
    with FileLock(tmp_path / ".lock"):
        assert main([*words, str(tmp_path)]) == 2
    assert "runs linrec bench here" in capsys.readouterr().err
    # a file where the folder should be
    assert main([*words, str(tmp_path / "rows.jsonl")]) == 1
    assert "rows.jsonl cannot be written: " in capsys.readouterr().err


def test_a_job_that_is_stopped_names_the_command_of_its_suite(folder_of, monkeypatch):
    def stopped(*_, **__):
        raise InterruptedRunError("stopped at step 2 of 4; continue with: linrec train --resume")

    monkeypatch.setattr("linrec.lab.bench.worker.fit", stopped)
    folder = folder_of("gla")
    assert run_job(folder) == "stopped"
    assert outcome_of(folder)["message"] == "stopped with a checkpoint; the same command resumes from it."


@pytest.mark.parametrize(("workers", "gpus"), [(1, ["3,5"]), (2, ["3", "5"]), (3, ["3", "5", "3"])])
def test_jobs_share_gpus_and_are_asked_to_stop_with_their_command(
    folder_of, processes, monkeypatch, workers, gpus
):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([folder_of("gla", seed) for seed in range(4)], workers=workers)
    # the first jobs, with this process to watch
    assert [process.name for process in processes.started] == [f"seed-{n}" for n in range(workers)]
    assert [process.gpu for process in processes.started] == gpus
    assert {process.starter for process in processes.started} == {os.getpid()}
    assert {process.returncode for process in processes.started} == {130}


def test_the_next_job_starts_when_one_has_ended(folder_of, processes):
    processes.ends = {"seed-0": 1, "seed-1": -9, "seed-2": 0}
    ended = []
    run_jobs([folder_of("gla", seed) for seed in range(3)], workers=2, ended=ended.append)
    assert sorted(folder.name for folder in ended) == [process.name for process in processes.started]
    # none of them wrote an outcome
    outcomes = {folder.name: (folder, outcome_of(folder)) for folder in ended}
    assert {name: of["status"] for name, (_, of) in outcomes.items()} == {
        **{"seed-0": "failed", "seed-2": "failed"},
        "seed-1": "killed",
    }
    folder, outcome = outcomes["seed-0"]
    assert outcome["message"] == f"its process ended with exit status 1; {folder / 'log.txt'} has its output"


def test_a_job_stops_when_the_command_that_started_it_is_killed(monkeypatch):
    with Interrupt() as interrupt:
        watch = threading.Thread(target=stop_without, args=(os.getppid(), 0.01), daemon=True)
        watch.start()
        watch.join(0.1)
        assert watch.is_alive() and not interrupt.requested
        # as if that one were no more, also where it is the first process, as in a background job
        monkeypatch.setattr("os.getppid", lambda: -1)
        watch.join()
        assert interrupt.requested


def test_a_job_waits_for_a_process_that_is_still_at_work_on_it(folder_of, monkeypatch):
    folder = folder_of("gla")
    at_work = []
    monkeypatch.setattr("linrec.lab.bench.worker.run_job", lambda folder: at_work.append(folder) or "done")
    with FileLock(folder / ".lock"):
        waiting = threading.Thread(target=_main, args=(str(os.getppid()), str(folder)))
        waiting.start()
        waiting.join(0.2)
        assert not at_work
    waiting.join()
    assert at_work == [folder]


def test_the_table_before_the_run_says_what_is_unequal_and_what_grows(tmp_path, capsys, monkeypatch, here):
    monkeypatch.setattr("linrec.lab.bench.suites.SUITES", {"tiny": (TINY,)})
    here(lambda folder: None)
    label = "delta_net(n_heads=2, beta='double_sigmoid', conv_size=3)"
    words = ["--mixers", "attention", f"{OWN}:Large", label, "--seeds", "0", "--out", str(tmp_path)]
    assert main(["bench", "tiny", *words]) == 1
    heading, attention, large, *others = capsys.readouterr().out.splitlines()
    assert heading.split() == ["task", "mixer", "width", "parameters", "state"]
    assert re.fullmatch(r"copying +attention +8 +[\d,]+ +16 a step *", attention)
    assert re.fullmatch(r"copying +\S+:Large +8 +[\d,]+ +0 *", large)
    # a long label is whole
    assert "conv_size=3)" in "".join(others) and "…" not in "".join(others)
    n, most = attention.split()[3], large.split()[3]
    wrapped = " ".join(" ".join(others).split())
    assert f"copying/{OWN}:Large: {most} parameters; no width comes nearer to {n}" in wrapped
    page = (tmp_path / "report.html").read_text()
    assert f"{OWN}:Large has {most}." in page


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["smok", "--mixers", "gla"], "no suite 'smok'; did you mean 'smoke'"),
        (["smoke", "--mixers", "gla", "--tasks", "copyin"], "did you mean 'copying'"),
        (["smoke", "--mixers", "gla", "--seeds", "0", "0"], "`--seeds` must be different"),
        (["smoke", "--mixers", "gla,gla(),lru"], "'gla' is given twice"),
        (["smoke", "--mixers=lru,gla(d_v=8, n_head=2)", "--seeds", "0"], "did you mean 'n_heads'"),
        (["smoke", "--mixers", "gla", "--seeds", "-1"], "seeds"),
        (["smoke", "--mixers", "gla", "--workers", "0"], "`--workers` must be at least 1; got 0"),
        (["smoke", "--mixers", "gla", "--budget", "0"], "`--budget` must be above 0 minutes; got 0"),
        (["smoke", "--mixers", "gla", "--budget", "nan"], "`--budget` must be above 0 minutes; got nan"),
        (["smoke", "--mixers", "gla", "--lrs", "0"], "`--lrs` must be positive and finite; got [0.0]"),
        (["smoke", "--mixers", "gla", "--lrs", "nan"], "`--lrs` must be positive and finite; got [nan]"),
        (["smoke", "--mixers", "gla", "--lrs", "0.1", "0.1"], "`--lrs` must be different; got [0.1, 0.1]"),
        (["smoke", "--mixers", "gla", "--parameters", "0"], "`--parameters` must be at least 1; got 0"),
        (["smoke"], "mixers"),
    ],
)
def test_what_the_command_line_refuses(words, complaint, capsys, tmp_path):
    assert main(["bench", *words, "--out", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_suite_from_the_command_line(tmp_path, capsys, monkeypatch, here):
    monkeypatch.setattr("linrec.lab.bench.suites.SUITES", {"tiny": (TINY,)})
    typed = f"gla(n_heads=2, d_v=8),{OWN}:Divergent"
    words = ["bench", "tiny", "--mixers", typed, *["--lrs", "0.001", "0.01", "--out"], str(tmp_path)]
    here(run_job)
    monkeypatch.setattr("linrec.lab.bench.worker.speed_by_length", lambda *_, **__: [])
    assert main([*words, "--seeds", "0", "4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    told = " ".join(" ".join(lines).split())
    label = "gla(n_heads=2, d_v=8)"
    # mixers and what needs none, in a table for 80 columns; the longest probe has 6 steps
    start = next(place for place, line in enumerate(lines) if line.split()[2:4] == ["test", "score"])
    (scored, *_, chance, trivial) = lines[start + 1 : start + 6]
    assert scored.startswith(f"copying  {label}  ") and re.search(r" ± .* accuracy  0\.\d+ at 6$", scored)
    assert chance.split() == ["chance", "0.125"] and trivial.split()[:2] == ["trivial", "predictor"]
    assert max(map(len, lines[start : start + 6])) <= 80
    assert f"copying/{folder_name(label)}/seed-0-lr-0.001: done, accuracy" in told
    assert "Divergent seed 0 lr-0.01: diverged: the loss is not finite" in told
    rows = [make_row(job) for job in read_table(tmp_path)]
    mine = [row for row in rows if row["mixer"] == label]
    assert all(row["mixer_args"]["n_heads"] == 2 for row in mine)
    assert [(row["seed"], row["lr"]) for row in mine[:2]] == [(0, 0.001), (0, 0.01)]
    best = min(mine[:2], key=lambda row: row["validation"]["loss"])["lr"]
    # the rate of the lowest validation loss is gone on with
    assert [(row["seed"], row["lr"]) for row in mine[2:]] == [(4, best)]
    assert mine[2]["command"].endswith(
        f"--mixers '{label}' --tasks copying --seeds 4 --parameters {mine[2]['parameters']} --lrs {best:g}"
    )
    assert main([*words[:3], f"{OWN}:Mute", "--seeds", "0", "--out", str(tmp_path / "mute")]) == 1
    assert "failed, RuntimeError: no [/red] and [bold]" in " ".join(capsys.readouterr().out.split())
    # the same command has nothing left to do but what did not end well
    before = {row["folder"]: row.get("seconds") for row in rows}
    assert main([*words, "--seeds", "0", "4"]) == 1
    again = [make_row(job) for job in read_table(tmp_path)]
    assert {row["folder"]: row.get("seconds") for row in again} == before
    assert "2 of 4 jobs are already done" in capsys.readouterr().out
    # another command in the same folder adds to what is there, and one that is refused takes nothing away
    assert main(["bench", "tiny", "--mixers", "lru", "--seeds", "0", "--out", str(tmp_path)]) == 1
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows) + 1
    monkeypatch.setattr("linrec.lab.bench.suites.SUITES", {"tiny": (dataclasses.replace(TINY, optim={}),)})
    assert main(["bench", "tiny", "--mixers", "lru", "--seeds", "0", "--out", str(tmp_path)]) == 2
    assert "has a job of another configuration" in capsys.readouterr().err
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows) + 1
