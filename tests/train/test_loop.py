import dataclasses
import functools
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
from linrec.tasks import LanguageModeling
from linrec.tasks.copying import Copying
from linrec.train import (
    CheckpointError,
    ConfigError,
    DivergedError,
    InterruptedRunError,
    Progress,
    RunFolderError,
    TrainConfig,
    fit,
    load_run,
)
from linrec.train import checkpoint as checkpoint_module
from linrec.train import loop as loop_module
from linrec.train.checkpoint import CURRENT, PREVIOUS, load_checkpoint
from linrec.train.interrupt import Interrupt
from linrec.train.optim import gradient_norm
from linrec.train.run import RESULT, read_result
from linrec.train.step import Objective

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


def test_a_run_leaves_everything_in_its_folder(tiny: Tiny, tmp_path: Path) -> None:
    seen: list[Progress] = []
    config = tiny()
    result = fit(config, tmp_path / "run", progress=seen.append, command="linrec train tiny")

    run = load_run(tmp_path / "run")
    assert run.config == config
    assert run.about["recipe"] == "tiny" and run.about["command"] == "linrec train tiny"
    assert run.about["total_steps"] == result.steps == 15
    assert run.about["versions"]["torch"] == torch.__version__
    assert run.about["device"]["type"] == "cpu"

    trained = [record for record in run.metrics if record["split"] == "train"]
    validated = [record for record in run.metrics if record["split"] == "validation"]
    assert [record["step"] for record in trained] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert [record["step"] for record in validated] == [4, 8, 12, 15]
    assert set(trained[0]) == {*("step", "epoch", "split", "loss", "accuracy", "grad_norm", "lr", *TIMES)}
    assert [record["epoch"] for record in validated] == [0.8, 1.6, 2.4, 3.0]
    assert trained[0]["lr"] == pytest.approx(0.01 * 2 / 3)
    assert [(p.step, p.total_steps, p.loss) for p in seen] == [(r["step"], 15, r["loss"]) for r in trained]

    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored == run.result
    assert stored["test"] == result.test and stored["validation"] == result.validation
    assert stored["validation"]["accuracy"] == validated[-1]["accuracy"]
    assert {"accuracy", "loss", "accuracy_by_span"} <= set(stored["test"])
    assert stored["parameters"] == sum(p.numel() for p in run.model().parameters())
    assert {"seconds", "steps_per_second", "config", "seed", "device", "versions", "commit", "dirty"} <= set(
        stored
    )
    assert any((tmp_path / "run" / "tensorboard").iterdir())


