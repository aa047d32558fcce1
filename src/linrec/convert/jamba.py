"""Jamba without experts, as in `JambaForCausalLM` of transformers: layers of Mamba, and a few of attention.

s, B and C of Mamba have norms with weights, and attention has no positions. Options of kernels affect speed
only, and options of experts have no effect without experts.
"""

import math
from collections.abc import Iterator

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import attention, attention_arguments, swiglu, vocabulary
from linrec.convert.layout import Piece, same, within
from linrec.convert.mamba import mixer
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

# names of the norms in the checkpoint, by names in the model
NORMS = {"dt": "dt_layernorm", "B": "b_layernorm", "C": "c_layernorm"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value, or a layer has experts.
    """
    options.supported("hidden_act", ("silu", "swish"))
    experts = options.read("num_experts", int, options.read("num_local_experts", int, 16))
    if experts > 1:
        raise ConversionError(
            f"{options.path}: `num_experts` is {experts}; linrec has no mixtures of experts."
        )
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
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=n_layers,
        mixer=pattern,
        mixer_args={name: arguments[name] for name in pattern},
        d_channel_mixing=options.read("intermediate_size", int),
        channel_mixing="swiglu",
        channel_mixing_bias=False,
        norm="rms",
        norm_eps=eps,
        tie_embeddings=options.read("tie_word_embeddings", bool, False),
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model = config.d_model
    yield from vocabulary(config)
    yield same("model.final_layernorm.weight", "norm.weight", d_model)
    for layer in range(config.n_layers):
        name, arguments = config.mixer_of(layer)
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        yield same(f"{theirs}input_layernorm.weight", f"{ours}mixer_norm.weight", d_model)
        yield same(f"{theirs}pre_ff_layernorm.weight", f"{ours}channel_mixing_norm.weight", d_model)
        if name == "attention":
            yield from within(f"{theirs}self_attn.", f"{ours}mixer.", attention(config, layer))
        else:
            yield from within(f"{theirs}mamba.", f"{ours}mixer.", mixer(d_model, **arguments))
            for part, norm in NORMS.items():
                width = arguments["dt_rank"] if part == "dt" else arguments["d_state"]
                yield same(f"{theirs}mamba.{norm}.weight", f"{ours}mixer.norms.{part}.weight", width)
        yield from within(f"{theirs}feed_forward.", f"{ours}channel_mixing.", swiglu(config))
