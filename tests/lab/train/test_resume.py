"""Runs that stop, crash or find no room, and go on where they were."""

import dataclasses
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from linrec import tensor_files
from linrec.files import LOCK
from linrec.lab.train import (
    CheckpointError,
    InterruptedRunError,
    Progress,
    RunFolderError,
    TrainConfig,
    fit,
    load_run,
)
from linrec.lab.train.checkpoint import CURRENT, PREVIOUS
from linrec.lab.train.progress import Interrupt
from tests.tiers import thorough, tiered

from .test_checkpoint import full_disk, truncate

Tiny = Callable[..., TrainConfig]
TIMES = ("seconds", "steps_per_second", "tokens_per_second")


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def stop_at(step: int, number: int = signal.SIGINT) -> Callable[[Progress], None]:
    asked = []

    def progress(progress: Progress) -> None:
        # once: a second Ctrl-C would not wait for the step to end
        if progress.step >= step and not asked:
            asked.append(step)
            signal.raise_signal(number)

    return progress


def crash_at(step: int) -> Callable[[Progress], None]:
    def progress(progress: Progress) -> None:
        if progress.step >= step:
            raise RuntimeError("as if the power were cut")

    return progress


def assert_same_run(one: Path, other: Path) -> None:
    """Metrics to the last bit, the final state to the last bit, the same scores."""
    first, second = load_run(one), load_run(other)
    assert without_times(first.metrics) == without_times(second.metrics)
    assert first.result is not None and second.result is not None
    assert first.result["test"] == second.result["test"]
    tensors, others = load_file(one / CURRENT), load_file(other / CURRENT)
    assert set(tensors) == set(others)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(("step", "log_every"), tiered([(5, 1), (12, 2)], [(2, 2), (6, 3)]))
def test_interrupted_and_resumed_equals_straight(
    step: int, log_every: int, tiny: Tiny, tmp_path: Path
) -> None:
    config = tiny(log_every=log_every, optim={"clip_norm": 0.5})
    fit(config, tmp_path / "straight")
    with pytest.raises(
        InterruptedRunError, match=r"stopped at step \d+ of 15; continue with: linrec train --resume"
    ):
        fit(config, tmp_path / "pieces", progress=stop_at(step))
    assert load_run(tmp_path / "pieces").result is None
    # whatever happens in between must not matter
    torch.manual_seed(99)
    result = fit(config, tmp_path / "pieces", resume=True)
    assert result.steps == 15
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


@thorough
def test_muon_resumes_to_the_bit_too(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(optim={"name": "muon"})
    fit(config, tmp_path / "straight")
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(5))
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


def test_moments_of_a_transposed_parameter_resume_to_the_bit_too(tiny: Tiny, tmp_path: Path) -> None:
    # B of S5 with two states is not contiguous, and AdamW walks through a parameter and its moments in step
    config = tiny()
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, mixer="s5", mixer_args={"d_state": 2})
    )
    straight, pieces = tmp_path / "straight", tmp_path / "pieces"
    fit(config, straight)
    with pytest.raises(InterruptedRunError):
        fit(config, pieces, progress=stop_at(5))
    fit(config, pieces, resume=True)
    assert_same_run(straight, pieces)


def test_a_run_names_the_machine_of_each_part(tiny: Tiny, tmp_path: Path, monkeypatch) -> None:
    config = tiny(checkpoint_every=3)
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path, progress=stop_at(2))
    first = load_run(tmp_path).about
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path, resume=True, progress=stop_at(4))
    # the same machine is said once
    assert load_run(tmp_path).about == first
    origin = {name: first[name] for name in ("commit", "dirty", "versions", "device")}
    for name, crash in (("one", 8), ("lost", 8), ("two", 9)):
        monkeypatch.setattr(
            "linrec.lab.train.loop.provenance", lambda _, name=name: {**origin, "commit": name}
        )
        with pytest.raises(RuntimeError):
            fit(config, tmp_path, resume=True, progress=crash_at(crash))
    fit(config, tmp_path, resume=True)
    about = load_run(tmp_path).about
    parts = about.pop("resumed")
    assert about == first
    # the part between the crashes left no checkpoint
    assert [(part["step"], part["commit"]) for part in parts] == [(4, "one"), (6, "two")]
    assert parts[0]["device"] == first["device"]


