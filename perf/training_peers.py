"""The same training step with flash-linear-attention's models, imported only when asked for."""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from linrec.lab.train import LoopConfig, OptimConfig
from perf.peers import UnsuitedError
from perf.sizes import Model, Size

PACKAGES = ("flash-linear-attention", "fla-core", "transformers")
FLA = "flash-linear-attention, its fused norms, SwiGLU and loss, in a plain loop: autocast, AdamW, clipping"


def fla_model(model: Model, size: Size, *, use_cache: bool = False) -> nn.Module:
    """Return flash-linear-attention's model of this size, with fused norms, units and loss.

    Args:
        model: the model.
        size: its size.
        use_cache: whether calls return a cached state, for generation.

    Raises:
        UnsuitedError: it has no such model, or the model needs kernels that are not installed.
    """
    if model.fla is None:
        raise UnsuitedError("has no such model")
    name, arguments = model.fla
    if name.startswith("Mamba") and importlib.util.find_spec("mamba_ssm") is None:
        # the layers of fla have no kernels of their own for it
        raise UnsuitedError("needs the kernels of mamba-ssm")
    from fla import models
    from transformers import AutoModelForCausalLM

    config = model.config(size)
    configuration = getattr(models, name)(
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        intermediate_size=config.d_channel_mixing,
        vocab_size=config.vocab_size,
        fuse_cross_entropy=False,
        fuse_linear_cross_entropy=True,
        use_cache=use_cache,
        **arguments,
    )
    made: nn.Module = AutoModelForCausalLM.from_config(configuration)
    return made


def make_fla_step(model: nn.Module, optim: OptimConfig, loop: LoopConfig) -> Callable[..., None]:
    """Return a step over (inputs, targets, reset) that trains a model of flash-linear-attention.

    Raises:
        UnsuitedError: the loop asks for something that this step does not have.
    """
    if loop.accumulate > 1 or loop.recompute or loop.precision != "bf16-mixed":
        raise UnsuitedError("is measured in bfloat16 autocast, without --accumulate and --recompute")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )
    return functools.partial(_step, model, optimizer, optim.clip_norm)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
    inputs: Tensor,
    targets: Tensor,
    reset: Tensor | None = None,
) -> None:
    if reset is not None:
        raise UnsuitedError("is measured without --document")
    fla_loss(model, inputs, targets).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()


def fla_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss; the model shifts the labels by a step itself, and does not train the last target."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        loss: Tensor = model(input_ids=inputs, labels=inputs).loss
    return loss
