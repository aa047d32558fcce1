"""Nemotron-H without experts, as in `NemotronHForCausalLM` of transformers: Mamba-2, attention and MLPs.

A layer of the released code is a single sublayer with its norm. A block of linrec is a layer of Mamba-2 or
attention, and the MLP that follows it, if any. Attention has no positions and no biases.

transformers ignores `time_step_limit`: its steps are at least `time_step_min`. It also ignores
`attention_bias`, `sliding_window`, `expand`, `mamba_proj_bias`, and `tie_word_embeddings`: the head has its
own weight. The options of experts are unused. `residual_in_fp32` and `chunk_size` affect precision and speed
only, and `rescale_prenorm_residual` and the other `time_step_` options initialisation.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import attention, swiglu, vocabulary
from linrec.convert.layout import Piece, same, within
from linrec.convert.mamba2 import mixer
from linrec.models import ModelConfig
from linrec.nn.channel_mixing import ChannelMixing

__all__ = ["config", "layout"]

# kinds of layers by letter of `hybrid_override_pattern`, and by name, of which some are older
_KINDS = {
    **{"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"},
    **{"linear_attention": "mamba2", "full_attention": "attention", "mlp": "mlp", "moe": "moe"},
    **{"mamba": "mamba2", "attention": "attention"},
}
_MLP = {"up": "up_proj", "down": "down_proj"}


class _Block(NamedTuple):
    """The mixer of a block, and the positions of the layers of the mixer and of the MLP."""

    mixer: str
    at: int
    mlp: int | None = None


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("mamba_hidden_act", ("silu", "swish"), "silu")
    options.supported("mlp_hidden_act", ("relu2",), "relu2")
    d_model, n_heads = options.read("hidden_size", int), options.read("num_attention_heads", int)
    mamba2_heads = options.read("mamba_num_heads", int)
    norm_eps = options.read("layer_norm_epsilon", float)
    arguments = {
        "attention": {
            "n_heads": n_heads,
            # the second name is that of checkpoints before 2026
            "d_head": options.read("head_dim", int, options.read("attention_head_dim", int, 128)),
            "kv_heads": options.read("num_key_value_heads", int, n_heads),
            "positions": "none",
            "dropout": options.read("attention_dropout", float, 0.0),
        },
        "mamba2": {
            "d_inner": mamba2_heads * options.read("mamba_head_dim", int),
            "n_heads": mamba2_heads,
            "d_state": options.read("ssm_state_size", int),
            "n_groups": options.read("n_groups", int),
            "conv_size": options.read("conv_kernel", int),
            "conv_bias": options.read("use_conv_bias", bool),
            "bias": options.read("use_bias", bool),
            "norm_eps": norm_eps,
            "dt_limit": (options.read("time_step_min", float), math.inf),
        },
    }
    blocks = _blocks(options)
    mixed: list[ChannelMixing] = ["none" if block.mlp is None else "squared_relu" for block in blocks]
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=len(blocks),
        mixer=tuple(block.mixer for block in blocks),
        mixer_args={block.mixer: arguments[block.mixer] for block in blocks},
        d_channel_mixing=options.read("intermediate_size", int),
        channel_mixing=tuple(mixed),
        channel_mixing_bias=options.read("mlp_bias", bool, False),
        norm="rms",
        norm_eps=norm_eps,
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model = config.d_model
    yield from vocabulary(config, "backbone.embeddings.weight")
    yield same("backbone.norm_f.weight", "norm.weight", d_model)
    for layer, block in enumerate(_blocks(options)):
        name, arguments = config.mixer_of(layer)
        theirs, ours = f"backbone.layers.{block.at}.", f"blocks.{layer}."
        yield same(f"{theirs}norm.weight", f"{ours}mixer_norm.weight", d_model)
        pieces = attention(config, layer) if name == "attention" else mixer(d_model, **arguments)
        yield from within(f"{theirs}mixer.", f"{ours}mixer.", pieces)
        if block.mlp is not None:
            theirs = f"backbone.layers.{block.mlp}."
            yield same(f"{theirs}norm.weight", f"{ours}channel_mixing_norm.weight", d_model)
            yield from within(f"{theirs}mixer.", f"{ours}channel_mixing.", swiglu(config, _MLP))


def _blocks(options: Options) -> list[_Block]:
    """Return the blocks, first block first."""
    named = "layers_block_type" in options
    name = "layers_block_type" if named else "hybrid_override_pattern"
    layers = options.read(name, list) if named else [*options.read(name, str)]
    found: list[_Block] = []
    for position, layer in enumerate(layers):
        kind = _KINDS.get(layer)
        if kind is None:
            raise ConversionError(f"{options.path}: `{name}` has {layer!r}; linrec knows only {[*_KINDS]}.")
        if kind == "moe":
            raise ConversionError(
                f"{options.path}: `{name}` has experts at layer {position}; linrec has no mixtures of "
                "experts."
            )
        if kind != "mlp":
            found.append(_Block(kind, position))
        elif not found or found[-1].mlp is not None:
            raise ConversionError(
                f"{options.path}: `{name}` has an MLP at layer {position} without Mamba-2 or attention right "
                "before it; each block of linrec starts with Mamba-2 or attention."
            )
        else:
            found[-1] = found[-1]._replace(mlp=position)
    return found
