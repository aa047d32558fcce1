import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from linrec.files import read_json
from linrec.generation import generate
from linrec.lab.tasks import LanguageModeling
from linrec.lab.tasks.copying import Copying, SegmentCopy
from linrec.lab.train import (
    ConfigError,
    DivergedError,
    InterruptedRunError,
    Progress,
    RunFolderError,
    TrainConfig,
    fit,
    load_run,
)
from linrec.lab.train import checkpoint as checkpoint_module
from linrec.lab.train import loop as loop_module
from linrec.lab.train.checkpoint import load_checkpoint
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.lab.train.optim import gradient_norm
from linrec.lab.train.run import RESULT, read_result
from linrec.lab.train.step import Objective
from linrec.models import ModelConfig
from tests.tiers import thorough

from .test_resume import TIMES, assert_same_run, stop_at

Tiny = Callable[..., TrainConfig]


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
    logged = [p for p in seen if p.logged]
    assert [(p.step, p.total_steps, p.loss) for p in logged] == [(r["step"], 15, r["loss"]) for r in trained]
    # the last evaluation is that of the result
    assert [p.step for p in seen if p.doing == "evaluating"] == [4, 8, 12, 15, 15]

    stored = read_json(tmp_path / "run" / "result.json")
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


@thorough
def test_equal_seeds_give_equal_runs_and_others_do_not(tiny: Tiny, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(tiny(seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    losses = [load_run(tmp_path / name).metrics[0]["loss"] for name in ("a", "c")]
    assert losses[0] != losses[1]


# step 5 ends an epoch; with log_every 3 the window that is open when the run stops is carried over
def test_a_folder_that_is_in_use_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    fit(tiny(), tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"already holds a run; continue it with --resume .*/run"):
        fit(tiny(), tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    with pytest.raises(RunFolderError, match="not an empty folder"):
        fit(tiny(), tmp_path / "notes")
    (tmp_path / "empty").mkdir()
    fit(tiny(), tmp_path / "empty")


def test_what_cannot_be_trained_leaves_no_folder(tiny: Tiny, tmp_path: Path) -> None:
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


def test_a_curriculum_trains_on_short_sequences_first(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SegmentCopy(length=12, n_copied=2, n_train=8, n_validation=4, n_test=3)
    config = dataclasses.replace(tiny(steps=7, curriculum=((2, 6), (3, 9))), task=task)
    config = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    seen, step = [], loop_module.train_step

    def noted(inputs: Tensor, *rest: Any, **options: Any) -> None:
        seen.append(inputs.clone())
        step(inputs, *rest, **options)

    monkeypatch.setattr(loop_module, "train_step", noted)
    fit(config, tmp_path / "straight")
    assert [inputs.shape[1] for inputs in seen] == [6, 6, 9, 9, 9, 12, 12]
    # a run that stops within a stage goes on there
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "halves", progress=stop_at(3))
    straight = seen[:7]
    fit(config, tmp_path / "halves", resume=True)
    assert all(torch.equal(one, other) for one, other in zip(straight, seen[7:], strict=True))
    assert_same_run(tmp_path / "straight", tmp_path / "halves")


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (((4, 6), (3, 9)), "must take less than the run's 7 steps; got 7"),
        (((2, 3),), "`length` must be at least 4"),
    ],
)
def test_a_curriculum_that_does_not_fit(curriculum: Any, message: str, tiny: Tiny, tmp_path: Path) -> None:
    task = SegmentCopy(length=12, n_copied=2, n_train=8, n_validation=4, n_test=3)
    with pytest.raises(ValueError, match=message):
        fit(dataclasses.replace(tiny(steps=7, curriculum=curriculum), task=task), tmp_path)


def test_a_curriculum_needs_a_task_of_any_length(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MemoryHorizon has one length"):
        fit(tiny(steps=7, curriculum=((2, 6),)), tmp_path)


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


def test_a_language_model_does_not_see_the_tokens_that_it_predicts(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a rose is a rose\n" * 20)
    task = LanguageModeling(path=str(tmp_path / "text.txt"), length=8, cache=str(tmp_path / "cache"))
    model = dataclasses.replace(
        tiny().model, vocab_size=256, n_outputs=256, mixer="attention", mixer_args={"causal": False}
    )
    with pytest.raises(ConfigError, match="the mixer 'attention' sees later tokens"):
        fit(dataclasses.replace(tiny(), task=task, model=model), tmp_path / "run")


@pytest.mark.parametrize("mixer", ["Pointwise", "Centred"])
def test_a_mixer_of_others_trains_if_it_is_causal(mixer: str, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a rose is a rose\n" * 20)
    task = LanguageModeling(path=str(tmp_path / "text.txt"), length=8, cache=str(tmp_path / "cache"))
    model = ModelConfig(256, d_model=8, n_layers=1, mixer=f"tests.lab.bench.own_mixers:{mixer}")
    config = dataclasses.replace(tiny(steps=4), task=task, model=model)
    if mixer == "Centred":
        with pytest.raises(ConfigError, match="own_mixers:Centred breaks the law of causality: outputs"):
            fit(config, tmp_path / "run")
        return
    # without a state
    fit(config, tmp_path / "run")
    trained = load_run(tmp_path / "run", trust_code=True).model()
    generated, _ = generate(trained, torch.zeros(1, 3, dtype=torch.int64), n_tokens=4)
    assert generated.shape == (1, 4)


def test_keeping_the_best_needs_something_to_judge_by(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(keep="best")
    (tmp_path / "text.txt").write_text("a rose is a rose\n" * 20)
    task = LanguageModeling(
        path=str(tmp_path / "text.txt"), length=8, validation_share=0.0, cache=str(tmp_path / "cache")
    )
    with pytest.raises(ConfigError, match=r"`loop\.keep` = 'best' needs a validation split"):
        fit(dataclasses.replace(config, task=task), tmp_path / "run")
    with pytest.raises(ValueError, match="`patience` = 2 needs `keep` = 'best'; got `keep` = 'last'"):
        tiny(patience=2)
    with pytest.raises(ValueError, match="there is no `keep` 'beast'; did you mean 'best'"):
        tiny(keep="beast")


@thorough
def test_a_compiled_run_agrees_with_an_eager_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tiny(), tmp_path / "eager")
    # traced, with autograd, but without the code generator, which would take most of a minute on a CPU
    monkeypatch.setattr(
        Objective,
        "compile",
        functools.partialmethod(Objective.compile, backend="aot_eager", fullgraph=True),
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

    monkeypatch.setattr("linrec.lab.train.step.gradient_norm", poisoned)
    with pytest.raises(DivergedError, match="the gradient is not finite at step 10"):
        fit(tiny(checkpoint_every=5), tmp_path)
    assert load_checkpoint(tmp_path).about["step"] == 5


@thorough
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


@thorough
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


def test_iterations_that_do_not_converge_end_the_run_with_the_cure(
    tiny: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["linrec.ops.nonlinear_scan.newton"], "MAX_ITERATIONS", 1)
    config = tiny(steps=4)
    model = dataclasses.replace(config.model, mixer="elman", mixer_args={"mode": "quasi_newton"})
    with pytest.raises(DivergedError, match=r"did not converge: .* leave out --model\.mixer-args\.mode"):
        fit(dataclasses.replace(config, model=model), tmp_path)
