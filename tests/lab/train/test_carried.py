"""Runs whose batches begin with the state that the batch before left."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from linrec.lab.tasks import NO_TARGET, Batch, LanguageModeling, TokenSplit
from linrec.lab.train import ConfigError, InterruptedRunError, Run, TrainConfig, fit, load_run
from linrec.lab.train import loop as loop_module
from linrec.lab.train.checkpoint import CURRENT
from linrec.lab.train.data import Batches
from linrec.lab.train.fabric import Fabric, make_fabric
from linrec.lab.train.start import build_model
from linrec.lab.train.step import Carried, Objective, evaluate, train_step
from linrec.models import LanguageModel, MemoryConfig
from tests.tiers import tiered

from .test_resume import assert_same_run, stop_at

Tiny = Callable[..., TrainConfig]
SEGMENT: dict[str, Any] = {"segment_length": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gla": {"mixer": "gla"},
    "lstm": {"mixer": "lstm"},
    # windows of 8 tokens fill the cache in three batches
    "attention": {"mixer": "attention", "mixer_args": {"window": 20}},
    "transformer_xl": {"mixer": "transformer_xl", "mixer_args": {"memory_length": 6, **SEGMENT}},
    "infini_attention": {"mixer": "infini_attention", "mixer_args": SEGMENT},
    "block_recurrent": {"mixer": "block_recurrent", "mixer_args": SEGMENT},
    "compressive_transformer": {
        "mixer": "compressive_transformer",
        "mixer_args": {"compression_rate": 2, **SEGMENT},
    },
    "recurrent_memory": {
        "mixer": "attention",
        "memory": MemoryConfig(kind="recurrent_memory", n_tokens=2, **SEGMENT),
    },
    "memformer": {"mixer": "attention", "memory": MemoryConfig(kind="memformer", n_tokens=2, **SEGMENT)},
    "enhanced_recurrence": {
        "mixer": "transformer_xl",
        "mixer_args": SEGMENT,
        "memory": MemoryConfig(kind="enhanced_recurrence", **SEGMENT),
    },
}


def batches_of(run: Run) -> Batches:
    """Return the training batches of a run over texts, whose rows go on from batch to batch."""
    assert isinstance(run.config.task, LanguageModeling)
    split, loop = run.config.task.split("train"), run.config.loop
    return Batches(
        split, batch_size=loop.batch_size, seed=loop.seed, device=torch.device("cpu"), streams=True
    )


def carrying(
    tiny: Tiny, folder: Path, name: str = "gla", *, length: int = 8, documents: bool = False, **changes: Any
) -> TrainConfig:
    """Return the configuration of a run on a text of 24 short files, which carries the state."""
    (folder / "text").mkdir(exist_ok=True)
    for n in range(24):
        (folder / "text" / f"{n:02}.txt").write_text("a rose is a rose is a rose"[: 5 + n % 20])
    task = LanguageModeling(
        folder / "text", tokenizer="characters", length=length, documents=documents, cache=folder
    )
    config = tiny(**{"epochs": 2, "log_every": 1, **changes})
    model = dataclasses.replace(config.model, dropout=0.0, **{"mixer_args": {}, **MODELS[name]})
    loop = dataclasses.replace(config.loop, carry_state=True)
    return dataclasses.replace(config, task=task, model=model, loop=loop)


def joined(batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return inputs, targets and resets of batches one after the other in time."""
    inputs, targets, resets, *_ = zip(*batches, strict=True)
    return torch.cat(inputs, 1), torch.cat(targets, 1), None if resets[0] is None else torch.cat(resets, 1)


def nats(model: LanguageModel, inputs: Tensor, targets: Tensor, reset: Tensor | None) -> Tensor:
    """Return -log p of each target (b, t) in one pass, 0 without a target."""
    logits, _ = model(inputs, reset=reset)
    return nn.functional.cross_entropy(logits.mT, targets, reduction="none", ignore_index=NO_TARGET)


