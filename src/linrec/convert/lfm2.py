"""LFM2, as in `Lfm2ForCausalLM` of transformers: gated short convolutions, and layers of attention.

The width of SwiGLU is two thirds of `intermediate_size`, rounded up, unless `block_auto_adjust_ff_dim` is
false. Checkpoints of 2025 spell some options differently.
"""

from collections.abc import Iterator

from linrec.convert.checkpoint import Options
from linrec.convert.layers import (
    attention,
    attention_arguments,
    layer_types,
    linear,
    rotary,
    swiglu,
    vocabulary,
)
from linrec.convert.layout import TAPS, Piece, same, within
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

MIXERS = {"conv": "lfm2", "full_attention": "attention"}
QK_NORMS = {"q": "q_layernorm", "k": "k_layernorm"}
SWIGLU = {"gate": "w1", "up": "w3", "down": "w2"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    attended = options.read("full_attn_idxs", list, [*range(n_layers)])
    usual = ["full_attention" if layer in attended else "conv" for layer in range(n_layers)]
    pattern, eps = layer_types(options, MIXERS, usual), options.read("norm_eps", float)
    arguments = {
        "attention": {
            **attention_arguments(options, d_model),
            **rotary(options),
            "qk_norm": "head",
            "qk_norm_eps": eps,
        },
        "lfm2": {
            "conv_size": options.read("conv_L_cache", int),
            "bias": options.read("conv_bias", bool),
        },
    }
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=n_layers,
        mixer=pattern,
        mixer_args={name: arguments[name] for name in pattern},
        d_channel_mixing=_width(options),
        channel_mixing="swiglu",
        channel_mixing_bias=False,
        norm="rms",
        norm_eps=eps,
        tie_embeddings=options.read("tie_embedding", bool, options.read("tie_word_embeddings", bool, True)),
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model = config.d_model
    yield from vocabulary(config)
    yield same("model.embedding_norm.weight", "norm.weight", d_model)
    for layer in range(config.n_layers):
        name, arguments = config.mixer_of(layer)
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        yield same(f"{theirs}operator_norm.weight", f"{ours}mixer_norm.weight", d_model)
        yield same(f"{theirs}ffn_norm.weight", f"{ours}channel_mixing_norm.weight", d_model)
        if name == "attention":
            names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
            pieces = attention(config, layer, names=names, norms=QK_NORMS)
            yield from within(f"{theirs}self_attn.", f"{ours}mixer.", pieces)
        else:
            yield from within(f"{theirs}conv.", f"{ours}mixer.", _convolution(d_model, **arguments))
        yield from within(f"{theirs}feed_forward.", f"{ours}channel_mixing.", swiglu(config, SWIGLU))


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
