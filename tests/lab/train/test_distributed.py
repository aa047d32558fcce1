"""Training by two processes: they are started once, and do one job after the other."""

import dataclasses
import faulthandler
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, multiprocessing

from linrec import tensor_files
from linrec.cli import main
from linrec.cli.dispatch import PATIENCE
from linrec.files import locked
from linrec.lab.tasks import NO_TARGET, MemoryHorizon, Split
from linrec.lab.tasks.dynamics import Adding
from linrec.lab.train import (
    CheckpointError,
    ConfigError,
    InterruptedRunError,
    LoopConfig,
    OptimConfig,
    RunFolderError,
    TrainConfig,
    fit,
    load_run,
)
from linrec.lab.train.checkpoint import CURRENT
from linrec.lab.train.fabric import make_fabric
from linrec.lab.train.step import train_step
from linrec.models import ModelConfig, SequenceClassifierConfig
from tests.tiers import thorough, tiered

from .test_checkpoint import full_disk, truncate
from .test_resume import assert_same_run, without_times

# one test runner makes the runs, and not each of several


def together(test):
    """Mark a test that needs the runs of two processes, which one worker makes, once."""
    return thorough(pytest.mark.xdist_group("runs of two processes")(test))


TASK = MemoryHorizon(length=8, n_resets=1, modulus=6, n_samples=28, n_validation=7, n_test=5)
OPTIM = OptimConfig(lr=0.01, transition_lr=0.003, warmup_steps=3, clip_norm=0.5)
# 3 epochs of 2 batches
LOOP = LoopConfig(epochs=3, batch_size=8, accumulate=2, eval_every=4, log_every=1, device="cpu")
# seconds that the jobs of two processes may take
PATIENT = 300
# odd, so that the processes have parts of different sizes
WIDTH = 7
ARMS: dict[str, dict[str, Any]] = {
    "ddp": {"mixer": "gate_loop"},
    # no window reaches the end of a segment, so that some parameters have no gradient
    "ddp-segments": {"mixer": "block_recurrent", "mixer_args": {"segment_length": 16}},
    "fsdp-segments": {"mixer": "block_recurrent", "mixer_args": {"segment_length": 16}},
    "fsdp": {"mixer": "gate_loop", "recompute": True},
    "fsdp-hgru": {"mixer": "hgru", "tie_embeddings": True},
    # the processes share each sequence
    "ddp-time": {
        "mixer": ("delta_net", "attention"),
        "mixer_args": {"attention": {"positions": "none"}},
        "time_parallel": 2,
    },
    "fsdp-time": {"mixer": "gated_delta_net", "recompute": True, "time_parallel": 2},
}


def config_of(arm: str, *, dropout: float = 0.0, **loop: Any) -> TrainConfig:
    fields = {**ARMS[arm]}
    ways = {"recompute": fields.pop("recompute", False), "time_parallel": fields.pop("time_parallel", 1)}
    loop = {"strategy": arm.split("-")[0], **ways, **loop}
    model = ModelConfig(
        vocab_size=6, d_model=WIDTH, n_layers=2, d_channel_mixing=9, dropout=dropout, **fields
    )
    return TrainConfig("two", TASK, model, OPTIM, dataclasses.replace(LOOP, **loop))


def uneven(task: MemoryHorizon, name: str, split: Any = MemoryHorizon.split) -> Split:
    """Return a split whose sequences have different numbers of targets, some none."""
    whole = split(task, name)
    kept = torch.arange(len(whole))[:, None] % 5 * 2 > torch.arange(whole.targets.shape[1])
    return dataclasses.replace(whole, targets=whole.targets.where(kept, NO_TARGET))


@contextmanager
def asked_to_stop(after: int, *, rank: int) -> Iterator[None]:
    """Send SIGTERM to one process at the end of its step of this number."""
    steps = itertools.count(1)

    def stepped(*arguments: Any, **named: Any) -> None:
        train_step(*arguments, **named)
        if next(steps) == after and int(os.environ.get("RANK", "0")) == rank:
            signal.raise_signal(signal.SIGTERM)

    with mock.patch("linrec.lab.train.loop.train_step", stepped):
        yield


def stop(config: TrainConfig, folder: Path, *, after: int, rank: int = 0, at: int | None = None) -> None:
    """Train until one process is asked to stop; all do, at a step that they agree on."""
    with asked_to_stop(after, rank=rank), pytest.raises(InterruptedRunError) as caught:
        fit(config, folder)
    assert f"stopped at step {at or after} of" in str(caught.value)