@thorough
def test_a_run_can_be_stopped_many_times(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    fit(config, tmp_path / "straight")
    for piece, step in enumerate((2, 6, 12)):
        with pytest.raises(InterruptedRunError):
            fit(config, tmp_path / "pieces", resume=piece > 0, progress=stop_at(step, signal.SIGTERM))
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


def test_a_crash_goes_on_from_the_last_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(checkpoint_every=4)
    fit(config, tmp_path / "straight")
    with pytest.raises(RuntimeError):
        fit(config, tmp_path / "crashed", progress=crash_at(10))
    assert load_run(tmp_path / "crashed").metrics[-1]["step"] == 10
    fit(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "crashed")


def test_a_crash_before_the_first_checkpoint_starts_again(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    fit(config, tmp_path / "straight")
    with pytest.raises(RuntimeError):
        fit(config, tmp_path / "crashed", progress=crash_at(4))
    fit(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "crashed")


@thorough
def test_a_truncated_checkpoint_goes_on_from_the_previous(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(checkpoint_every=4)
    fit(config, tmp_path / "straight")
    with pytest.raises(RuntimeError):
        fit(config, tmp_path / "crashed", progress=crash_at(10))
    truncate(tmp_path / "crashed" / CURRENT)
    with pytest.warns(UserWarning, match=f"continuing from {PREVIOUS}"):
        fit(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "crashed")


@thorough
def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(checkpoint_every=4)
    fit(config, tmp_path / "straight")
    save = tensor_files.save_file
    calls = itertools.count()
    monkeypatch.setattr(
        tensor_files, "save_file", lambda *a, **k: save(*a, **k) if next(calls) < 2 else full_disk()
    )
    with pytest.raises(CheckpointError, match="No space left on device"):
        fit(config, tmp_path / "full")
    monkeypatch.undo()
    fit(config, tmp_path / "full", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "full")


def test_resuming_a_finished_run_returns_its_result(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    result = fit(config, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != LOCK}
    assert fit(config, tmp_path, resume=True) == result
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != LOCK}
    assert after == before


def test_a_run_that_died_in_its_last_evaluation_is_finished_by_resume(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tiny(), tmp_path / "straight")
    (tmp_path / "straight").rename(tmp_path / "died")
    expected = json.loads((tmp_path / "died" / "result.json").read_text())
    (tmp_path / "died" / "result.json").unlink()
    result = fit(tiny(), tmp_path / "died", resume=True)
    assert result.test == expected["test"]
    assert len(load_run(tmp_path / "died").metrics) == 12


def test_resuming_another_configuration_or_nothing_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        fit(tiny(), tmp_path / "run", progress=stop_at(2))
    with pytest.raises(RunFolderError, match=r"started with optim.lr = 0.01, not 0.5"):
        fit(tiny(optim={"lr": 0.5}), tmp_path / "run", resume=True)
    with pytest.raises(RunFolderError, match=r"no run folder .*rum; did you mean .*run\?"):
        fit(tiny(), tmp_path / "rum", resume=True)


def test_the_best_model_survives_an_interrupt_and_patience_counts_on(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(epochs=4, eval_every=2, keep="best", patience=3, log_every=1, optim={"lr": 0.3})
    straight = fit(config, tmp_path / "straight")
    assert straight.best_step is not None
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(straight.best_step + 3))
    result = fit(config, tmp_path / "pieces", resume=True)
    assert (result.best_step, result.steps) == (straight.best_step, straight.steps)
    assert result.validation == straight.validation
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


def test_the_second_ctrl_c_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_of_so_many_steps_ends_within_an_epoch_and_resumes(tiny: Tiny, tmp_path: Path) -> None:
    # 5 batches an epoch
    fit(tiny(steps=7, log_every=1), tmp_path / "straight")
    with pytest.raises(InterruptedRunError, match="of 7"):
        fit(tiny(steps=7, log_every=1), tmp_path / "stopped", progress=stop_at(5))
    result = fit(tiny(steps=7, log_every=1), tmp_path / "stopped", resume=True)
    assert result.steps == 7
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
