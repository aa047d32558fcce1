import dataclasses
import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linrec.lab.tasks import NO_TARGET, Batch
from linrec.lab.tasks.labelled import LabelledTokens
from linrec.lab.train import LoopConfig, TrainConfig
from linrec.lab.train.fabric import make_fabric
from linrec.lab.train.optim import make_optimizers
from linrec.lab.train.step import (
    Objective,
    evaluate,
    reads_values,
    skipped_parameters,
    train_step,
)
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, SequenceClassifierConfig
from linrec.models.compilation import compiling
from tests.mixers import variants
from tests.mixers.test_interface import OnTheDevice
from tests.models import test_stack_memory as stacks
from tests.tiers import thorough

from .conftest import MODEL, TASK

MODEL_OF_TASK = TrainConfig("tiny", TASK, MODEL).model


def stepped(
    config: TrainConfig, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[nn.Module, torch.Tensor]:
    """Make one step from a seeded model; returns the model and the metrics' window."""
    torch.manual_seed(0)
    model = LanguageModel(config.model).eval()
    fabric = make_fabric(config.loop)
    optimizers: Any = [fabric.setup_optimizers(o) for o in make_optimizers(model, config.optim)]
    window = torch.zeros(4)
    train_step(
        inputs,
        targets,
        None,
        fabric=fabric,
        objective=fabric.setup_module(Objective(model)),
        optimizers=optimizers,
        window=window,
        accumulate=config.loop.accumulate,
        clip_norm=config.optim.clip_norm,
    )
    return model, window


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8 sequences whose pieces have different numbers of targets."""
    split = TASK.split("train")
    inputs, targets = split.inputs[:8], split.targets[:8].clone()
    targets[0] = NO_TARGET
    targets[5, 3:] = NO_TARGET
    return inputs, targets


def of_mixer(mixer: str, variant: str) -> LanguageModel:
    config = ModelConfig(vocab_size=7, d_model=8, n_layers=1, d_channel_mixing=4, mixer=mixer)
    return LanguageModel(dataclasses.replace(config, mixer_args=variants.arguments(mixer, variant)))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_labels_are_smoothed_in_training_alone(per_sequence: bool) -> None:
    torch.manual_seed(0)
    if per_sequence:
        model: Any = SequenceClassifier(SequenceClassifierConfig(n_outputs=3, vocab_size=7, d_model=8))
        targets, outputs = torch.tensor([0, 2]), lambda x: model(x)
    else:
        model = LanguageModel(ModelConfig(vocab_size=7, d_model=8))
        targets, outputs = torch.randint(7, (2, 5)), lambda x: model(x)[0]
    inputs, objective = torch.randint(7, (2, 5)), Objective(model, label_smoothing=0.2)
    log_p = outputs(inputs).log_softmax(-1).flatten(0, -2)
    plain = -log_p.gather(1, targets.flatten()[:, None]).sum()
    smoothed = 0.8 * plain - 0.2 * log_p.mean(-1).sum()
    torch.testing.assert_close(objective.train()(inputs, targets).loss, smoothed)
    torch.testing.assert_close(objective.eval()(inputs, targets).loss, plain)


EVERY = [
    pytest.param(functools.partial(of_mixer, *case.values), id="-".join(case.values), marks=case.marks)
    for case in variants.of_families()
]
EVERY += [pytest.param(functools.partial(stacks.make, name), id=name) for name in stacks.STACKS]


@pytest.mark.parametrize("make", EVERY)
def test_parameters_without_a_gradient_are_known_before_the_step(make: Callable[[], LanguageModel]) -> None:
    objective = Objective(make())
    for time in (1, 3):
        tokens, reset = torch.arange(2 * time).view(2, time) % 5, torch.zeros(2, time, dtype=torch.bool)
        batch = Batch(tokens, tokens, reset)
        skipped = skipped_parameters(objective, batch)
        for end in range(time):
            reset[0, end] = True
            objective.zero_grad()
            objective(*batch).loss.backward()
            lacking = {parameter for parameter in objective.parameters() if parameter.grad is None}
            assert reads_values(objective.model, batch) or lacking == skipped


@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_accumulation_equals_the_large_batch(accumulate: int, tiny: Callable[..., TrainConfig]) -> None:
    inputs, targets = batch()
    large, large_window = stepped(tiny(batch_size=8, optim={"clip_norm": 0.1}), inputs, targets)
    config = tiny(batch_size=8, accumulate=accumulate, optim={"clip_norm": 0.1})
    small, small_window = stepped(config, inputs, targets)
    torch.testing.assert_close(small_window, large_window, rtol=1e-5, atol=1e-6)
    for one, other in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mixer", ["compressive_transformer", "nn_rnn"])
def test_losses_that_layers_add_are_of_the_large_batch_too(
    mixer: str, tiny: Callable[..., TrainConfig]
) -> None:
    arguments = {
        "compressive_transformer": {"segment_length": 4, "compression_rate": 2},
        "nn_rnn": {"delta": 1.0},
    }
    inputs, targets = batch()

    def gradients(accumulate: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        sizes = {"vocab_size": MODEL_OF_TASK.vocab_size, "d_model": 8, "n_layers": 1}
        model = LanguageModel(ModelConfig(**sizes, mixer=mixer, mixer_args=arguments[mixer])).train()
        if mixer == "nn_rnn":
            # the loss is zero, and so is its gradient, at the initial values
            nn.init.constant_(model.mixers[0].alpha, 0.5)
        fabric = make_fabric(tiny().loop)
        train_step(
            inputs,
            targets,
            None,
            fabric=fabric,
            objective=fabric.setup_module(Objective(model)),
            optimizers=[],
            window=torch.zeros(4),
            accumulate=accumulate,
        )
        return [p.grad for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients(4), gradients(1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_window_holds_loss_accuracy_and_the_norm_before_clipping(
    tiny: Callable[..., TrainConfig],
) -> None:
    inputs, targets = batch()
    model, window = stepped(tiny(batch_size=8), inputs, targets)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    clipped, clipped_window = stepped(tiny(batch_size=8, optim={"clip_norm": 0.1}), inputs, targets)

    torch.manual_seed(0)
    logits, _ = LanguageModel(MODEL_OF_TASK).eval()(inputs)
    counted = targets != NO_TARGET
    loss = nn.functional.cross_entropy(logits[counted], targets[counted])
    accuracy = (logits.argmax(-1) == targets)[counted].float().mean()
    expected = torch.stack([loss.detach(), accuracy, norm, torch.tensor(1.0)])
    torch.testing.assert_close(window, expected)
    torch.testing.assert_close(clipped_window, expected)
    after = torch.cat([p.grad.flatten() for p in clipped.parameters() if p.grad is not None]).norm()
    assert norm > 0.1
    torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-4, atol=0)


def test_a_batch_without_targets_moves_nothing_to_nan(tiny: Callable[..., TrainConfig]) -> None:
    inputs, targets = batch()
    model, window = stepped(tiny(), inputs, torch.full_like(targets, NO_TARGET))
    assert window.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_bfloat16_computes_in_it_and_keeps_parameters_in_float32(tiny: Callable[..., TrainConfig]) -> None:
    config = tiny(batch_size=8, precision="bf16-mixed")
    inputs, targets = batch()
    model, window = stepped(config, inputs, targets)
    _, exact_window = stepped(tiny(batch_size=8), inputs, targets)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not torch.equal(window, exact_window)
    torch.testing.assert_close(window[0], exact_window[0], rtol=0.02, atol=0)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 50])
def test_evaluation_does_not_depend_on_the_batch_size(
    batch_size: int, tiny: Callable[..., TrainConfig]
) -> None:
    torch.manual_seed(0)
    model = LanguageModel(MODEL_OF_TASK)
    fabric = make_fabric(tiny().loop)
    objective = fabric.setup_module(Objective(model))
    scores = evaluate(fabric, objective, TASK, TASK.split("test"), batch_size=batch_size)
    assert model.training

    split = TASK.split("test")
    logits, _ = model.eval()(split.inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), split.targets.flatten())
    assert scores["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert scores["accuracy"] == pytest.approx((logits.argmax(-1) == split.targets).float().mean().item())
    assert scores["accuracy_by_span"] == TASK.score(logits.argmax(-1), split)["accuracy_by_span"]


def padded() -> LabelledTokens:
    """Return 7 sequences of 1 to 6 tokens, behind which stands what is no token at all."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (7, 6), generator=generator, dtype=torch.uint8)
    lengths = torch.tensor([3, 6, 1, 4, 2, 5, 6])
    tokens[torch.arange(6) >= lengths[:, None]] = 255
    return LabelledTokens(tokens, torch.tensor([0, 1, 2, 2, 1, 0, 1]), lengths)


def each_alone(model: SequenceClassifier, split: LabelledTokens) -> torch.Tensor:
    """Return the logits of every sequence of a split, without any padding."""
    assert split.lengths is not None
    sequences = zip(split.tokens.long(), split.lengths.tolist(), strict=True)
    return torch.cat([model(row[None, :length]) for row, length in sequences])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_training_and_evaluation_leave_the_padding_out(
    pooling: Any, tiny: Callable[..., TrainConfig]
) -> None:
    torch.manual_seed(0)
    config = SequenceClassifierConfig(n_outputs=3, vocab_size=5, d_model=8, n_layers=1, pooling=pooling)
    model, split = SequenceClassifier(config), padded()
    fabric = make_fabric(tiny().loop)
    objective = fabric.setup_module(Objective(model))
    logits = each_alone(model, split)
    loss = nn.functional.cross_entropy(logits, split.labels)
    accuracy = (logits.argmax(-1) == split.labels).float().mean()
    # the last batch is filled with sequences that count for nothing
    scores = evaluate(fabric, objective, TASK, split, batch_size=3, batches=3)
    assert scores["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(accuracy.item())

    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizers: Any = [fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.0))]
    window = torch.zeros(4)
    train_step(
        *split.rows(torch.arange(7)),
        fabric=fabric,
        objective=objective,
        optimizers=optimizers,
        window=window,
        accumulate=7,
    )
    torch.testing.assert_close(window[:2], torch.stack([loss.detach(), accuracy]))
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_fabrics_advice_on_precision_is_not_shown_and_all_else_is() -> None:
    package = type(make_fabric(LoopConfig(device="cpu"))).__module__.removesuffix(".fabric")
    logger = logging.getLogger(f"{package}.utilities.rank_zero")
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        logger.warning("You are using a CUDA device that has Tensor Cores.")
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
    assert shown == ["something else"]