def regression() -> TrainConfig:
    model = SequenceClassifierConfig(n_outputs=1, n_features=1, d_model=WIDTH, n_layers=1, pooling="last")
    loop = dataclasses.replace(LOOP, strategy="ddp", epochs=2)
    return TrainConfig("two", Adding(length=6, n_train=24, n_validation=7, n_test=5), model, OPTIM, loop)


def equal_runs(folder: Path) -> None:
    with mock.patch.object(MemoryHorizon, "split", uneven):
        for arm in ARMS:
            fit(config_of(arm), folder / arm)
    fit(regression(), folder / "regression")


def stopped_runs(folder: Path) -> None:
    for arm in ("ddp", "fsdp-hgru"):
        config = config_of(arm, dropout=0.1)
        fit(config, folder / arm)
        stop(config, folder / f"{arm}-stopped", after=4, rank=1)
        fit(config, folder / f"{arm}-stopped", resume=True)
    # between two logged steps the processes ask each other now and then
    stop(config_of("ddp", epochs=6, log_every=100), folder / "asked", after=2, rank=1, at=10)


def moved_runs(folder: Path) -> None:
    fit(config_of("ddp", strategy="auto"), folder / "one-ddp", resume=True)
    fit(config_of("fsdp"), folder / "one-fsdp", resume=True)
    stop(config_of("fsdp"), folder / "two-fsdp", after=5)


def failing_runs(folder: Path) -> None:
    rank = distributed.get_rank()
    config = config_of("ddp", checkpoint_every=4)
    with pytest.raises(RunFolderError, match="already holds a run"):
        fit(config, folder.parent / "equal_runs" / "ddp")
    # all are told that the first one cannot have the folder
    taken = folder.parent / "equal_runs" / "ddp"
    with locked(taken) if rank == 0 else ExitStack(), pytest.raises(RunFolderError, match="trains here"):
        fit(config, taken, resume=True)
    # the disk is full for the process that writes
    full = mock.patch.object(tensor_files, "save_file", full_disk)
    with full if rank == 0 else ExitStack(), pytest.raises(CheckpointError, match="No space left"):
        fit(config, folder / "full")
    # and data that one process alone cannot read
    unreadable = mock.patch.object(MemoryHorizon, "prepared", mock.Mock(side_effect=ConfigError("no data")))
    with unreadable if rank == 1 else ExitStack(), pytest.raises(ConfigError, match="no data"):
        fit(config, folder / "unreadable")


def damaged_runs(folder: Path) -> None:
    config = config_of("fsdp", dropout=0.1, checkpoint_every=2)
    fit(config, folder / "straight")
    stop(config, folder / "damaged", after=5)
    if distributed.get_rank() == 0:
        truncate(folder / "damaged" / CURRENT)
    distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(config, folder / "damaged", resume=True)
    assert len([w for w in caught if "continuing from" in str(w.message)]) == (distributed.get_rank() == 0)


JOBS = (equal_runs, stopped_runs, moved_runs, failing_runs, damaged_runs)


def work(rank: int, port: int, folder: Path) -> None:
    """What each process does."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    # "lo": without it, gloo looks up the name of this machine, and may wait for a name server
    names = {"MASTER_ADDR": "127.0.0.1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    os.environ.update(names | {name: str(value) for name, value in here.items()})
    torch.set_num_threads(1)
    # shows where a process waits for the other
    faulthandler.dump_traceback_later(PATIENT, exit=True)
    for job in JOBS:
        job(folder / job.__name__)
    faulthandler.cancel_dump_traceback_later()
    # a process that ends while threads of the group run may abort
    distributed.barrier()
    distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def one_process(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(
        config, loop=dataclasses.replace(config.loop, strategy="auto", time_parallel=1)
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the jobs of two processes have filled."""
    folder = tmp_path_factory.mktemp("two")
    for strategy in ("ddp", "fsdp"):
        stop(one_process(config_of(strategy)), folder / "moved_runs" / f"one-{strategy}", after=4)
    context = multiprocessing.start_processes(
        work, args=(free_port(), folder), nprocs=2, join=False, start_method="spawn"
    )
    assert context is not None
    while not context.join():
        pass
    return folder


