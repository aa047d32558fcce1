"""Bamba, as in `BambaForCausalLM` of transformers: layers of Mamba-2, and a few layers of attention.

Half of the channels of a head turn, unless the table of rotary positions says otherwise: transformers ignores
a `partial_rotary_factor` outside of the table. `mamba_chunk_size` affects speed only, and
`z_loss_coefficient` training.
"""

from collections.abc import Iterator
from typing import Any

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.decoder import Names, config_of, layout_of
from linrec.convert.layers import attention, attention_arguments, rotary, swiglu
from linrec.convert.layout import Piece
from linrec.convert.mamba2 import dt_limit, mixer
from linrec.models import ModelConfig

__all__ = ["NAMES", "config", "layout", "mamba2_arguments"]

NAMES = Names("input_layernorm", "pre_ff_layernorm", "feed_forward", "final_layernorm")


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("silu", "swish"))
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    attended = options.read("attn_layer_indices", list, [])
    arguments = {
        "attention": attention_arguments(options, d_model) | rotary(options, 0.5),
        "mamba2": mamba2_arguments(options, options.read("mamba_expand", int) * d_model),
    }
    pattern = tuple("attention" if layer in attended else "mamba2" for layer in range(n_layers))
    bias = options.read("mlp_bias", bool, False)
    return config_of(options, pattern, arguments, channel_mixing_bias=bias)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""

    def pieces(layer: int) -> tuple[str, Iterator[Piece]]:
        name, arguments = config.mixer_of(layer)
        if name == "attention":
            return "self_attn.", attention(config, layer)
        return "mamba.", mixer(config.d_model, **arguments)

    return layout_of(config, pieces, swiglu, NAMES)


def mamba2_arguments(options: Options, d_inner: int) -> dict[str, Any]:
    """Return the arguments of Mamba-2, whose options have the prefix "mamba_"."""
    n_heads = options.read("mamba_n_heads", int)
    if n_heads < 1 or d_inner % n_heads:
        raise ConversionError(
            f"{options.path}: `mamba_n_heads` must be a positive divisor of the width {d_inner}; "
            f"got {n_heads}."
        )
    options.supported("mamba_d_head", (d_inner // n_heads, "auto"), "auto")
    return {
        "d_inner": d_inner,
        "n_heads": n_heads,
        "d_state": options.read("mamba_d_state", int),
        "n_groups": options.read("mamba_n_groups", int),
        "conv_size": options.read("mamba_d_conv", int),
        "conv_bias": options.read("mamba_conv_bias", bool, True),
        "bias": options.read("mamba_proj_bias", bool, False),
        "norm_eps": options.read("rms_norm_eps", float),
        "dt_limit": dt_limit(options, "time_step_limit", [0.0, float("inf")]),
    }
