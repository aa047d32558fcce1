"""Jamba without experts, as in `JambaForCausalLM` of transformers: layers of Mamba, and a few of attention.

s, B and C of Mamba have norms with weights, and attention has no positions. Options of kernels affect speed
only, and options of experts have no effect without experts.
"""

import math
from collections.abc import Iterator
from typing import Any

from linrec.convert.bamba import NAMES
from linrec.convert.checkpoint import Options
from linrec.convert.decoder import config_of, layout_of
from linrec.convert.layers import attention, attention_arguments, check_dense, swiglu
from linrec.convert.layout import Piece, same
from linrec.convert.mamba import mixer
from linrec.models import ModelConfig

__all__ = ["config", "layout"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("silu", "swish"))
    experts = options.read("num_experts", int, options.read("num_local_experts", int, 16))
    check_dense(options, "num_experts", experts)
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    period, offset = options.read("attn_layer_period", int), options.read("attn_layer_offset", int)
    rank = options.read("mamba_dt_rank", int, math.ceil(d_model / 16))
    eps = options.read("rms_norm_eps", float)
    arguments = {
        "attention": {**attention_arguments(options, d_model), "positions": "none"},
        "mamba": {
            "expand": options.read("mamba_expand", int),
            "d_state": options.read("mamba_d_state", int),
            "dt_rank": rank,
            "conv_size": options.read("mamba_d_conv", int),
            "conv_bias": options.read("mamba_conv_bias", bool),
            "bias": options.read("mamba_proj_bias", bool),
            "inner_norm": "rms_weight",
            "norm_eps": eps,
        },
    }
    pattern = tuple("attention" if layer % period == offset else "mamba" for layer in range(n_layers))
    return config_of(options, pattern, arguments)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""

    def pieces(layer: int) -> tuple[str, Iterator[Piece]]:
        name, arguments = config.mixer_of(layer)
        if name == "attention":
            return "self_attn.", attention(config, layer)
        return "mamba.", _mamba(config.d_model, **arguments)

    return layout_of(config, pieces, swiglu, NAMES)


def _mamba(d_model: int, **arguments: Any) -> Iterator[Piece]:
    """Yield the pieces of one layer of Mamba."""
    yield from mixer(d_model, **arguments)
    for ours, theirs in {"dt": "dt_layernorm", "B": "b_layernorm", "C": "c_layernorm"}.items():
        width = arguments["dt_rank"] if ours == "dt" else arguments["d_state"]
        yield same(f"{theirs}.weight", f"norms.{ours}.weight", width)
