"""Mamba, as in `MambaForCausalLM` of transformers.

The width of the layers is `intermediate_size`, or without it `expand` times `hidden_size`. `residual_in_fp32`
affects precision only, `use_mambapy` and `use_associative_scan` affect speed only. Apart from the rank, the
`time_step_` options only affect initialisation.
"""

from collections.abc import Iterator
from typing import Any

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import linear
from linrec.convert.layout import TAPS, Piece, same
from linrec.convert.mamba2 import backbone
from linrec.models import ModelConfig

__all__ = ["config", "layout", "mixer"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("silu", "swish"))
    d_model = options.read("hidden_size", int)
    d_inner = options.read("intermediate_size", int, options.read("expand", int) * d_model)
    if d_model < 1 or d_inner % d_model:
        raise ConversionError(
            f"{options.path}: `intermediate_size` must be a multiple of `hidden_size` = {d_model}; got "
            f"{d_inner}."
        )
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=options.read("num_hidden_layers", int),
        mixer="mamba",
        mixer_args={
            "expand": d_inner // d_model,
            "d_state": options.read("state_size", int),
            "dt_rank": options.read("time_step_rank", int),
            "conv_size": options.read("conv_kernel", int),
            "conv_bias": options.read("use_conv_bias", bool),
            "bias": options.read("use_bias", bool),
        },
        channel_mixing="none",
        norm="rms",
        norm_eps=options.read("layer_norm_epsilon", float),
        # transformers omits options at their default values from config.json
        tie_embeddings=options.read("tie_word_embeddings", bool, True),
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    yield from backbone(config, mixer)


def mixer(
    d_model: int,
    *,
    expand: int,
    d_state: int,
    dt_rank: int,
    conv_size: int,
    conv_bias: bool,
    bias: bool,
    **_: Any,
) -> Iterator[Piece]:
    """Yield the pieces of a mixer, given its arguments; the names are the same in all released code."""
    d_inner = expand * d_model
    yield from linear("in_proj", "xz", 2 * d_inner, d_model, bias=bias)
    yield same("conv1d.weight", "conv.weight", d_inner, 1, conv_size, changes=[TAPS])
    if conv_bias:
        yield same("conv1d.bias", "conv.bias", d_inner)
    yield from linear("x_proj", "dtBC", dt_rank + 2 * d_state, d_inner)
    yield from linear("dt_proj", "W_dt", d_inner, dt_rank, bias=True)
    yield same("A_log", "A_log", d_inner, d_state)
    yield same("D", "D", d_inner)
    yield from linear("out_proj", "out", d_model, d_inner, bias=bias)