def test_the_rebuilt_model_scores_what_the_run_says(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    result = fit(config, tmp_path)
    model = load_run(tmp_path).model()
    split = config.task.split("test")
    with torch.no_grad():
        logits, _ = model(split.inputs)
    assert not model.training
    assert config.task.score(logits.argmax(-1), split)["accuracy"] == result.test["accuracy"]


def test_equal_seeds_give_equal_runs_and_others_do_not(tiny: Tiny, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(tiny(seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    losses = [load_run(tmp_path / name).metrics[0]["loss"] for name in ("a", "c")]
    assert losses[0] != losses[1]


# step 5 ends an epoch; with log_every 3 the window that is open when the run stops is carried over
@pytest.mark.parametrize(("step", "log_every"), [(2, 2), (5, 1), (6, 3), (12, 2)])
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


def test_muon_resumes_to_the_bit_too(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(optim={"name": "muon"})
    fit(config, tmp_path / "straight")
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(5))
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


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


def test_a_truncated_checkpoint_goes_on_from_the_previous(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(checkpoint_every=4)
    fit(config, tmp_path / "straight")
    with pytest.raises(RuntimeError):
        fit(config, tmp_path / "crashed", progress=crash_at(10))
    truncate(tmp_path / "crashed" / CURRENT)
    with pytest.warns(UserWarning, match=f"going on from {PREVIOUS}"):
        fit(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "crashed")


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
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert fit(config, tmp_path, resume=True) == result
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


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


def test_a_folder_that_is_in_use_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    fit(tiny(), tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"holds a run already; continue it with --resume .*/run"):
        fit(tiny(), tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    with pytest.raises(RunFolderError, match="not an empty folder"):
        fit(tiny(), tmp_path / "notes")
    (tmp_path / "empty").mkdir()
    fit(tiny(), tmp_path / "empty")


def test_resuming_another_configuration_or_nothing_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        fit(tiny(), tmp_path / "run", progress=stop_at(2))
    with pytest.raises(RunFolderError, match=r"started with optim.lr = 0.01, not 0.5"):
        fit(tiny(optim={"lr": 0.5}), tmp_path / "run", resume=True)
    with pytest.raises(RunFolderError, match=r"no run folder .*rum; did you mean .*run\?"):
        fit(tiny(), tmp_path / "rum", resume=True)


def test_what_cannot_be_trained_leaves_no_folder(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warmup_steps"):
        fit(tiny(optim={"warmup_steps": 15}), tmp_path / "run")
    with pytest.raises(ConfigError, match="batch_size"):
        fit(tiny(batch_size=22), tmp_path / "run")
    config = tiny()
    args = {"n_heads": 3, "d_qk": 8}
    with pytest.raises(ConfigError, match="the model cannot be built: `d_qk`"):
        fit(
            dataclasses.replace(config, model=dataclasses.replace(config.model, mixer_args=args)),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cuda device"):
        fit(tiny(device="cuda"), tmp_path / "run")


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = loop_module.train_step, itertools.count(1)

    def poisoned(*arguments: Any, window: torch.Tensor, **named: Any) -> None:
        step(*arguments, window=window, **named)
        if next(calls) == 7:
            window.fill_(float("nan"))

    monkeypatch.setattr(loop_module, "train_step", poisoned)
    with pytest.raises(DivergedError, match="not finite at step 8"):
        fit(tiny(checkpoint_every=4, log_every=100), tmp_path)
    assert checkpoint_module.load_checkpoint(tmp_path).about["step"] == 4  # type: ignore[union-attr]


def validation_losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in load_run(folder).metrics if r["split"] == "validation"}


def test_the_best_model_is_kept_and_patience_ends_the_run(tiny: Tiny, tmp_path: Path) -> None:
    # a learning rate that ruins the model after some steps
    config = tiny(epochs=4, eval_every=2, keep="best", patience=3, optim={"lr": 0.3})
    result = fit(config, tmp_path)
    losses = validation_losses(tmp_path)
    assert result.best_step == min(losses, key=lambda step: losses[step])
    assert result.steps == max(losses) == result.best_step + 3 * 2
    assert result.validation["loss"] == pytest.approx(losses[result.best_step], rel=1e-6)

    # what the run gives is that model, and the newest checkpoint is another
    kept = load_run(tmp_path).model().state_dict()
    stored = load_file(tmp_path / "best.safetensors")
    assert set(stored) == {f"model.{name}" for name in kept}
    newest = load_checkpoint(tmp_path)
    assert newest is not None and newest.about["step"] == result.steps
    assert all(torch.equal(tensor, stored[f"model.{name}"]) for name, tensor in kept.items())
    assert any(not torch.equal(tensor, newest.tensors[f"model.{name}"]) for name, tensor in kept.items())
    assert fit(config, tmp_path, resume=True) == result


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


def test_keeping_the_best_needs_something_to_judge_by(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(keep="best")
    (tmp_path / "text.txt").write_text("a rose is a rose\n" * 20)
    task = LanguageModeling(
        path=str(tmp_path / "text.txt"), length=8, validation_share=0.0, cache=str(tmp_path / "cache")
    )
    with pytest.raises(ConfigError, match=r"`loop\.keep` = 'best' needs a validation split"):
        fit(dataclasses.replace(config, task=task), tmp_path / "run")
    with pytest.raises(
        ValueError, match="`patience` = 2 waits for a best model, and `keep` = 'last' keeps none"
    ):
        tiny(patience=2)
    with pytest.raises(ValueError, match="there is no `keep` 'beast'; did you mean 'best'"):
        tiny(keep="beast")


def test_the_second_ctrl_c_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_compiled_run_agrees_with_an_eager_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tiny(), tmp_path / "eager")
    # traced, with autograd, but without the code generator, which would take most of a minute on a CPU
    monkeypatch.setattr(
        Objective,
        "compile",
        functools.partialmethod(torch.nn.Module.compile, backend="aot_eager", fullgraph=True),
    )
    fit(tiny(compile="on"), tmp_path / "compiled")
    losses = [[record["loss"] for record in load_run(tmp_path / n).metrics] for n in ("eager", "compiled")]
    # dropout's masks are those of the eager run
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("wanted", [True, False])
def test_torch_is_left_as_it_was(wanted: bool, tiny: Tiny, tmp_path: Path) -> None:
    during = []
    fit(
        tiny(deterministic=wanted),
        tmp_path,
        progress=lambda _: during.append(torch.are_deterministic_algorithms_enabled()),
    )
    assert set(during) == {wanted}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_matmul_precision_holds_during_the_run_and_no_longer(tiny: Tiny, tmp_path: Path) -> None:
    seen = []
    config = tiny(matmul_precision="high")
    fit(config, tmp_path, progress=lambda _: seen.append(torch.get_float32_matmul_precision()))
    assert set(seen) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_gradient_that_is_not_finite_pushes_no_good_checkpoint_out(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = itertools.count(1)

    def poisoned(parameters: Any) -> torch.Tensor:
        norm = gradient_norm(parameters)
        return norm * float("nan") if next(steps) == 10 else norm

    monkeypatch.setattr("linrec.train.step.gradient_norm", poisoned)
    with pytest.raises(DivergedError, match="the gradient is not finite at step 10"):
        fit(tiny(checkpoint_every=5), tmp_path)
    assert load_checkpoint(tmp_path).about["step"] == 5


def test_a_run_of_so_many_steps_ends_within_an_epoch_and_resumes(tiny: Tiny, tmp_path: Path) -> None:
    # 5 batches an epoch
    fit(tiny(steps=7, log_every=1), tmp_path / "straight")
    with pytest.raises(InterruptedRunError, match="of 7"):
        fit(tiny(steps=7, log_every=1), tmp_path / "stopped", progress=stop_at(5))
    result = fit(tiny(steps=7, log_every=1), tmp_path / "stopped", resume=True)
    assert result.steps == 7
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_a_part_of_the_validation_split_is_watched_and_the_whole_is_scored(
    tiny: Tiny, tmp_path: Path
) -> None:
    part = fit(tiny(eval_batches=1, batch_size=2), tmp_path / "part")
    whole = fit(tiny(batch_size=2), tmp_path / "whole")
    watched = [
        [r["loss"] for r in load_run(tmp_path / name).metrics if r["split"] == "validation"]
        for name in ("part", "whole")
    ]
    assert watched[0][:-1] != watched[1][:-1] and watched[0][-1] == watched[1][-1]
    assert part.validation == whole.validation


def test_probes_are_scored_after_the_run_and_older_results_have_none(tiny: Tiny, tmp_path: Path) -> None:
    task = Copying(length=6, n_copied=2, n_train=40, n_validation=10, n_test=10, test_lengths=(3, 40))
    config = dataclasses.replace(tiny(), task=task)
    result = fit(config, tmp_path / "run")
    assert set(result.probes) == {"3", "40"}
    assert set(result.probes["40"]) == {"loss", "accuracy", "exact"}
    assert result.probes["3"]["loss"] != result.test["loss"]
    assert read_result(tmp_path / "run") == result
    stored = json.loads((tmp_path / "run" / RESULT).read_text())
    del stored["probes"]
    (tmp_path / "run" / RESULT).write_text(json.dumps(stored))
    assert read_result(tmp_path / "run").probes == {}


def test_every_epoch_of_a_fresh_task_has_samples_of_its_own(tiny: Tiny, tmp_path: Path) -> None:
    task = Copying(length=6, n_copied=2, n_train=40, n_validation=10, n_test=10, fresh=True)
    losses = {}
    for fresh in (False, True):
        config = dataclasses.replace(tiny(), task=dataclasses.replace(task, fresh=fresh))
        fit(config, tmp_path / str(fresh))
        metrics = load_run(tmp_path / str(fresh)).metrics
        losses[fresh] = [record["loss"] for record in metrics if record["split"] == "train"]
    # the samples as such are other ones from the first epoch on
    assert len(losses[True]) == len(losses[False]) and losses[True] != losses[False]