# windows of whole segments, and others
@pytest.mark.parametrize(
    ("name", "length", "documents"),
    tiered(
        [("gla", 8, False), ("transformer_xl", 7, True), ("recurrent_memory", 8, True)],
        [(name, 8, True) for name in MODELS],
        [(name, *form) for name in MODELS for form in ((8, False), (7, True))],
    ),
)
def test_losses_are_of_one_pass_over_each_stream(
    name: str, length: int, documents: bool, tiny: Tiny, tmp_path: Path
) -> None:
    # a learning rate that moves no parameter
    config = carrying(tiny, tmp_path, name, length=length, documents=documents, optim={"lr": 1e-30})
    fit(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    losses = torch.tensor([record["loss"] for record in run.metrics if record["split"] == "train"])
    batches = batches_of(run)
    expected = []
    for epoch in range(2):
        with torch.no_grad():
            by_step = nats(run.model().train(), *joined(batches.epoch(epoch)))
        expected.append(by_step.unflatten(1, (-1, length)).mean((0, 2)))
    assert len(expected[0]) > 4
    torch.testing.assert_close(losses, torch.cat(expected), rtol=1e-4, atol=1e-5)


def scored(
    tiny: Tiny, folder: Path, name: str, **options: Any
) -> tuple[dict[str, Any], LanguageModel, TokenSplit]:
    """Return the scores of a new model on a text, with the state carried; the model and the text."""
    config = carrying(tiny, folder, name)
    task = config.task.prepared()
    assert isinstance(task, LanguageModeling)
    fabric, model = objective_of(dataclasses.replace(config, task=task))
    split = task.split("train")
    scores = evaluate(fabric, fabric.setup_module(Objective(model)), task, split, carry_state=True, **options)
    return scores, model.eval(), split


def objective_of(config: TrainConfig) -> tuple[Fabric, LanguageModel]:
    torch.manual_seed(0)
    assert not hasattr(config.model, "pooling")
    return make_fabric(config.loop), LanguageModel(config.model)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gla", "transformer_xl", "recurrent_memory"])
def test_evaluation_in_one_row_is_one_pass_over_the_text(name: str, tiny: Tiny, tmp_path: Path) -> None:
    scores, model, split = scored(tiny, tmp_path, name, batch_size=1)
    with torch.no_grad():
        whole = nats(model, *joined(split.rows(torch.tensor([window])) for window in range(len(split))))
    assert scores["loss"] == pytest.approx(whole.sum().item() / (len(split.ids) - 1), rel=1e-5)


@pytest.mark.parametrize("batch_size", [3, 4, 100])
@pytest.mark.parametrize("batches", [None, 2])
def test_evaluation_predicts_every_token_once_in_equal_streams(
    batch_size: int, batches: int | None, tiny: Tiny, tmp_path: Path
) -> None:
    scores, model, split = scored(tiny, tmp_path, "gla", batch_size=batch_size, batches=batches)
    per_stream = -(-len(split) // batch_size) * split.length
    read = per_stream if batches is None else min(per_stream, batches * split.length)
    found = []
    for begin in range(0, len(split.ids) - 1, per_stream):
        tokens = split.ids[begin : begin + read + 1].long()[None]
        with torch.no_grad():
            found.append(nats(model, tokens[:, :-1], tokens[:, 1:], None).flatten())
    if batches is None:
        assert sum(map(len, found)) == len(split.ids) - 1
    assert scores["loss"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-5)


def test_gradients_stop_between_batches(tiny: Tiny, tmp_path: Path) -> None:
    config = carrying(tiny, tmp_path)
    fabric, model = objective_of(dataclasses.replace(config, task=config.task.prepared()))
    objective = fabric.setup_module(Objective(model))
    optimizers: Any = [fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.0))]
    tokens, carried = torch.randint(model.config.vocab_size, (2, 17)), Carried()
    for begin in (0, 8):
        train_step(
            tokens[:, begin : begin + 8],
            tokens[:, begin + 1 : begin + 9],
            None,
            fabric=fabric,
            objective=objective,
            optimizers=optimizers,
            window=torch.zeros(4),
            carried=carried,
        )
    found = [parameter.grad for parameter in model.parameters()]

    def gradients(state: Any) -> list[Tensor]:
        logits, _ = model(tokens[:, 8:16], state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 9:].flatten())
        return list(torch.autograd.grad(loss, list(model.parameters())))

    _, state = model(tokens[:, :8])
    through = gradients(state)
    with torch.no_grad():
        _, state = model(tokens[:, :8])
    torch.testing.assert_close(found, gradients(state), rtol=1e-4, atol=1e-6)
    assert not all(torch.allclose(one, other) for one, other in zip(found, through, strict=True))


# within the second epoch, and before its first batch
@pytest.mark.parametrize(
    ("name", "batches"), tiered([("attention", 3)], [("recurrent_memory", 3), ("gla", 0)])
)
def test_a_run_resumes_with_the_state_to_the_bit(name: str, batches: int, tiny: Tiny, tmp_path: Path) -> None:
    config = carrying(tiny, tmp_path, name, length=7, documents=True)
    steps = fit(config, tmp_path / "straight").steps
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(steps // 2 + batches))
    tensors = load_file(tmp_path / "pieces" / CURRENT)
    assert any(name.startswith("carried.") and tensor.any() for name, tensor in tensors.items())
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


def test_each_stage_of_a_curriculum_begins_with_an_empty_state(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Counted(Carried):
        def clear(self) -> None:
            calls.append("clear")
            super().clear()

        def keep(self, state: Any) -> None:
            calls.append("keep")
            super().keep(state)

    monkeypatch.setattr(loop_module, "Carried", Counted)
    fit(carrying(tiny, tmp_path, curriculum=((3, 4),), steps=6), tmp_path / "run")
    assert calls == ["clear", *["keep"] * 3, "clear", *["keep"] * 3]


def test_parts_of_a_state_may_change_places() -> None:
    carried = Carried()
    carried.keep((torch.zeros(2), torch.ones(2).expand(3, 2)))
    carried.keep((torch.full((2,), 2.0), torch.full((3, 2), 3.0)))
    one, other = carried.state
    carried.keep((other[0], one.expand(3, 2)))
    assert carried.state[0] is one and carried.state[1] is other
    assert one.tolist() == [3.0, 3.0] and other.tolist() == [[2.0, 2.0]] * 3


def test_what_cannot_carry_a_state_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs a text, .* of MemoryHorizon do not\. Leave --loop.carry-state"
    ):
        tiny(carry_state=True)
    with pytest.raises(ConfigError, match=r"`loop.accumulate` must be 1 with `loop.carry_state`.* got 2"):
        carrying(tiny, tmp_path, accumulate=2)
    config = carrying(tiny, tmp_path)
    growing = dataclasses.replace(config.model, mixer=("gla", "attention"), mixer_args={})
    with pytest.raises(
        ConfigError, match=r"state of the mixer 'attention' grows with each step. Pass a window"
    ):
        fit(dataclasses.replace(config, model=growing), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="is for a single process; got 2"):
        build_model(config, torch.device("cpu"), 2, None)
