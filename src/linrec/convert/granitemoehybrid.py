"""Granite 4 without experts, as in `GraniteMoeHybridForCausalLM` of transformers: Mamba-2 and attention.

The released code multiplies the embedding, the scores of attention, the outputs of the layers and the logits
by constants. `embedding_scale` has the first constant, and the weights contain the others. The norm before
the head has the constant of the logits, because a head may be tied. Without `num_local_experts`,
`intermediate_size` and the options of the router are unused. `mamba_chunk_size` affects speed only.
"""

import math
from collections.abc import Iterator

from linrec.convert.bamba import mamba2_arguments
from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.decoder import Names, config_of, layout_of
from linrec.convert.layers import attention, attention_arguments, check_dense, multiplier, whole_rotary
from linrec.convert.layout import Part, Piece, multiplied, rows, same
from linrec.convert.mamba2 import mixer
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

NAMES = Names(channel_mixing="shared_mlp")
# the second two are the names before 2026
_MIXERS = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",
    "attention": "attention",
}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("silu", "swish"))
    experts = options.read("num_local_experts", int, 8)
    check_dense(options, "num_local_experts", experts, most=0)
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    turned = options.read("position_embedding_type", str, "none") == "rope"
    arguments = {
        "attention": attention_arguments(options, d_model)
        | (whole_rotary(options) if turned else {"positions": "none"}),
        "mamba2": mamba2_arguments(options, options.read("mamba_expand", int) * d_model),
    }
    pattern = _pattern(options, n_layers)
    return config_of(
        options,
        pattern,
        arguments,
        d_channel_mixing=options.read("shared_intermediate_size", int),
        embedding_scale=multiplier(options, "embedding_multiplier"),
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    residual = multiplier(options, "residual_multiplier")

    def pieces(layer: int) -> tuple[str, Iterator[Piece]]:
        name, arguments = config.mixer_of(layer)
        if name == "attention":
            # linrec divides the scores by the square root of the channels
            scores = multiplier(options, "attention_multiplier") * math.sqrt(arguments["d_head"])
            return "self_attn.", multiplied(attention(config, layer), {"q_proj": scores, "o_proj": residual})
        return "mamba.", multiplied(mixer(config.d_model, **arguments), {"out_proj": residual})

    def unit(config: ModelConfig) -> Iterator[Piece]:
        d_model, d_hidden = config.d_model, config.d_channel_mixing
        first = [Part("gate.weight", d_hidden), Part("up.weight", d_hidden)]
        yield rows("input_linear.weight", first, d_model)
        last = same("output_linear.weight", "down.weight", d_model, d_hidden)
        yield from multiplied([last], {"output_linear": residual})

    logits = 1 / multiplier(options, "logits_scaling")
    return multiplied(layout_of(config, pieces, unit, NAMES), {"model.norm": logits})


def _pattern(options: Options, n_layers: int) -> tuple[str, ...]:
    """Return the names of the mixers; without `layer_types`, all layers are Mamba-2."""
    name = "layer_types" if "layer_types" in options else "layers_block_type"
    types = options.read(name, list, ["mamba"] * n_layers)
    if len(types) != n_layers or not set(types) <= _MIXERS.keys():
        raise ConversionError(
            f"{options.path}: `{name}` must be a list of 'mamba' and 'attention' for {n_layers} layers; "
            f"got {str(types)[:80]}."
        )
    return tuple(_MIXERS[kind] for kind in types)
