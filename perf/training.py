"""A training step of a language model as `linrec train` makes it, and what is measured of it."""

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from linrec.lab.train import LoopConfig, OptimConfig, get_recipe
from linrec.lab.train.config import complete_mixer_args
from linrec.lab.train.fabric import (
    Fabric,
    deterministic,
    make_fabric,
    matmul_precision,
    seed_all,
    uses_compile,
)
from linrec.lab.train.optim import make_optimizers, set_learning_rate
from linrec.lab.train.step import EAGER_STEPS, CapturedStep, Objective, train_step
from linrec.mixers.attention import Attention
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, preset
from linrec.models.regional import compiling
from perf.encoders import MIXER_ARGUMENTS
from perf.kernels import profile_of
from perf.memory import peak_bytes, release, why
from perf.sizes import Model, Size
from perf.timing import calls_per_second, tokens_per_second
from perf.training_peers import fla_loss, fla_model, make_fla_step

M = TypeVar("M", LanguageModel, SequenceClassifier)

FLOPS = (
    "per token 6 for each parameter but those of an embedding that is only looked up, and with softmax "
    "attention 6 for each step of the sequence, layer and channel of its heads; recurrences count nothing"
)

# HGRN, table 16
OPTIM = get_recipe("wikitext103-hgrn").optim


@dataclass(frozen=True)
class Windows:
    """Windows that steps are counted in, and seconds that each should take."""

    windows: int = 5
    seconds: float = 1.0


def model_config(name: str, mixer: str | None, *, quick: bool = False) -> ModelConfig:
    """Return a preset, with another mixer where one is named; `quick` makes it tiny.

    Raises:
        ValueError: there is no such preset or mixer.
    """
    config = preset(name)
    if mixer is not None and mixer != config.mixer:
        config = dataclasses.replace(config, mixer=mixer, mixer_args=dict(MIXER_ARGUMENTS.get(mixer, {})))
    if quick:
        config = dataclasses.replace(
            config,
            vocab_size=32,
            n_outputs=None,
            d_model=16,
            n_layers=max(len(config.mixer_pattern), len(config.channel_mixing_pattern)),
            d_channel_mixing=32,
        )
    return dataclasses.replace(config, mixer_args=complete_mixer_args(config.mixer, config.mixer_args))


