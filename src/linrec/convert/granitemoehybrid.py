"""Granite 4 without experts, as in `GraniteMoeHybridForCausalLM` of transformers: Mamba-2 and attention.

The released code multiplies the embedding, the scores of attention, the outputs of the layers and the logits
by constants. `embedding_scale` has the first constant, and the weights contain the others. The norm before
the head has the constant of the logits, because a head may be tied. Without `num_local_experts`,
`intermediate_size` and the options of the router are unused. `mamba_chunk_size` affects speed only.
"""

import math
from collections.abc import Iterator

from linrec.convert.bamba import attention_arguments, mamba2_arguments, rotary
from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import attention, multiplier, vocabulary
from linrec.convert.layout import Part, Piece, multiplied, rows, same, scaled, within
from linrec.convert.mamba2 import mixer
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

# the second two are the names before 2026
_MIXERS = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",
    "attention": "attention",
}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    options.supported("hidden_act", ("silu", "swish"))
    experts = options.read("num_local_experts", int, 8)
    if experts:
        raise ConversionError(
            f"{options.path}: `num_local_experts` is {experts}; linrec has no mixture of experts."
        )
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    turned = options.read("position_embedding_type", str, "none") == "rope"
    arguments = {
        "attention": attention_arguments(options, d_model)
        | ({"rotary_base": rotary(options)["rotary_base"]} if turned else {"positions": "none"}),
        "mamba2": mamba2_arguments(options, options.read("mamba_expand", int) * d_model),
    }
    pattern = _pattern(options, n_layers)
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=n_layers,
        mixer=pattern,
        mixer_args={name: arguments[name] for name in pattern},
        d_channel_mixing=options.read("shared_intermediate_size", int),
        channel_mixing="swiglu",
        channel_mixing_bias=False,
        norm="rms",
        norm_eps=options.read("rms_norm_eps", float),
        embedding_scale=multiplier(options, "embedding_multiplier"),
        tie_embeddings=options.read("tie_word_embeddings", bool, False),
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    residual = multiplier(options, "residual_multiplier")
    logits = scaled(1 / multiplier(options, "logits_scaling"))
    yield from vocabulary(config)
    yield same("model.norm.weight", "norm.weight", d_model, changes=[logits])
    for layer in range(config.n_layers):
        name, arguments = config.mixer_of(layer)
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        yield same(f"{theirs}input_layernorm.weight", f"{ours}mixer_norm.weight", d_model)
        yield same(f"{theirs}post_attention_layernorm.weight", f"{ours}channel_mixing_norm.weight", d_model)
        if name == "attention":
            # linrec divides the scores by the square root of the channels
            scores = multiplier(options, "attention_multiplier") * math.sqrt(arguments["d_head"])
            pieces = multiplied(attention(config, layer), {"q_proj": scores, "o_proj": residual})
            yield from within(f"{theirs}self_attn.", f"{ours}mixer.", pieces)
        else:
            pieces = multiplied(mixer(d_model, **arguments), {"out_proj": residual})
            yield from within(f"{theirs}mamba.", f"{ours}mixer.", pieces)
        first = [Part("gate.weight", d_hidden), Part("up.weight", d_hidden)]
        last = same("output_linear.weight", "down.weight", d_model, d_hidden, changes=[scaled(residual)])
        unit = [rows("input_linear.weight", first, d_model), last]
        yield from within(f"{theirs}shared_mlp.", f"{ours}channel_mixing.", unit)


def _pattern(options: Options, n_layers: int) -> tuple[str, ...]:
    """Return the names of the mixers; without `layer_types`, all layers are Mamba-2."""
    name = "layer_types" if "layer_types" in options else "layers_block_type"
    types = options.read(name, list, ["mamba"] * n_layers)
    if len(types) != n_layers or not set(types) <= _MIXERS.keys():
        raise ConversionError(
            f"{options.path}: `{name}` must be a list of 'mamba' and 'attention' for {n_layers} layers; "
            f"got {types}."
        )
    return tuple(_MIXERS[kind] for kind in types)
