"""MiniMax with a single expert, as in `MiniMaxForCausalLM` of transformers: lightning and softmax attention.

Each sublayer adds its input, which is normalised, and its output, with two factors; the norm of the next
sublayer follows. So norms stand after the skip connections here, and the first norm is the embedding's. A
norm does not notice a factor on both terms, but for its eps, so the output projection takes the ratio of the
two factors. The router of a single expert has no effect, and is written as zeros.
"""

from collections.abc import Iterator

import torch

from linrec.convert.checkpoint import Options
from linrec.convert.decoder import config_of
from linrec.convert.layers import (
    attention,
    attention_arguments,
    check_dense,
    layer_types,
    linear,
    multiplier,
    positive,
    swiglu,
    vocabulary,
    whole_rotary,
)
from linrec.convert.layout import Part, Piece, constants, grouped, multiplied, rows, same, within
from linrec.models import ModelConfig

__all__ = ["config", "layout", "lightning"]

MIXERS = {"linear_attention": "lightning_attention", "full_attention": "attention"}
# options of the factors of the input and of the output, by sublayer
FACTORS = {"lightning_attention": "linear_attn", "attention": "full_attn", "mlp": "mlp"}
# of the released code, for all models
LIGHTNING_EPS = 1e-6
# projections of an expert, by names in the model
SWIGLU = {"gate": "w1", "up": "w3", "down": "w2"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    check_dense(options, "num_local_experts", options.read("num_local_experts", int))
    options.supported("num_experts_per_tok", (1,), 1)
    options.supported("hidden_act", ("silu",))
    pattern = layer_types(options, MIXERS)
    d_model = options.read("hidden_size", int)
    softmax = attention_arguments(options, d_model)
    window = positive(options, "sliding_window") if "sliding_window" in options else None
    arguments = {
        "attention": softmax | whole_rotary(options, refuse_share=True) | {"window": window},
        "lightning_attention": {
            "n_heads": softmax["n_heads"],
            "d_head": softmax["d_head"],
            "norm_eps": LIGHTNING_EPS,
        },
    }
    return config_of(
        options,
        pattern,
        arguments,
        norm_position="post",
        final_norm=False,
        embedding_norm=True,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model = config.d_model
    yield from vocabulary(config)
    after = "embedding_norm"
    for layer in range(config.n_layers):
        name, arguments = config.mixer_of(layer)
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        yield same(f"{theirs}input_layernorm.weight", f"{after}.weight", d_model)
        yield same(f"{theirs}post_attention_layernorm.weight", f"{ours}mixer_norm.weight", d_model)
        after = f"{ours}channel_mixing_norm"
        if name == "attention":
            pieces = attention(config, layer)
        else:
            pieces = lightning(d_model, arguments["n_heads"], arguments["d_head"])
            decays = _decays(arguments["n_heads"], options.read("block_size", int))
            yield from within(f"{theirs}self_attn.", "", [decays])
        ratio = _ratio(options, name)
        pieces = multiplied(pieces, {"o_proj": ratio, "out_proj": ratio})
        yield from within(f"{theirs}self_attn.", f"{ours}mixer.", pieces)
        mlp = f"{theirs}block_sparse_moe."
        yield Piece(
            {f"{mlp}gate.weight": (1, d_model)}, [], lambda _: [], lambda _: [torch.zeros(1, d_model)]
        )
        unit = multiplied(swiglu(config, SWIGLU), {SWIGLU["down"]: _ratio(options, "mlp")})
        yield from within(f"{mlp}experts.0.", f"{ours}channel_mixing.", unit)
    yield same("model.norm.weight", f"{after}.weight", d_model)


def lightning(d_model: int, n_heads: int, d_head: int) -> Iterator[Piece]:
    """Yield the pieces of one layer of lightning attention.

    Args:
        d_model: width of the model.
        n_heads: heads of the mixer.
        d_head: channels of a head.
    """
    width = n_heads * d_head
    parts = [Part(f"{name}.weight", width) for name in "qkv"]
    yield rows("qkv_proj.weight", parts, d_model, order=[grouped(n_heads, [d_head] * 3)])
    yield same("norm.weight", "norm.weight", width)
    yield from linear("output_gate", "gate", width, d_model)
    yield from linear("out_proj", "out", d_model, width)


def _decays(n_heads: int, block: int) -> Piece:
    """Return the piece of the constants of one layer of lightning attention, for blocks of a length."""
    return constants(
        {
            "slope_rate": (n_heads, 1, 1),
            "query_decay": (n_heads, block, 1),
            "key_decay": (n_heads, block, 1),
            "diagonal_decay": (1, n_heads, block, block),
        }
    )


def _ratio(options: Options, sublayer: str) -> float:
    """Return the factor of a sublayer's output over the factor of its input."""
    names = [f"{FACTORS[sublayer]}_{name}_factor" for name in ("beta", "alpha")]
    output, given = (multiplier(options, name) for name in names)
    return output / given