def assert_near(one: Path, other: Path) -> None:
    """The same run to the rounding of float32: metrics of every step, scores, weights and moments."""
    first, second = load_run(one), load_run(other)
    for record, near in zip(without_times(first.metrics), without_times(second.metrics), strict=True):
        assert record.pop("split") == near.pop("split")
        assert record == pytest.approx(near, rel=1e-5)
    assert first.result is not None and second.result is not None
    for name in ("test", "validation"):
        scores, near_scores = first.result[name], second.result[name]
        assert scores.keys() == near_scores.keys()
        for measure in ("loss", "mse", "nrmse"):
            if measure in scores:
                assert scores.pop(measure) == pytest.approx(near_scores.pop(measure), rel=1e-5)
        # all else counts right predictions
        assert scores == near_scores
    assert first.result["parameters"] == second.result["parameters"]
    tensors, others = load_file(one / CURRENT), load_file(other / CURRENT)
    for name, tensor in tensors.items():
        if not name.startswith("random."):
            scale = tensor.abs().max().clamp(min=1e-20)
            torch.testing.assert_close(others[name] / scale, tensor / scale, rtol=0, atol=1e-5, msg=name)


@together
@pytest.mark.parametrize("arm", ARMS)
def test_two_processes_equal_one(arm: str, runs: Path, tmp_path: Path) -> None:
    with mock.patch.object(MemoryHorizon, "split", uneven):
        fit(one_process(config_of(arm)), tmp_path)
    assert_near(tmp_path, runs / "equal_runs" / arm)
    result = load_run(runs / "equal_runs" / arm).result
    assert result is not None and result["processes"] == 2


@together
def test_two_processes_equal_one_on_real_numbers(runs: Path, tmp_path: Path) -> None:
    fit(one_process(regression()), tmp_path)
    assert_near(tmp_path, runs / "equal_runs" / "regression")


@together
@pytest.mark.parametrize("arm", ["ddp", "fsdp-hgru"])
def test_stopped_in_one_process_and_resumed_equals_straight(arm: str, runs: Path) -> None:
    assert_same_run(runs / "stopped_runs" / arm, runs / "stopped_runs" / f"{arm}-stopped")
    tensors = load_file(runs / "stopped_runs" / arm / CURRENT)
    # dropout is not the same in both
    assert not torch.equal(tensors["random.cpu"], tensors["random.cpu.1"])


@together
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_of_one_process_goes_on_with_two(strategy: str, runs: Path, tmp_path: Path) -> None:
    fit(one_process(config_of(strategy)), tmp_path)
    assert_near(tmp_path, runs / "moved_runs" / f"one-{strategy}")


@together
def test_a_run_of_two_processes_goes_on_with_one(runs: Path, tmp_path: Path) -> None:
    config = one_process(config_of("fsdp"))
    fit(config, tmp_path / "straight")
    shutil.copytree(runs / "moved_runs" / "two-fsdp", tmp_path / "moved")
    fit(config, tmp_path / "moved", resume=True)
    assert_near(tmp_path / "straight", tmp_path / "moved")


@together
def test_one_process_rebuilds_the_model_of_two(runs: Path) -> None:
    run = load_run(runs / "equal_runs" / "fsdp-hgru")
    model, split = run.model(), uneven(TASK, "test")
    counted = split.targets != NO_TARGET
    with torch.no_grad():
        logits, _ = model(split.inputs)
    loss = torch.nn.functional.cross_entropy(logits[counted], split.targets[counted])
    assert run.result is not None
    assert run.result["test"]["loss"] == pytest.approx(loss.item(), rel=1e-5)


@together
def test_a_damaged_checkpoint_of_two_processes_falls_back(runs: Path) -> None:
    assert_same_run(runs / "damaged_runs" / "straight", runs / "damaged_runs" / "damaged")


@together
def test_what_one_process_cannot_do_ends_both_and_leaves_no_result(runs: Path) -> None:
    folder = runs / "failing_runs"
    assert load_run(folder / "full").metrics[-1]["step"] == 4
    assert not (folder / "full" / "result.json").exists() and not (folder / "unreadable").exists()


