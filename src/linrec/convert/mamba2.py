"""Mamba-2, as in `Mamba2ForCausalLM` of transformers.

transformers ignores `norm_before_gate` and `rms_norm`, which some config.json files contain: its layers
always have the norm, after the gate. `residual_in_fp32` and `chunk_size` affect precision and speed only.
With `use_bias`, dt has two biases in transformers, of which the model has the sum.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import linear, vocabulary
from linrec.convert.layout import TAPS, Change, Part, Piece, rows, same, within
from linrec.models import ModelConfig

__all__ = ["backbone", "config", "dt_limit", "layout", "mixer"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("silu", "swish"))
    d_model, expand = options.read("hidden_size", int), options.read("expand", int)
    n_heads, d_head = options.read("num_heads", int), options.read("head_dim", int)
    if n_heads * d_head != expand * d_model:
        raise ConversionError(
            f"{options.path}: `num_heads` * `head_dim` must be `expand` * `hidden_size` = "
            f"{expand * d_model}; got {n_heads} * {d_head}."
        )
    norm_eps = options.read("layer_norm_epsilon", float)
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=options.read("num_hidden_layers", int),
        mixer="mamba2",
        mixer_args={
            "expand": expand,
            "n_heads": n_heads,
            "d_state": options.read("state_size", int),
            "n_groups": options.read("n_groups", int),
            "conv_size": options.read("conv_kernel", int),
            "conv_bias": options.read("use_conv_bias", bool),
            "bias": options.read("use_bias", bool),
            "norm_eps": norm_eps,
            "dt_limit": dt_limit(options, "time_step_limit"),
        },
        channel_mixing="none",
        norm="rms",
        norm_eps=norm_eps,
        tie_embeddings=options.read("tie_word_embeddings", bool, False),
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    yield from backbone(config, mixer)


def backbone(config: ModelConfig, mixer: Callable[..., Iterator[Piece]]) -> Iterator[Piece]:
    """Yield the pieces of a model that differs from Mamba-2 only in its mixers.

    Args:
        config: configuration of the model.
        mixer: yields the pieces of a mixer, given `d_model` and the mixer's arguments.
    """
    # the older name is that of checkpoints of 2024
    yield from vocabulary(config, "backbone.embeddings.weight", older="backbone.embedding.weight")
    yield same("backbone.norm_f.weight", "norm.weight", config.d_model)
    for layer in range(config.n_layers):
        theirs, ours = f"backbone.layers.{layer}.", f"blocks.{layer}."
        yield same(f"{theirs}norm.weight", f"{ours}mixer_norm.weight", config.d_model)
        pieces = mixer(config.d_model, **config.mixer_args)
        yield from within(f"{theirs}mixer.", f"{ours}mixer.", pieces)


def dt_limit(options: Options, name: str, default: list[float] | None = None) -> tuple[float, float] | None:
    """Return the mixer's argument `dt_limit`.

    Args:
        options: options that contain the two limits.
        name: name of the option.
        default: the limits if the option is missing; None makes the option required.
    """
    limit = options.read(name, list, default)
    if len(limit) != 2:
        raise ConversionError(f"{options.path}: `{name}` must be two numbers; got {limit}.")
    low, high = limit
    return None if (low, high) == (0, math.inf) else (low, high)


def mixer(
    d_model: int,
    *,
    n_heads: int,
    d_state: int,
    n_groups: int,
    conv_size: int,
    conv_bias: bool,
    bias: bool,
    expand: int = 2,
    d_inner: int | None = None,
    output_bias: bool | None = None,
    D: str = "head",
    output_norm: str = "rms",
    **_: Any,
) -> Iterator[Piece]:
    """Yield the pieces of a mixer, given its arguments; the names are the same in all released code."""
    d_inner = expand * d_model if d_inner is None else d_inner
    output_bias = bias if output_bias is None else output_bias
    convolved = d_inner + 2 * n_groups * d_state
    # z, X, B and C; then dt
    parts = [Part("zXBC.weight", d_inner + convolved), Part("dt.weight", n_heads)]
    yield rows("in_proj.weight", parts, d_model)
    yield same("conv1d.weight", "conv.weight", convolved, 1, conv_size, changes=[TAPS])
    if conv_bias:
        yield same("conv1d.bias", "conv.bias", convolved)
    yield _biases(d_inner + convolved, n_heads) if bias else same("dt_bias", "dt.bias", n_heads)
    yield same("A_log", "A_log", n_heads)
    yield same("D", "D", d_inner if D == "channel" else n_heads, changes=[_of_heads(n_heads)])
    if output_norm == "rms":
        yield same("norm.weight", "norm.weight", d_inner)
    yield from linear("out_proj", "out", d_model, d_inner, bias=output_bias)


def _of_heads(n_heads: int) -> Change:
    """Return the change of a flat D to the numbers of each head."""
    return Change(lambda flat: flat.unflatten(0, (n_heads, -1)), Tensor.flatten)


def _biases(width: int, n_heads: int) -> Piece:
    """Return the piece of the input projection's bias, where dt has two biases: their sum is the model's."""

    def read(tensors: Sequence[Tensor]) -> list[Tensor]:
        bias, dt_bias = tensors
        return [bias[:width], bias[width:] + dt_bias]

    def write(tensors: Sequence[Tensor]) -> list[Tensor]:
        bias, dt_bias = tensors
        return [torch.cat([bias, torch.zeros_like(dt_bias)]), dt_bias]

    sizes = {"in_proj.bias": (width + n_heads,), "dt_bias": (n_heads,)}
    return Piece(sizes, ["zXBC.bias", "dt.bias"], read, write)
