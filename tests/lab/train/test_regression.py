"""Training on targets that are real numbers: the loss, what is watched, and what is said at the end."""

import dataclasses
import functools
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from linrec.cli.display import Display
from linrec.cli.main import main
from linrec.lab.tasks import Split, Task
from linrec.lab.tasks.dynamics import Adding, MackeyGlass
from linrec.lab.train import ConfigError, LoopConfig, OptimConfig, TrainConfig, fit, load_run
from linrec.lab.train.fabric import make_fabric
from linrec.lab.train.progress import Progress
from linrec.lab.train.step import Objective, evaluate, train_step
from linrec.models import ModelConfig, SequenceClassifier, SequenceClassifierConfig
from tests.tiers import thorough

FEW: dict[str, Any] = {"n_train": 28, "n_validation": 7, "n_test": 7}
ADDING = Adding(length=6, **FEW)
MACKEY_GLASS = MackeyGlass(length=8, washout=3, **FEW)
# 4 steps an epoch
LOOP = LoopConfig(epochs=3, batch_size=7, eval_every=4, log_every=2, device="cpu")


def config_of(task: Task, **loop: Any) -> TrainConfig:
    model = SequenceClassifierConfig(
        n_outputs=1,
        n_features=1,
        d_model=8,
        n_layers=1,
        d_channel_mixing=8,
        bidirectional=False,
        pooling="last" if task.per_sequence else "none",
    )
    return TrainConfig("real", task, model, OptimConfig(lr=0.01), dataclasses.replace(LOOP, **loop))


def model_of(config: TrainConfig) -> SequenceClassifier:
    torch.manual_seed(0)
    assert isinstance(config.model, SequenceClassifierConfig)
    return SequenceClassifier(config.model)


def uneven(task: Task) -> Split:
    """Return a split in which some sequences, steps or all of a sequence's steps ask for nothing."""
    split = task.split("train")
    assert isinstance(split, Split)
    targets = split.targets.clone()
    targets[::3] = math.nan
    if targets.ndim == 3:
        targets[1, 2:] = math.nan
    return dataclasses.replace(split, targets=targets)