def flops_per_token(model: LanguageModel, length: int) -> int:
    """Return floating-point operations of training per token: those of matrix products, once forward and
    twice backward, whatever is computed again.

    2 for each parameter in a product forward, so 6 in all. The products of softmax attention, of causal
    scores and of values, are 2 * 2 * (length / 2) for each channel of a head.

    Source:
        Kaplan and others, Scaling Laws for Neural Language Models (2020), section 2.1; causal scores are
        counted as the half that they are.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_embeddings:
        weights -= model.embedding.weight.numel()
    # the state of softmax attention is a key and a value for each step
    scores = sum(mixer.state_size for mixer in model.mixers if isinstance(mixer, Attention)) // 2
    return 6 * weights + 6 * length * scores


def make_step(make: Callable[[], M], optim: OptimConfig, loop: LoopConfig) -> tuple[M, Callable[..., None]]:
    """Return the model, and a step over (inputs, targets, reset) that trains it as `linrec train` does.

    Compiled, and on CUDA replayed as one graph, as `loop.compile` has it.
    """
    fabric, model, objective = _make_objective(make, loop)
    optimizers = make_optimizers(model, optim)
    steppers: Any = [fabric.setup_optimizers(optimizer) for optimizer in optimizers]
    step: Callable[..., None] = functools.partial(
        train_step,
        fabric=fabric,
        objective=objective,
        optimizers=steppers,
        window=torch.zeros(4, device=fabric.device),
        accumulate=loop.accumulate,
        clip_norm=optim.clip_norm,
    )
    if uses_compile(loop, fabric.device) and fabric.device.type == "cuda":
        step = CapturedStep(step)

    def scheduled(inputs: Tensor, targets: Tensor, reset: Tensor | None = None) -> None:
        set_learning_rate(optimizers, 1.0)
        step(inputs, targets, reset)

    return model, scheduled


def _make_objective(make: Callable[[], M], loop: LoopConfig) -> tuple[Fabric, M, Any]:
    fabric = make_fabric(loop)
    seed_all(loop.seed)
    with fabric.device:
        model = make()
    if isinstance(model, LanguageModel):
        model.recompute = loop.recompute
    objective: Any = Objective(model)
    if uses_compile(loop, fabric.device):
        torch.compiler.reset()
        objective.compile()
    return fabric, model, fabric.setup_module(objective)


def measure_training(
    config: ModelConfig,
    loop: LoopConfig,
    length: int,
    device: torch.device,
    windows: Windows,
    *,
    document: int | None = None,
    profile: bool = False,
) -> dict[str, Any]:
    """Measure training of a language model on random tokens.

    Args:
        config: the model.
        loop: batch, precision, compilation, as in `linrec train`.
        length: tokens of a sequence.
        device: where `loop` trains.
        windows: for how long.
        document: tokens of a document, of which each sequence has several with a reset between them; None
            makes every sequence one document, without resets.
        profile: whether to take a profile too, on CUDA.

    Returns:
        What JSON holds: "parameters", "flops_per_token", "first_seconds", "tokens_per_second" with "median",
        "lowest" and "highest", "steps_per_window", "step_ms", "peak_bytes" and, where asked for, "profile" as
        `profile_of` returns it; or "missing", why there are none.
    """
    release(device)
    try:
        with deterministic(loop.deterministic), matmul_precision(loop.matmul_precision), compiling():
            return _measured(config, loop, length, device, windows, document, profile)
    except Exception as error:
        return {"missing": why(error)}


def measure_fla(
    model: Model, size: Size, loop: LoopConfig, length: int, device: torch.device, windows: Windows
) -> dict[str, Any]:
    """Measure training of flash-linear-attention's model; the result is that of `measure_training`.

    Where the model refuses to train, as with kernels that are wrong on this device, the result also has
    "forward", the measurement of the forward pass alone.
    """
    release(device)
    try:
        with matmul_precision(loop.matmul_precision), torch.device(device):
            made = fla_model(model, size)
        step = make_fla_step(made, OPTIM, loop)
    except Exception as error:
        return {"missing": why(error)}
    tokens, per_step = _tokens(size.vocab_size, loop, length, device), loop.batch_size * length
    try:
        return _timed(functools.partial(step, *tokens), made, per_step, device, windows)
    except Exception as error:
        found: dict[str, Any] = {"missing": why(error)}
    made.zero_grad()
    found["forward"] = _measured_forward(
        functools.partial(fla_loss, made, *tokens), made, per_step, device, windows
    )
    return found


def measure_forward(
    config: ModelConfig, loop: LoopConfig, length: int, device: torch.device, windows: Windows
) -> dict[str, Any]:
    """Measure the forward pass and the loss, without gradients; the result is that of `measure_training`."""
    release(device)
    with deterministic(loop.deterministic), matmul_precision(loop.matmul_precision), compiling():
        _, model, objective = _make_objective(functools.partial(LanguageModel, config), loop)
        call = functools.partial(objective, *_tokens(config.vocab_size, loop, length, device))
        return _measured_forward(call, model, loop.batch_size * length, device, windows)


def _measured_forward(
    call: Callable[[], Any], model: nn.Module, per_step: int, device: torch.device, windows: Windows
) -> dict[str, Any]:
    try:
        return _timed(torch.no_grad()(call), model, per_step, device, windows)
    except Exception as error:
        return {"missing": why(error)}


def _measured(
    config: ModelConfig,
    loop: LoopConfig,
    length: int,
    device: torch.device,
    windows: Windows,
    document: int | None,
    profile: bool,
) -> dict[str, Any]:
    model, step = make_step(functools.partial(LanguageModel, config), OPTIM, loop)
    inputs, targets = _tokens(config.vocab_size, loop, length, device)
    reset = None
    if document is not None:
        reset = (torch.arange(length, device=device) % document == 0).repeat(loop.batch_size, 1)
    call = functools.partial(step, inputs, targets, reset)
    found = _timed(call, model, loop.batch_size * length, device, windows)
    found["flops_per_token"] = flops_per_token(model, length)
    if profile:
        found["profile"] = profile_of(call, device)
    return found


def _tokens(vocab_size: int, loop: LoopConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab_size, (loop.batch_size, length + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _timed(
    call: Callable[[], Any], model: nn.Module, per_step: int, device: torch.device, windows: Windows
) -> dict[str, Any]:
    """Time a step of so many tokens; the first one apart, which compiles."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first = time.perf_counter() - start
    # the peak of the computation, not of its compilation
    release(device)
    for _ in range(EAGER_STEPS):
        call()
    rate = calls_per_second(call, device, windows=windows.windows, seconds=windows.seconds)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_seconds": first,
        "tokens_per_second": tokens_per_second(rate, per_step),
        "steps_per_window": rate.calls,
        "step_ms": 1e3 / rate.median,
        "peak_bytes": peak_bytes(device),
    }
