import dataclasses
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linrec.lab.tasks import Batch, LanguageModeling
from linrec.lab.train import (
    InterruptedRunError,
    LearnerConfig,
    LoopConfig,
    OptimConfig,
    TrainConfig,
    fit,
    load_run,
)
from linrec.lab.train.fabric import deterministic, make_fabric, matmul_precision
from linrec.lab.train.optim import make_optimizers
from linrec.lab.train.step import Objective, reads_values, train_step
from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.models.compilation import EAGER_STEPS, CapturedStep, compiling

from .test_carried import carrying
from .test_regression import ADDING, config_of
from .test_resume import assert_same_run, stop_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]


def test_a_captured_step_does_what_the_step_does() -> None:
    total = torch.zeros(3, device="cuda")
    calls = []

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        calls.append(1)
        total.add_(x * y)

    captured = CapturedStep(step)
    expected = torch.zeros(3)
    for n in range(8):
        x, y = torch.full((3,), float(n)), torch.arange(3.0)
        captured(x.cuda(), y.cuda())
        expected += x * y
        assert torch.equal(total.cpu(), expected)
    # the calls as they are, and one that is recorded
    assert len(calls) == EAGER_STEPS + 1


def test_a_captured_step_is_captured_again_for_other_shapes() -> None:
    total = torch.zeros((), device="cuda")
    captured = CapturedStep(lambda x: total.add_(x.sum()))
    for n in [*[3] * (EAGER_STEPS + 2), *[5] * (EAGER_STEPS + 2), 3]:
        captured(torch.ones(n, device="cuda"))
    assert total.item() == (EAGER_STEPS + 2) * 8 + 3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_compiled_and_captured_agrees_with_eager(
    precision: str, tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    for mode in ("off", "on"):
        config = tiny(device="cuda", compile=mode, precision=precision, optim={"clip_norm": 0.5})
        fit(without_dropout(config), tmp_path / mode)
    losses = [[record["loss"] for record in load_run(tmp_path / mode).metrics] for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if precision == "32-true" else 0.05)


# a loop of `nonlinear_scan`, and cuDNN's layers
@pytest.mark.parametrize("mixer", ["lem", "lstm", "gru", "elman"])
def test_a_long_recurrence_within_compiled_and_captured_steps_agrees_with_eager(
    mixer: str, tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    for mode in ("off", "on"):
        config = without_dropout(tiny(device="cuda", compile=mode, log_every=1))
        config = dataclasses.replace(
            config,
            task=dataclasses.replace(config.task, length=100),
            model=dataclasses.replace(config.model, mixer=mixer, mixer_args={}),
        )
        fit(config, tmp_path / mode)
    losses = [[record["loss"] for record in load_run(tmp_path / mode).metrics] for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_regression_captured_agrees_with_eager(tmp_path: Path) -> None:
    for mode in ("off", "on"):
        fit(config_of(ADDING, device="cuda", compile=mode, accumulate=7, log_every=1), tmp_path / mode)
    losses = [[record["loss"] for record in load_run(tmp_path / mode).metrics] for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_is_exact_to_the_last_bit(
    mode: str, accumulate: int, tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = tiny(device="cuda", compile=mode, accumulate=accumulate, log_every=1)
    fit(config, tmp_path / "straight")
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(6, signal.SIGTERM))
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


SEGMENT: dict[str, Any] = {"segment_length": 3}
ATTENTION: dict[str, Any] = {"mixer": "attention", "mixer_args": {"n_heads": 2}}
MEMORIES: dict[str, dict[str, Any]] = {
    "recurrent_memory": {
        **ATTENTION,
        "memory": MemoryConfig(kind="recurrent_memory", n_tokens=2, detach=2, **SEGMENT),
    },
    "memformer": {**ATTENTION, "memory": MemoryConfig(kind="memformer", n_tokens=2, **SEGMENT)},
    "recomputed": {
        **ATTENTION,
        "memory": MemoryConfig(kind="memformer", n_tokens=2, update="normalised", recompute=True, **SEGMENT),
    },
    "enhanced_recurrence": {
        "mixer": "transformer_xl",
        "mixer_args": SEGMENT,
        "memory": MemoryConfig(kind="enhanced_recurrence", **SEGMENT),
    },
}


def with_memory(config: TrainConfig, name: str, folder: Path, *, documents: bool) -> TrainConfig:
    """Return the configuration of a model with a memory across the stack on a text of short files."""
    (folder / "text").mkdir(exist_ok=True)
    for n in range(12):
        (folder / "text" / f"{n}.txt").write_text("a rose is a rose is a rose"[: 5 + n])
    fields: dict[str, Any] = {"tokenizer": "characters", "length": 8, "cache": folder}
    return dataclasses.replace(
        config,
        task=LanguageModeling(folder / "text", documents=documents, **fields),
        model=dataclasses.replace(config.model, dropout=0.0, **MEMORIES[name]),
    )


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in load_run(folder).metrics if record["split"] == "train"]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list with an entry for each replay of a CUDA graph."""
    found, replay = [], torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        found.append(None)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_across_the_stack_is_captured_and_agrees_with_eager(
    name: str, tiny: Callable[..., TrainConfig], tmp_path: Path, replays: list[None]
) -> None:
    counts = []
    for mode in ("off", "on"):
        # two segments in the first steps, and three in the steps after them
        config = tiny(device="cuda", compile=mode, steps=14, curriculum=((6, 4),), log_every=1)
        fit(with_memory(config, name, tmp_path, documents=False), tmp_path / mode)
        counts.append(len(replays))
    assert counts == [0, 14 - 2 * EAGER_STEPS]
    assert losses_of(tmp_path / "on") == pytest.approx(losses_of(tmp_path / "off"), rel=1e-3)


# steps before the graph of the first epoch and of each later epoch: the first batch of an epoch, eager calls
# and, of a cache with a window, batches that fill it
@pytest.mark.parametrize(
    ("name", "documents", "eager"),
    [
        ("gla", True, (1 + EAGER_STEPS, 1)),
        ("lstm", False, (1 + EAGER_STEPS, 1)),
        ("transformer_xl", False, (1 + EAGER_STEPS, 1)),
        ("block_recurrent", False, (1 + EAGER_STEPS, 1)),
        ("recurrent_memory", False, (1 + EAGER_STEPS, 1)),
        ("attention", False, (3 + EAGER_STEPS, 3 + EAGER_STEPS)),
    ],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_carried_state_is_captured_and_agrees_with_eager(
    name: str,
    documents: bool,
    eager: tuple[int, int],
    precision: str,
    tiny: Callable[..., TrainConfig],
    tmp_path: Path,
    replays: list[None],
) -> None:
    counts = []
    for mode in ("off", "on"):
        config = carrying(
            tiny, tmp_path, name, documents=documents, device="cuda", compile=mode, precision=precision
        )
        steps = fit(config, tmp_path / mode).steps
        counts.append(len(replays))
    assert counts == [0, steps - sum(eager)]
    assert losses_of(tmp_path / "on") == pytest.approx(
        losses_of(tmp_path / "off"), rel=1e-3 if precision == "32-true" else 0.05
    )


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("name", ["gla", "attention", "transformer_xl"])
def test_a_carried_state_resumes_to_the_last_bit(
    name: str, mode: str, tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = carrying(tiny, tmp_path, name, device="cuda", compile=mode)
    steps = fit(config, tmp_path / "straight").steps
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(steps // 2 + 7, signal.SIGTERM))
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


def test_a_memory_with_resets_is_not_captured(
    tiny: Callable[..., TrainConfig], tmp_path: Path, replays: list[None]
) -> None:
    for mode in ("off", "on"):
        config = tiny(device="cuda", compile=mode, steps=6, log_every=1)
        fit(with_memory(config, "recurrent_memory", tmp_path, documents=True), tmp_path / mode)
    assert not replays
    assert losses_of(tmp_path / "on") == pytest.approx(losses_of(tmp_path / "off"), rel=1e-3)


@pytest.mark.parametrize("name", MEMORIES)
def test_batches_with_and_without_resets_may_alternate(name: str, replays: list[None]) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(6, (14, 4, 8), device="cuda")
    resets = torch.rand(14, 4, 8, device="cuda") < 0.3
    # the first batches, and some before and after the capture
    with_resets = [0, 1, 4, 8, 9, 12]
    batches = [Batch(x, x, resets[n] if n in with_resets else None) for n, x in enumerate(tokens)]
    assert stepped(name, batches, compiled=True) == pytest.approx(
        stepped(name, batches, compiled=False), rel=1e-3
    )
    assert len(replays) == len(batches) - len(with_resets) - EAGER_STEPS


def stepped(name: str, batches: list[Batch], *, compiled: bool) -> list[float]:
    """Return the losses of training steps, which are captured if they are compiled."""
    fabric = make_fabric(LoopConfig(device="cuda"))
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=6, d_model=8, n_layers=2, **MEMORIES[name]))
    objective = Objective(model)
    if compiled:
        objective.compile()
    objective = fabric.setup_module(objective)
    optimizers = [fabric.setup_optimizers(o) for o in make_optimizers(model, OptimConfig(lr=0.01))]
    window, losses = torch.zeros(4, device="cuda"), []
    step: Callable[..., None] = functools.partial(
        train_step, fabric=fabric, objective=objective, optimizers=optimizers, window=window
    )
    if compiled:
        step = CapturedStep(step, unless=lambda *batch: reads_values(model, Batch(*batch)))
    with compiling(), deterministic(True), matmul_precision("highest"):
        for batch in batches:
            window.zero_()
            step(*batch)
            losses.append(window[0].item())
    return losses


def without_dropout(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))


@pytest.mark.parametrize(
    ("learner", "mixer", "arguments"),
    [
        ("tbptt", "gru", {}),
        ("rtrl", "lru", {}),
        ("rtrl", "hgru", {"credit": "spatial"}),
        ("dense_rtrl", "min_gru", {}),
        ("online_lru", "lru", {"mode": "full_rec"}),
        ("focused_backpropagation", "ind_rnn", {}),
        ("lstm_1997", "lstm", {}),
    ],
)
def test_learners_train_as_on_the_cpu_and_resume(
    learner: str, mixer: str, arguments: dict[str, Any], tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        config = carrying(tiny, tmp_path, length=7, documents=True, device=device)
        model = dataclasses.replace(config.model, mixer=mixer, mixer_args={}, d_model=4)
        steps = LearnerConfig(learner=learner, learner_args=arguments, chunk=3)
        config = dataclasses.replace(config, model=model, learner=steps)
        fit(config, tmp_path / device)
        losses.append([record["loss"] for record in load_run(tmp_path / device).metrics])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(len(losses[0]) // 2))
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "cuda", tmp_path / "pieces")
