"""RecurrentGemma, the released Griffin, as in `RecurrentGemmaForCausalLM` of transformers.

In transformers, norms store their weight minus 1, `intermediate_size` is twice the width of the channel
mixing, and Lambda has the opposite sign. The embedding is multiplied by the square root of the width, rounded
to bfloat16 in every precision. Rotary pairs are adjacent channels in linrec. In transformers, a pair is
channel j of the first half and channel j of the second half of the rotated channels. Options of
initialisation and of the cache do not affect a trained model.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import attention, linear, rotary, swiglu, vocabulary
from linrec.convert.layout import MINUS, PLUS_ONE, TAPS, TRANSPOSED, Piece, flat, same, within
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

_MIXERS = {"recurrent": "hawk", "attention": "attention"}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    activation = _ACTIVATIONS[options.supported("hidden_activation", tuple(_ACTIVATIONS))]
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    n_heads = options.read("num_attention_heads", int)
    d_rnn = options.read("lru_width", int, d_model)
    for name, width in (("hidden_size", d_model), ("lru_width", d_rnn)):
        if n_heads < 1 or width < 1 or width % n_heads:
            raise ConversionError(
                f"{options.path}: `{name}` must be a positive multiple of `num_attention_heads` = {n_heads}; "
                f"got {width}."
            )
    arguments = {
        "hawk": {
            "variant": "released",
            "d_rnn": d_rnn,
            "n_blocks": n_heads,
            "conv_size": options.read("conv1d_width", int),
            "activation": activation,
        },
        "attention": {
            "n_heads": n_heads,
            "d_head": options.read("head_dim", int, d_model // n_heads),
            "kv_heads": options.read("num_key_value_heads", int, n_heads),
            "bias": options.read("attention_bias", bool, False),
            "output_bias": True,
            "window": options.read("attention_window_size", int),
            "dropout": options.read("attention_dropout", float, 0.0),
            **rotary(options, options.read("partial_rotary_factor", float, 0.5)),
        },
    }
    pattern = _pattern(options)[:n_layers]
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=n_layers,
        mixer=pattern,
        mixer_args={name: arguments[name] for name in pattern},
        d_channel_mixing=options.read("intermediate_size", int) // 2,
        channel_mixing="geglu_tanh" if activation == "gelu_tanh" else "geglu",
        norm="rms",
        norm_eps=options.read("rms_norm_eps", float),
        embedding_scale=float(torch.tensor(math.sqrt(d_model), dtype=torch.bfloat16)),
        tie_embeddings=options.read("tie_word_embeddings", bool, True),
        head_bias=False,
        logit_cap=options.read("logits_soft_cap", float),
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model = config.d_model
    yield from vocabulary(config)
    yield same("model.final_norm.weight", "norm.weight", d_model, changes=[PLUS_ONE])
    for layer in range(config.n_layers):
        name, arguments = config.mixer_of(layer)
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        for norm, place in (("mixer_norm", "temporal_pre_norm"), ("channel_mixing_norm", "channel_pre_norm")):
            yield same(f"{theirs}{place}.weight", f"{ours}{norm}.weight", d_model, changes=[PLUS_ONE])
        mixer = _hawk(d_model, **arguments) if name == "hawk" else attention(config, layer)
        yield from within(theirs + "temporal_block.", ours + "mixer.", mixer)
        yield from within(theirs + "mlp_block.", ours + "channel_mixing.", swiglu(config))


def _pattern(options: Options) -> tuple[str, ...]:
    """Return the pattern of mixer names, which repeats over depth."""
    types = options.read("block_types", list)
    unknown = [kind for kind in types if kind not in _MIXERS]
    if unknown or not types:
        raise ConversionError(
            f"{options.path}: `block_types` must be a list of 'recurrent' and 'attention'; "
            f"got {str(types)[:80]}."
        )
    return tuple(_MIXERS[kind] for kind in types)


def _hawk(d_model: int, d_rnn: int, n_blocks: int, conv_size: int, **_: Any) -> Iterator[Piece]:
    """Yield the pieces of one recurrent mixer."""
    size = d_rnn // n_blocks
    # the released code multiplies by the blocks from the right
    yield same("conv_1d.weight", "conv.weight", d_rnn, 1, conv_size, changes=[TAPS])
    yield same("conv_1d.bias", "conv.bias", d_rnn)
    yield same("rg_lru.recurrent_param", "rg_lru.Lambda", d_rnn, changes=[MINUS])
    for ours, theirs in (("recurrence_gate", "recurrent_gate"), ("input_gate", "input_gate")):
        place = f"rg_lru.{ours}"
        yield same(f"rg_lru.{theirs}_weight", f"{place}.weight", n_blocks, size, size, changes=[TRANSPOSED])
        yield same(f"rg_lru.{theirs}_bias", f"{place}.bias", n_blocks, size, changes=[flat(n_blocks)])
    for ours, theirs in (("gate", "linear_y"), ("u", "linear_x"), ("out", "linear_out")):
        sizes = (d_model, d_rnn) if ours == "out" else (d_rnn, d_model)
        yield from linear(theirs, ours, *sizes, bias=True)
