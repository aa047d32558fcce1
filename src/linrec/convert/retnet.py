"""RetNet, as in `RetNetForCausalLM` of flash-linear-attention.

The released layer's angles fall from 1 to base^(2 / dk - 1), linrec's from 1 to 1 / base, so another base
gives the same angles. The released layer rotates channel j with channel j + dk / 2; linrec's rotates adjacent
channels.
"""

from collections.abc import Iterator

import torch

from linrec.convert.checkpoint import Options
from linrec.convert.flash_linear_attention import config_of, head_norm, layout_of
from linrec.convert.layers import linear
from linrec.convert.layout import Piece, pairs
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

ROTARY_BASE = 10_000.0


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("expand_k", (1.0,))
    options.supported("feature_map", (None,))
    options.supported("use_short_conv", (False,), False)
    options.supported("elementwise_affine", (True,), True)
    d_model, n_heads = options.read("hidden_size", int), options.read("num_heads", int)
    options.supported("num_kv_heads", (None, n_heads))
    arguments = {
        "n_heads": n_heads,
        "d_v": int(d_model * options.read("expand_v", float)),
        "rotary_base": ROTARY_BASE ** (1 - 2 * n_heads / d_model),
        "output_norm": "rms",
        "norm_eps": options.read("norm_eps", float),
        "output_gate": options.read("use_output_gate", bool, True),
    }
    return config_of(options, "retnet", arguments)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    return layout_of(options, config, _mixer)


def _mixer(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's mixer."""
    arguments, d_model = config.mixer_args, config.d_model
    d_v, n_heads = arguments["d_v"], arguments["n_heads"]
    for name in "qk":
        yield from linear(
            f"{name}_proj", name, d_model, d_model, changes=[pairs(n_heads, d_model // n_heads)]
        )
    yield from linear("v_proj", "v", d_v, d_model)
    if arguments["output_gate"]:
        yield from linear("g_proj", "gate", d_v, d_model)
    norm, other = head_norm(options, arguments["output_gate"])
    # the norm here has no weight: it is folded into the columns of W_O
    yield Piece(
        {norm: (d_v // n_heads,), "o_proj.weight": (d_model, d_v)},
        ["out.weight"],
        lambda tensors: [tensors[1] * tensors[0].repeat(n_heads)],
        lambda out: [torch.ones(d_v // n_heads), out[0]],
        older=[other],
    )