@thorough
@pytest.mark.parametrize("mixer", ["hgru", "gla", ("gla", "hgru")])
def test_equal_blocks_share_one_compilation(mixer: str | tuple[str, ...]) -> None:
    model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=8, d_channel_mixing=8, mixer=mixer))
    objective, tokens = Objective(model), torch.randint(5, (2, 4))
    expected = objective(tokens, tokens)
    compiled = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    with compiling():
        objective.compile(backend=count, fullgraph=True)
        outcome = objective(tokens, tokens)
    torch.testing.assert_close(outcome.loss, expected.loss)
    # of each kind of block one, or two where layers differ in a number, and the loss
    assert len(compiled) <= 1 + 2 * len([mixer] if isinstance(mixer, str) else mixer)


class OnMeta(TorchDispatchMode):
    """Refuses tensors on the CPU, which a CUDA graph would not read again."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for part in tree_leaves(found):
            # torch 2.11 makes a tensor without numbers to recompute activations
            frozen = isinstance(part, torch.Tensor) and not part.is_meta and part.numel()
            assert not frozen, f"{function} makes a tensor on the CPU"
        return found


WITHOUT_VALUES = [(stacks.make, name) for name in stacks.STACKS] + [
    (stacks.encoder, name) for name in stacks.ENCODERS
]


def run_without_values(model: LanguageModel, *, with_resets: bool) -> bool:
    """Run a forward and backward pass on tensors without values; return whether values may be read.

    Reading values raises an error, and so do tensors on the CPU.
    """
    tokens = torch.zeros(3, 3 * stacks.LENGTH, dtype=torch.int64, device="meta")
    batch = Batch(tokens, tokens, tokens > 0 if with_resets else None)
    objective = Objective(model.float().to("meta"))
    with OnTheDevice(), OnMeta():
        objective(*batch).loss.backward()
    return reads_values(model, batch)


@thorough
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("make", "name"), WITHOUT_VALUES)
def test_nothing_in_the_step_of_a_memory_would_be_frozen(
    make: Callable[[str], LanguageModel], name: str, recompute: bool
) -> None:
    model = make(name)
    assert model.memory is not None
    model.memory.config = dataclasses.replace(model.memory.config, recompute=recompute)
    before = torch.get_rng_state(), random.getstate()
    assert not run_without_values(model, with_resets=False)
    # a graph would repeat what the host draws, such as a number of segments
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_resets_are_read_by_a_memory_alone() -> None:
    model = stacks.make("attention")
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    assert reads_values(model, Batch(tokens, tokens, tokens > 0))
    with pytest.raises(AssertionError, match="__bool__ moves numbers"):
        run_without_values(model, with_resets=True)
    assert not run_without_values(LanguageModel(MODEL_OF_TASK), with_resets=True)