@pytest.mark.parametrize("accumulate", [1, 7])
@pytest.mark.parametrize("task", [ADDING, MACKEY_GLASS])
def test_a_step_follows_the_mean_squared_error_of_what_is_asked(task: Task, accumulate: int) -> None:
    config = config_of(task)
    batch = uneven(task).rows(torch.arange(7))
    expected = model_of(config)
    asked = ~batch.targets.isnan()
    loss = (expected(batch.inputs)[asked] - batch.targets[asked]).square().mean()
    loss.backward()

    model, fabric, window = model_of(config), make_fabric(config.loop), torch.zeros(4)
    optimizers: Any = [fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.0))]
    train_step(
        *batch,
        fabric=fabric,
        objective=fabric.setup_module(Objective(model)),
        optimizers=optimizers,
        window=window,
        accumulate=accumulate,
    )
    norm = torch.cat([p.grad.flatten() for p in expected.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(
        window, torch.stack([loss.detach(), torch.tensor(0.0), norm, torch.tensor(1.0)])
    )
    for mine, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_that_asks_for_nothing_moves_nothing_to_nan() -> None:
    config = config_of(ADDING)
    batch = ADDING.split("train").rows(torch.arange(7))
    outcome = Objective(model := model_of(config))(batch.inputs, torch.full_like(batch.targets, math.nan))
    outcome.loss.backward()
    assert outcome.loss.item() == outcome.correct.item() == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
@pytest.mark.parametrize("task", [ADDING, MACKEY_GLASS])
def test_evaluation_does_not_depend_on_the_batch_size(task: Any, batch_size: int) -> None:
    config = config_of(task)
    model, fabric, split = model_of(config), make_fabric(config.loop), task.split("test")
    scores = evaluate(fabric, fabric.setup_module(Objective(model)), task, split, batch_size=batch_size)
    with torch.no_grad():
        outputs = model(split.inputs)
    expected = task.score(outputs, split)
    assert scores == {
        "loss": pytest.approx((outputs - split.targets).square().mean().item(), rel=1e-5),
        "mse": pytest.approx(expected["mse"], rel=1e-5),
        "nrmse": pytest.approx(expected["nrmse"], rel=1e-5),
    }


@pytest.mark.parametrize("task", [ADDING, MACKEY_GLASS])
def test_a_run_has_errors_in_place_of_accuracies_and_keeps_the_smallest(task: Any, tmp_path: Path) -> None:
    told: list[Progress] = []
    result = fit(config_of(task, keep="best"), tmp_path, progress=told.append)
    run = load_run(tmp_path)
    assert {p.accuracy for p in told} == {None} and sum(p.logged for p in told) == 6
    assert all("accuracy" not in record for record in run.metrics)
    watched = {r["step"]: r["loss"] for r in run.metrics if r["split"] == "validation"}
    assert watched.keys() == {4, 8, 12} and watched[result.best_step or 0] == min(watched.values())
    assert result.validation["loss"] == pytest.approx(min(watched.values()), rel=1e-6)
    assert result.test.keys() == {"loss", "mse", "nrmse"}
    assert result.test["mse"] == pytest.approx(result.test["loss"], rel=1e-5)
    split = task.split("test")
    with torch.no_grad():
        outputs = run.classifier()(split.inputs)
    assert task.score(outputs, split)["nrmse"] == pytest.approx(result.test["nrmse"], rel=1e-5)


@thorough
def test_a_compiled_run_agrees_with_an_eager_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(config_of(ADDING), tmp_path / "eager")
    # traced, with autograd, but without the code generator, which would take most of a minute on a CPU
    monkeypatch.setattr(
        Objective, "compile", functools.partialmethod(Objective.compile, backend="aot_eager", fullgraph=True)
    )
    fit(config_of(ADDING, compile="on"), tmp_path / "compiled")
    losses = [[record["loss"] for record in load_run(tmp_path / n).metrics] for n in ("eager", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_model_that_pools_unlike_the_targets_is_refused() -> None:
    model = SequenceClassifierConfig(n_outputs=1, n_features=1, pooling="last")
    with pytest.raises(ConfigError, match=r"`model.pooling` must be 'none', because .*; got 'last'"):
        TrainConfig("x", MACKEY_GLASS, model)
    with pytest.raises(ConfigError, match=r"`model.pooling` must be 'mean' or 'last'.*; got 'none'"):
        TrainConfig("x", ADDING, dataclasses.replace(model, pooling="none"))
    with pytest.raises(ConfigError, match="must be a SequenceClassifierConfig for the task MackeyGlass"):
        TrainConfig("x", MACKEY_GLASS, ModelConfig(vocab_size=2))


def test_progress_without_accuracy_shows_none() -> None:
    progress = Progress(20, 40, loss=0.0001234, accuracy=None, steps_per_second=10.0)
    file = io.StringIO()
    Display(["x"], Console(file=file, force_terminal=False)).update("x", progress)
    assert file.getvalue() == "x: step 20/40, loss 0.000123, 10.0 steps/s, 0:02 left\n"
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, color_system=None)
    display = Display(["x"], console)
    display.update("x", progress)
    console.print(display._table())
    head, line = file.getvalue().splitlines()
    assert head.split() == ["step", "loss", "steps/s", "left"]
    assert line.split()[-3:] == ["0.000123", "10.0", "0:02"]


def test_linrec_train_says_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--task.length 6 --task.n-train 8 --task.n-validation 4 --task.n-test 4 --model.d-model 8"
    loop = "--loop.steps 2 --loop.batch-size 4 --loop.log-every 1 --loop.device cpu --optim.warmup-steps 1"
    assert main(["train", "adding", *small.split(), *loop.split(), "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = load_run(tmp_path / "run").result
    assert result is not None
    said = [
        f"{name} mean squared error {result[name]['loss']:.4g} (NRMSE {result[name]['nrmse']:.4f})"
        for name in ("test", "validation")
    ]
    assert lines[-2] == ", ".join(said)
    assert "accuracy" not in "".join(lines)
