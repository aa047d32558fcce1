"""Queues of jobs: which jobs start, what they leave when the allocation ends, and how they go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from linrec.cli import main
from linrec.files import read_json
from linrec.lab.bench import queue as module
from linrec.lab.bench.queue import MIB, Queue, QueuedJob, read_queue
from linrec.lab.report import read_runs
from linrec.lab.train import ConfigError, load_run
from linrec.lab.train.checkpoint import BEST, CURRENT, PREVIOUS
from tests.lab.bench.conftest import Process
from tests.lab.train.test_resume import assert_same_run
from tests.tiers import thorough

HEAD = "[DEFAULT]\ncommand = train lm\nminutes = 0.001\n"
LONG = HEAD.replace("0.001", "9")


class Maker:
    """Makes queues of the jobs of a text, in one folder."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "queue"
        self.folder.mkdir()

    def __call__(self, text: str, **options: Any) -> tuple[Queue, dict[str, QueuedJob]]:
        file = self.folder.with_name("jobs.ini")
        file.write_text(text)
        jobs = read_queue(file)
        options = {"per_gpu": 1, "carry": 48, "tell": lambda line: None, **options}
        return Queue(jobs, self.folder, **options), {job.name: job for job in jobs}

    def started(self, text: str, **options: Any) -> list[str]:
        """Return the jobs that start in an allocation of a third of a second."""
        self(text, **options)[0].run(0.006, grace=0.05)
        return [process.name for process in Process.started]

    def run(self, name: str, *, mib: float | None = None, finished: bool = False, **files: str) -> Path:
        """Make a run folder by hand: 10 of 110 steps in a minute, and 5 seconds to compile."""
        run = self.folder / name
        run.mkdir(parents=True)
        (run / "config.json").write_text('{"recipe": "lm", "total_steps": 110, "config": {}}')
        records = [{"split": "train", "step": step, "seconds": 5 + 6 * (step - 1)} for step in (1, 6, 11)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if mib is not None:
            for name in (CURRENT, PREVIOUS, BEST):
                (run / name).write_bytes(bytes(int(mib * MIB)))
        if finished:
            (run / "result.json").write_text("{}")
        return run


@pytest.fixture
def queue(tmp_path: Path, processes: type[Process]) -> Maker:
    """Queues whose jobs are `Process`, on two GPUs."""
    return Maker(tmp_path)


def test_jobs_start_by_priority_and_share_gpus(queue: Maker) -> None:
    text = f"{HEAD}[a]\nseeds = 0 1 2\nper-gpu = 2\n[b]\npriority = 1\n[c]\n"
    assert queue.started(text) == ["b", "a-0", "a-1"]
    assert [process.gpu for process in Process.started] == ["3", "5", "5"]
    assert Process.started[1].words == ["train", "lm", "--loop.seed", "0", "--out", str(queue.folder / "a-0")]
    # without a number of its own, a job takes the number of the queue
    Process.started, Process.ends = [], {"b": 0}
    assert queue.started(text, per_gpu=4) == ["b", "a-0", "a-1", "a-2", "c"]
    assert [process.gpu for process in Process.started] == ["3", "5", "3", "5", "3"]


def test_a_job_starts_if_its_time_or_its_checkpoint_fits(
    queue: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{LONG}[a]\ncheckpoint = 30\n[b]\ncheckpoint = 49\n[c]\ncheckpoint = 20\n[d]\ncheckpoint = 15\n"
    # no time for a part of a run
    assert queue.started(text, per_gpu=4) == []
    monkeypatch.setattr(module, "LEAST", 0.0)
    # c does not fit beside a
    assert queue.started(text, per_gpu=4) == ["a", "d"]
    Process.started = []
    assert queue.started(text.replace("minutes = 9", "minutes = 0.001"), per_gpu=4) == ["a", "b", "c", "d"]
    # a run that was stopped comes first, and its checkpoint takes room
    queue.run("d", mib=20)
    made, jobs = queue(text)
    jobs["d"].status = "stopped"
    made.run(0, grace=0)
    Process.started = []
    assert queue.started(text, per_gpu=4) == ["d"]
    Process.started = []
    assert queue.started(text.replace("minutes = 9", "minutes = 0.001"), per_gpu=4) == ["d", "a", "b", "c"]


def test_a_part_that_ran_says_what_is_left(queue: Maker) -> None:
    for name, mib in (("stopped", 1.0), ("lost", None)):
        queue.run(name, mib=mib)
    (queue.folder / "begun").mkdir()
    _, jobs = queue(f"{LONG}[stopped]\n[lost]\n[begun]\n[suite]\ncommand = bench smoke\n")
    # 99 of 110 steps, 6 seconds each, and half a minute to start
    assert jobs["stopped"].left == pytest.approx(0.5 + 9.9)
    assert jobs["lost"].left == pytest.approx(0.5 + 11.0)
    assert jobs["begun"].left == jobs["suite"].left == 9
    # the newest checkpoint and the best model, but not the checkpoint before
    assert [jobs[name].bytes / MIB for name in ("stopped", "lost")] == [2, 0]


def test_a_failure_is_tried_once_more_alone_and_keeps_its_last_lines(queue: Maker) -> None:
    Process.ends = {"a": 1, "b": -9, "c": 0}
    text = f"{HEAD}[a]\n[b]\n[c]\n"
    assert sorted(queue.started(text, per_gpu=2)) == ["a", "a", "b", "b", "c"]
    _, jobs = queue(text)
    assert [job.status for job in jobs.values()] == ["failed", "failed", "done"]
    assert jobs["a"].message == "exit status 1 | line 4 | line 5 | line 6 | line 7 | line 8"
    # neither failed nor done jobs start again
    Process.started = []
    assert queue.started(text) == []
    # one job to a GPU after a failure, because memory may have run out
    Process.ends = {}
    (queue.folder / "queue.json").unlink()
    _, jobs = queue(text)
    for name in "ab":
        jobs[name].failures = 1
    stored = {name: {each: getattr(job, each) for each in module.KEPT} for name, job in jobs.items()}
    (queue.folder / "queue.json").write_text(json.dumps(stored))
    assert queue.started(text, per_gpu=4) == ["a", "b"]


@pytest.mark.parametrize("deaf", [False, True])
def test_jobs_are_asked_to_stop_and_then_killed(queue: Maker, deaf: bool) -> None:
    Process.deaf = deaf
    made, jobs = queue(f"{HEAD}[a]\n[b]\n")
    queue.run("b", mib=1)
    began = time.monotonic()
    assert made.run(0.01, grace=0.2) is False
    assert (time.monotonic() - began > 0.55) == deaf
    assert {process.returncode for process in Process.started} == {-9 if deaf else 130}
    # without a checkpoint it starts again
    assert [job.status for job in jobs.values()] == ["waiting", "stopped"]
    assert Process.started[1].words[:2] == ["train", "--resume"]


def test_a_signal_ends_the_queue(queue: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    made, jobs = queue(f"{HEAD}[a]\n")
    monkeypatch.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    assert made.run(60, grace=1) is True
    assert jobs["a"].failures == 0


def test_a_slim_folder_has_what_resuming_needs(queue: Maker) -> None:
    for name, mib in {"first": 10, "second": 10, "third": 5, "end": 1}.items():
        (queue.run(name, mib=mib, finished=name == "end") / "events.out.tfevents.1").touch()
    made, jobs = queue(f"{HEAD}[end]\n[second]\n[third]\n[first]\npriority = 1\n", carry=30)
    for job in jobs.values():
        job.status = "done" if job.name == "end" else "stopped"
    made.slim()
    kept = {path.relative_to(queue.folder).as_posix() for path in queue.folder.rglob("*.*") if path.is_file()}
    records = {f"{name}/{file}" for name in jobs for file in ("config.json", "metrics.jsonl")}
    carried = {f"{name}/{file}" for name in ("first", "third") for file in (CURRENT, BEST)}
    assert kept == {*records, *carried, "end/result.json", "queue.json"}
    assert jobs["second"].status == "waiting" and "20 MiB is not carried" in jobs["second"].message
    # its size is remembered, so it is not split again
    assert queue(f"{HEAD}[second]\n")[1]["second"].bytes == 20 * MIB


def test_a_queue_that_was_killed_goes_on(queue: Maker) -> None:
    text = f"{HEAD}[a]\n[b]\n[c]\n"
    made, jobs = queue(text)
    for job in jobs.values():
        job.status = "running"
    made.run(0, grace=0)
    queue.run("a", mib=1)
    queue.run("b", mib=1, finished=True)
    assert [job.status for job in queue(text)[1].values()] == ["stopped", "done", "waiting"]
    with pytest.raises(ConfigError, match=r"a was begun as 'train lm'; give the new job another name"):
        queue(text.replace("train lm", "train lm --loop.steps 3"))
    # jobs of another file are kept
    queue(f"{HEAD}[other]\n")[0].run(0, grace=0)
    assert read_json(queue.folder / "queue.json").keys() == {"a", "b", "c", "other"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a]\ncommand = train lm\nminute = 1", "no field of [a] called 'minute'; did you mean 'minutes'?"),
        ("[a]\ncommand = train lm", "[a] needs `minutes` above 0"),
        ("[a]\ncommand = train lm\nminutes = nan", "[a] needs `minutes` above 0"),
        ("[a]\ncommand = train lm\nminutes = many", "could not convert string to float: 'many'"),
        ("[a]\ncommand = train lm\nminutes = 1\nper-gpu = -1", "no negative `per-gpu`"),
        ("[a]\nminutes = 1", "`command` of [a] must be train RECIPE or bench SUITE"),
        ("[a]\ncommand = generate run\nminutes = 1", "`command` of [a] must be train RECIPE or bench SUITE"),
        ("[a]\ncommand = train --resume=x\nminutes = 1", "without --out and --resume"),
        ("[/a]\ncommand = train lm\nminutes = 1", "the name [/a] must be a path below"),
        ("[a/../b]\ncommand = train lm\nminutes = 1", "the name [a/../b] must be a path below"),
        (f"{HEAD}[a]\n[a/b]\n", "not within another job's; see [a/b]"),
        (f"{HEAD}[a-0]\n[a]\nseeds = 0\n", "not within another job's"),
        (f"{HEAD}[a]\n[a]\n", "section 'a' already exists"),
        ("command = train lm", "File contains no section headers"),
        (None, "No such file"),
    ],
)
def test_what_a_queue_refuses(text: str | None, complaint: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "jobs.ini"
    if text is not None:
        file.write_text(text)
    assert main(["bench", "queue", str(file), "--minutes", "1", "--folder", str(tmp_path / "queue")]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not (tmp_path / "queue").exists()


@thorough
def test_a_stopped_and_a_killed_allocation_lose_nothing(tmp_path: Path) -> None:
    """A run of three allocations equals a straight run to the bit, and is collected once."""
    words = (
        "train memory-horizon --task.length 16 --task.n-samples 64 --task.n-validation 8 --task.n-test 8 "
        "--model.d-model 8 --model.d-channel-mixing 8 --model.n-layers 1 --loop.device cpu "
        "--loop.batch-size 8 --loop.steps 400 --loop.log-every 5 --loop.checkpoint-every 20 "
        "--optim.warmup-steps 5"
    )
    (tmp_path / "jobs.ini").write_text(f"[tiny]\ncommand = {words}\nminutes = 2\nseeds = 0\n")
    folder = tmp_path / "queue"
    command = [sys.executable, "-m", "linrec", "bench", "queue", "jobs.ini", "--minutes", "9"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def allocation(number: int, after: int, status: int) -> None:
        """Run the queue until a run has logged a step, then send it a signal."""
        queue = subprocess.Popen(command, cwd=tmp_path, env=env)
        while steps(folder / "tiny-0") < after:
            assert queue.poll() is None
            time.sleep(0.05)
        queue.send_signal(number)
        assert queue.wait(timeout=60) == status

    def steps(run: Path) -> int:
        metrics = load_run(run).metrics if (run / "metrics.jsonl").exists() else []
        return metrics[-1]["step"] if metrics else 0

    allocation(signal.SIGTERM, 40, 130)
    carried = tmp_path / "carried"
    shutil.copytree(folder, carried)
    assert (folder / "tiny-0" / CURRENT).exists()
    allocation(signal.SIGKILL, 120, -signal.SIGKILL)
    # jobs that still write their checkpoints are waited for
    assert subprocess.run(command, cwd=tmp_path, env=env).returncode == 0
    stored = read_json(folder / "queue.json")
    assert [job["status"] for job in stored.values()] == ["done"]
    straight = tmp_path / "straight"
    assert main([*words.split(), "--loop.seed", "0", "--out", str(straight)]) == 0
    assert_same_run(straight, folder / "tiny-0")

    # the first allocation's copy of the folder adds nothing, and neither does a second time
    table = tmp_path / "table"
    for paths in ([folder], [carried], [carried, folder]):
        assert main(["report", "--collect", *map(str, paths), "--out", str(table)]) == 0
        runs = read_runs([table])
        assert [(run.path.name, run.result["steps"]) for run in runs] == [("tiny-0", 400)]
        assert max(len(run.metrics) for run in runs) <= 200
