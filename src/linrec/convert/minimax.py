"""MiniMax with a single expert, as in `MiniMaxForCausalLM` of transformers: lightning and softmax attention.

Each sublayer adds its input, which is normalised, and its output, with two factors; the norm of the next
sublayer follows. So norms stand after the skip connections here, and the first norm is the embedding's. A
norm does not notice a factor on both terms, but for its eps, so the output projection takes the ratio of the
two factors. The router of a single expert has no effect, and is written as zeros.
"""

from collections.abc import Iterator

import torch

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.decoder import config_of
from linrec.convert.layers import (
    attention,
    attention_arguments,
    check_dense,
    layer_types,
    linear,
    rotary,
    swiglu,
    vocabulary,
)
from linrec.convert.layout import Change, Part, Piece, constants, grouped, rows, same, scaled, within
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
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value, or there are several experts.
    """
    check_dense(options, "num_local_experts", options.read("num_local_experts", int))
    options.supported("hidden_act", ("silu",))
    pattern = layer_types(options, MIXERS)
    d_model = options.read("hidden_size", int)
    softmax = attention_arguments(options, d_model)
    arguments = {
        "attention": softmax | rotary(options),
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
        ratio = _ratio(options, name)
        if name == "attention":
            pieces = attention(config, layer, changes={"out": [ratio]})
        else:
            pieces = lightning(d_model, arguments["n_heads"], arguments["d_head"], ratio)
            decays = _decays(arguments["n_heads"], options.read("block_size", int))
            yield from within(f"{theirs}self_attn.", "", [decays])
        yield from within(f"{theirs}self_attn.", f"{ours}mixer.", pieces)
        mlp, change = f"{theirs}block_sparse_moe.", {"down": [_ratio(options, "mlp")]}
        yield Piece({f"{mlp}gate.weight": (1, d_model)}, [], _nothing, lambda _: [torch.zeros(1, d_model)])
        yield from within(f"{mlp}experts.0.", f"{ours}channel_mixing.", swiglu(config, SWIGLU, change))
    yield same("model.norm.weight", f"{after}.weight", d_model)


def lightning(d_model: int, n_heads: int, d_head: int, ratio: Change) -> Iterator[Piece]:
    """Yield the pieces of one layer of lightning attention.

    Args:
        d_model: width of the model.
        n_heads: heads of the mixer.
        d_head: channels of a head.
        ratio: change of the output projection.
    """
    width = n_heads * d_head
    parts = [Part(f"{name}.weight", width) for name in "qkv"]
    yield rows("qkv_proj.weight", parts, d_model, order=[grouped(n_heads, [d_head] * 3)])
    yield same("norm.weight", "norm.weight", width)
    yield from linear("output_gate", "gate", width, d_model)
    yield from linear("out_proj", "out", d_model, width, changes=[ratio])


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


def _ratio(options: Options, sublayer: str) -> Change:
    """Return the change of an output projection by the ratio of the factors of output and input."""
    prefix = FACTORS[sublayer]
    factors = [options.read(f"{prefix}_{name}_factor", float) for name in ("alpha", "beta")]
    for factor in factors:
        if not factor > 0:
            raise ConversionError(
                f"{options.path}: the factors of `{prefix}` must be above 0; got {factors}."
            )
    return scaled(factors[1] / factors[0])


def _nothing(tensors: object) -> list[torch.Tensor]:
    return []
