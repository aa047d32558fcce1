"""RWKV-6, as in `RWKV6ForCausalLM` of flash-linear-attention.

`linrec.convert.rwkv_lm` reads the layout of the RWKV authors.
"""

from collections.abc import Iterator

import torch

from linrec.convert.checkpoint import Options
from linrec.convert.decoder import Names
from linrec.convert.flash_linear_attention import config_of, layout_of
from linrec.convert.layers import linear
from linrec.convert.layout import Change, Piece, flat, same
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

NAMES = Names("attn_norm", "ffn_norm", "ffn", embedding="embeddings", embedding_norm="pre_norm")


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    for name in ("expand_k", "expand_v"):
        options.supported(name, (1.0,))
    options.supported("hidden_act", ("sqrelu",), "sqrelu")
    for name in ("norm_first", "norm_bias"):
        options.supported(name, (True,), True)
    wide = int(options.read("hidden_size", int) * options.read("hidden_ratio", float, 3.5))
    arguments = {
        "n_heads": options.read("num_heads", int),
        "shift_rank": options.read("proj_low_rank_dim", int),
        "decay_rank": options.read("gate_low_rank_dim", int),
        "norm_eps": options.read("norm_eps", float),
    }
    return config_of(
        options,
        "rwkv6",
        arguments,
        channel_mixing="rwkv",
        # rounded up to a multiple of 32
        d_channel_mixing=options.read("intermediate_size", int, -(-wide // 32) * 32),
        norm="layer",
        embedding_norm=True,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    return layout_of(options, config, _mixer, _channel_mixing, NAMES)


def _mixer(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's mixer."""
    arguments, d_model = config.mixer_args, config.d_model
    rank, decay_rank, n_heads = (arguments[n] for n in ("shift_rank", "decay_rank", "n_heads"))
    # linrec's order of the mixtures, as indices into the checkpoint's order, and back
    order = ["rwkvg".index(z) for z in "rkvwg"]
    back = ["rkvwg".index(z) for z in "rwkvg"]
    A = Change(
        lambda A: A.unflatten(0, (5, rank))[order].flatten(0, 1),
        lambda A: A.unflatten(0, (5, rank))[back].flatten(0, 1),
    )
    B = Change(
        lambda B: B.unflatten(1, (5, rank)).permute(1, 2, 0)[order],
        lambda B: B[back].permute(2, 0, 1).flatten(1),
    )
    yield same("x_proj.0.mu", "shift.mu_x", d_model)
    yield same("x_proj.0.linear.weight", "shift.A.weight", 5 * rank, d_model, changes=[A])
    yield same("x_proj.2.weight", "shift.B", d_model, 5 * rank, changes=[B])
    yield Piece(
        {"x_bias": (5, d_model)},
        [f"shift.mu.{place}" for place in range(5)],
        lambda tensors: [tensors[0][place] for place in order],
        lambda mu: [torch.stack([mu[place] for place in back])],
    )
    yield same("w_proj.linear.lora.0.weight", "d.0.weight", decay_rank, d_model)
    yield same("w_proj.linear.lora.2.weight", "d.2.weight", d_model, decay_rank)
    yield same("w_proj.linear.lora.2.bias", "lambda_d", d_model)
    yield same("bonus", "u", n_heads, d_model // n_heads, changes=[flat(n_heads)])
    for ours, theirs in (("r", "r"), ("k", "k"), ("v", "v"), ("gate", "g")):
        yield from linear(f"{theirs}_proj.linear", ours, d_model, d_model)
    for name in ("weight", "bias"):
        yield same(f"g_norm.{name}", f"norm.{name}", d_model)
    yield from linear("o_proj", "out", d_model, d_model)


def _channel_mixing(config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's channel mixing."""
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    yield same("key.mu", "shift.mu.0", d_model)
    yield same("receptance.mu", "shift.mu.1", d_model)
    yield from linear("key.linear", "k", d_hidden, d_model)
    yield from linear("value", "v", d_model, d_hidden)
    yield from linear("receptance.linear", "r", d_model, d_model)
