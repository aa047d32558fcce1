"""LFM2, as in `Lfm2ForCausalLM` of transformers: gated short convolutions, and layers of attention.

The width of SwiGLU is two thirds of `intermediate_size`, rounded up, unless `block_auto_adjust_ff_dim` is
false. Checkpoints of 2025 spell some options differently.
"""

import functools
from collections.abc import Iterator

from linrec.convert.checkpoint import Options
from linrec.convert.decoder import Names, config_of, layout_of
from linrec.convert.layers import (
    attention,
    attention_arguments,
    layer_types,
    linear,
    swiglu,
    whole_rotary,
)
from linrec.convert.layout import TAPS, Piece, same
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

MIXERS = {"conv": "lfm2", "full_attention": "attention"}
QK_NORMS = {"q": "q_layernorm", "k": "k_layernorm"}
NAMES = Names("operator_norm", "ffn_norm", "feed_forward", "embedding_norm")
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
SWIGLU = {"gate": "w1", "up": "w3", "down": "w2"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    attended = options.read("full_attn_idxs", list, [*range(n_layers)])
    usual = ["full_attention" if layer in attended else "conv" for layer in range(n_layers)]
    pattern, eps = layer_types(options, MIXERS, usual), options.read("norm_eps", float)
    arguments = {
        "attention": {
            **attention_arguments(options, d_model),
            **whole_rotary(options, refuse_share=True),
            "qk_norm": "head",
            "qk_norm_eps": eps,
        },
        "lfm2": {
            "conv_size": options.read("conv_L_cache", int),
            "bias": options.read("conv_bias", bool),
        },
    }
    tied = options.read("tie_embedding", bool, options.read("tie_word_embeddings", bool, True))
    return config_of(
        options,
        pattern,
        arguments,
        d_channel_mixing=_width(options),
        norm_eps=eps,
        tie_embeddings=tied,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""

    def pieces(layer: int) -> tuple[str, Iterator[Piece]]:
        name, arguments = config.mixer_of(layer)
        if name == "attention":
            return "self_attn.", attention(config, layer, names=ATTENTION, norms=QK_NORMS)
        return "conv.", _convolution(config.d_model, **arguments)

    return layout_of(config, pieces, functools.partial(swiglu, names=SWIGLU), NAMES)


def _convolution(d_model: int, *, conv_size: int, bias: bool) -> Iterator[Piece]:
    """Yield the pieces of one gated short convolution."""
    yield from linear("in_proj", "BCv", 3 * d_model, d_model, bias=bias)
    yield same("conv.weight", "conv.weight", d_model, 1, conv_size, changes=[TAPS])
    if bias:
        yield same("conv.bias", "conv.bias", d_model)
    yield from linear("out_proj", "out", d_model, d_model, bias=bias)


def _width(options: Options) -> int:
    """Return the hidden width of SwiGLU."""
    width = options.read("block_ff_dim" if "block_ff_dim" in options else "intermediate_size", int)
    if options.read("block_auto_adjust_ff_dim", bool, True):
        multiple = options.read("block_multiple_of", int)
        width = int(options.read("block_ffn_dim_multiplier", float, 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return width
