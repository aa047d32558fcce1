"""Falcon-H1, as in `FalconH1ForCausalLM` of transformers: attention and Mamba-2 side by side.

The released code multiplies inputs, projections and outputs by constants. `embedding_scale` has the constant
of the embedding, and the weights contain the others. The norm before the head has the constant of the logits,
because a head may be tied. `mamba_chunk_size` affects speed only, and `attn_layer_indices` and
`mamba_use_mlp` are unused.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from linrec.convert.bamba import NAMES, mamba2_arguments
from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.decoder import config_of, layout_of
from linrec.convert.layers import attention, attention_arguments, multiplier, swiglu, whole_rotary
from linrec.convert.layout import Piece, multiplied, within
from linrec.convert.mamba2 import mixer
from linrec.models import ModelConfig

__all__ = ["config", "layout"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("silu", "swish"))
    d_model = options.read("hidden_size", int)
    d_inner = options.read("mamba_d_ssm", int, options.read("mamba_expand", int, 2) * d_model)
    heads = attention_arguments(options, d_model) | whole_rotary(options)
    memory = mamba2_arguments(options, d_inner) | {
        "output_bias": options.read("projectors_bias", bool, False),
        "output_norm": "rms" if options.read("mamba_rms_norm", bool, False) else "none",
        "norm_before_gate": options.read("mamba_norm_before_gate", bool, True),
    }
    return config_of(
        options,
        "falcon_h1",
        {"attention": heads, "mamba2": memory},
        channel_mixing_bias=options.read("mlp_bias", bool, False),
        embedding_scale=multiplier(options, "embedding_multiplier"),
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model, arguments = config.d_model, config.mixer_args
    attended = dataclasses.replace(config, mixer="attention", mixer_args=arguments["attention"])
    given, key = multiplier(options, "attention_in_multiplier"), multiplier(options, "key_multiplier")
    of_attention = {
        **{f"{name}.weight": given for name in ("q_proj", "v_proj")},
        **{"k_proj.weight": given * key, "k_proj.bias": key},
        "o_proj": multiplier(options, "attention_out_multiplier"),
    }
    projected = _of_projection(options, **arguments["mamba2"])
    of_mamba2: dict[str, float | Tensor] = {
        "in_proj.weight": projected[:, None] * multiplier(options, "ssm_in_multiplier"),
        "in_proj.bias": projected,
        "out_proj": multiplier(options, "ssm_out_multiplier"),
    }
    of_mlp = dict(zip(("gate_proj", "down_proj"), _multipliers(options, "mlp_multipliers", 2), strict=True))

    def pieces(layer: int) -> tuple[str, Iterator[Piece]]:
        heads = multiplied(attention(attended, layer), of_attention)
        memory = multiplied(mixer(d_model, **arguments["mamba2"]), of_mamba2)
        of_both = (within("self_attn.", "attention.", heads), within("mamba.", "mamba2.", memory))
        return "", itertools.chain(*of_both)

    def unit(config: ModelConfig) -> Iterator[Piece]:
        return multiplied(swiglu(config), of_mlp)

    logits = multiplier(options, "lm_head_multiplier")
    return multiplied(layout_of(config, pieces, unit, NAMES), {"model.final_layernorm": logits})


def _of_projection(
    options: Options, d_inner: int, n_heads: int, d_state: int, n_groups: int, **_: object
) -> Tensor:
    """Return the factors of the rows of Mamba-2's input projection."""
    factors = _multipliers(options, "ssm_multipliers", 5)
    # z, X, B, C and dt
    sizes = [d_inner, d_inner, n_groups * d_state, n_groups * d_state, n_heads]
    return torch.tensor(factors).repeat_interleave(torch.tensor(sizes))


def _multipliers(options: Options, name: str, count: int) -> list[float]:
    """Return an option that is a list of multipliers; ones if it is missing."""
    found = options.read(name, list, [1.0] * count)
    if len(found) != count:
        raise ConversionError(f"{options.path}: `{name}` must be {count} numbers; got {found}.")
    return [multiplier(Options({name: factor}, options.path), name) for factor in found]