@contextmanager
def torchrun(folder: Path, strategy: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Train with two processes in `folder / "run"`, and yield torchrun and the first line that it prints."""
    text = folder / "text.txt"
    text.write_text("a rose is a rose is a rose, and a violet is blue. " * 20)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    words = ["lm", "--model.mixer", "hgru", "--data.path", str(text), "--loop.strategy", strategy]
    words += ["--data.length", "16", "--data.cache", str(folder / "cache"), "--model.d-model", "8"]
    words += ["--model.n-layers", "2", "--loop.device", "cpu", "--loop.precision", "32-true"]
    words += ["--loop.batch-size", "8", "--loop.log-every", "2", "--optim.warmup-steps", "2"]
    # more steps than it will make
    words += ["--loop.steps", "100000", "--loop.eval-every", "100000"]
    with subprocess.Popen(
        [*torchrun, str(free_port()), "-m", "linrec", "train", *words, "--out", str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("rank", tiered([], [1], [0]))
def test_a_killed_process_is_one_line_with_the_way_to_continue(rank: int, tmp_path: Path) -> None:
    with torchrun(tmp_path, "ddp") as (process, _):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
                os.kill(int(child), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    # the lines of torchrun itself have no "[rank"
    said = [line for line in errors.splitlines() if line.startswith(("linrec: ", "[rank"))]
    (line,) = said
    assert line.endswith(
        f"continue with: torchrun --nproc-per-node 2 -m linrec train --resume {tmp_path}/run"
    )
    assert "gloo" not in errors
    # the folder is whole
    assert load_run(tmp_path / "run").metrics


@thorough
def test_torchrun_trains_stops_at_ctrl_c_and_says_so_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with torchrun(tmp_path, "fsdp") as (process, first_line):
        process.send_signal(signal.SIGINT)
        more, errors = process.communicate(timeout=60)
    assert first_line.startswith("lm: step 2/100000, "), errors
    # each line once
    steps = [line.split(",")[0] for line in more.splitlines()]
    assert steps == [f"lm: step {n}/100000" for n in range(4, 2 * len(steps) + 4, 2)]
    said = [line for line in errors.splitlines() if line.startswith("linrec: ")]
    assert len(said) == 1 and "continue with: torchrun --nproc-per-node 2 -m linrec train --res" in said[0]

    # one process goes on, and has trained what it would have trained alone
    stored = load_run(run)
    assert stored.about["command"].startswith("torchrun --nproc-per-node 2 -m linrec train lm")
    step = stored.metrics[-1]["step"]
    alone = one_process(stored.config)
    with asked_to_stop(step + 2, rank=0), pytest.raises(InterruptedRunError):
        fit(alone, tmp_path / "straight")
    with asked_to_stop(2, rank=0), pytest.raises(InterruptedRunError):
        fit(alone, run, resume=True)
    straight, moved = (without_times(load_run(path).metrics) for path in (tmp_path / "straight", run))
    assert len(straight) == len(moved)
    for record, near in zip(straight, moved, strict=True):
        assert record.pop("split") == near.pop("split")
        assert record == pytest.approx(near, rel=1e-4)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    return monkeypatch


def test_processes_that_torchrun_did_not_start_are_refused(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ConfigError, match=r"but LOCAL_WORLD_SIZE is not set. Start them with torchrun --npr"):
        make_fabric(LoopConfig(device="cpu"))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"batch_size": 5}, r"`loop.batch_size` must be a multiple of the 2 processes, .*; got 5\."),
        (
            {"batch_size": 10, "accumulate": 2},
            r"`loop.batch_size` / `loop.accumulate` = 5 must be a multiple of the 2 .*; got 10 / 2\.",
        ),
    ],
)
def test_a_batch_that_the_processes_do_not_divide_is_refused(
    loop: dict[str, Any], message: str, environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_fabric(LoopConfig(device="cpu", **loop))


def test_more_processes_than_devices_are_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(torch.cuda, "is_available", lambda: True)
    environment.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes on a machine need 2 cuda devices; there are 1"):
        make_fabric(LoopConfig())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_has_nobody_to_share_with(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoopConfig(device="cpu", strategy=strategy)
    with pytest.raises(ConfigError, match=f"`loop.strategy` {strategy} is for several processes"):
        make_fabric(config)
    # a script may tell torchrun to start as many as there are devices
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert make_fabric(config).world_size == 1


def test_the_first_process_speaks_for_all(
    environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waited: list[int] = []
    environment.setattr(time, "sleep", waited.append)
    said = []
    for rank in (0, 1):
        environment.setenv("RANK", str(rank))
        assert main(["train", "memory-horizon", "--loop.batch-size", "5", "--loop.device", "cpu"]) == 2
        said.append(capfd.readouterr())
    # the other one only if torchrun has not ended it by then
    assert said[0] == said[1] and said[0].out == "" and said[0].err.count("\n") == 1
    assert waited == [PATIENCE]


def test_muon_needs_whole_matrices() -> None:
    with pytest.raises(ConfigError, match="Muon needs whole matrices"):
        dataclasses.replace(config_of("fsdp"), optim=OptimConfig(name="muon"))


def test_an_unknown_strategy_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'fsdp'"):
        LoopConfig(strategy="fspd")  # type: ignore[arg-type]
