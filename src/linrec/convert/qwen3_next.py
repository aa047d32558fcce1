"""Dense models of Qwen3-Next, as in `Qwen3NextForCausalLM` of transformers.

Most layers are Gated DeltaNet, and the others are attention with an output gate. Norms store their weight
minus 1, except the norm of the heads of Gated DeltaNet. The released layer divides q by the square root of
its number of channels; the norm undoes the division up to its eps, so `norm_eps` here is multiplied by the
number of channels. The rows of the projections are stored head by head.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.decoder import config_of, layout_of
from linrec.convert.layers import (
    ATTENTION,
    attention,
    attention_arguments,
    check_dense,
    layer_types,
    linear,
    positive,
    rotary,
    swiglu,
    turned,
)
from linrec.convert.layout import PLUS_ONE, TAPS, Part, Piece, grouped, pairs, rows, same
from linrec.models import ModelConfig

__all__ = ["blocks", "config", "delta_arguments", "layout", "recurrent", "text_config"]

# eps of the released code, which is added to the squared norm of q and k
QK_EPS = 1e-6
MIXERS = {"linear_attention": "gated_delta_net", "full_attention": "attention"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    n_layers, dense = options.read("num_hidden_layers", int), options.read("mlp_only_layers", list, [])
    experts, every = options.read("num_experts", int, 512), positive(options, "decoder_sparse_step", 1)
    if any((layer + 1) % every == 0 and layer not in dense for layer in range(n_layers)):
        check_dense(options, "num_experts", experts, most=0)
    return text_config(options)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    return blocks(config, _projections)


def text_config(options: Options) -> ModelConfig:
    """Return the configuration of a dense model."""
    options.supported("hidden_act", ("silu",))
    n_layers, every = options.read("num_hidden_layers", int), positive(options, "full_attention_interval", 4)
    usual = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(n_layers)]
    pattern = layer_types(options, MIXERS, usual)
    d_model, eps = options.read("hidden_size", int), options.read("rms_norm_eps", float)
    arguments = {
        "attention": {
            **attention_arguments(options, d_model),
            "d_head": options.read("head_dim", int, 256),
            **rotary(options, options.read("partial_rotary_factor", float, 0.25)),
            "qk_norm": "head",
            "qk_norm_eps": eps,
            "output_gate": True,
        },
        "gated_delta_net": delta_arguments(options, eps),
    }
    return config_of(options, pattern, arguments)


def delta_arguments(options: Options, eps: float) -> dict[str, Any]:
    """Return the arguments of Gated DeltaNet.

    Args:
        options: the options.
        eps: of the norm of the heads.
    """
    qk_heads = positive(options, "linear_num_key_heads")
    n_heads = positive(options, "linear_num_value_heads")
    d_key = options.read("linear_key_head_dim", int)
    if n_heads % qk_heads:
        raise ConversionError(
            f"{options.path}: `linear_num_value_heads` must be a multiple of `linear_num_key_heads` = "
            f"{qk_heads}; got {n_heads}."
        )
    return {
        "n_heads": n_heads,
        "qk_heads": qk_heads,
        "d_qk": qk_heads * d_key,
        "d_v": n_heads * options.read("linear_value_head_dim", int),
        "qk_eps": QK_EPS,
        "conv_size": options.read("linear_conv_kernel_dim", int),
        "norm_eps": eps * d_key,
    }


def blocks(config: ModelConfig, projections: Any) -> Iterator[Piece]:
    """Yield the pieces of a dense model.

    Args:
        config: configuration of the model.
        projections: yields the pieces of the input projections of Gated DeltaNet, given the width and the
            mixer's arguments.
    """

    def pieces(layer: int) -> tuple[str, Iterable[Piece]]:
        name, arguments = config.mixer_of(layer)
        if name == "attention":
            return "self_attn.", _attention(config, layer)
        taps = 2 * arguments["d_qk"] + arguments["d_v"], 1, arguments["conv_size"]
        return "linear_attn.", [
            *projections(config.d_model, **arguments),
            same("conv1d.weight", "conv.weight", *taps, changes=[TAPS]),
            *recurrent("norm", "out_proj", config.d_model, **arguments),
        ]

    return layout_of(config, pieces, swiglu, norm_changes=[PLUS_ONE])


def recurrent(norm: str, out: str, d_model: int, *, n_heads: int, d_v: int, **_: Any) -> Iterator[Piece]:
    """Yield the pieces of Gated DeltaNet after its convolution.

    Args:
        norm: name of the norm in the checkpoint.
        out: name of the output projection.
        d_model: width of the model.
        n_heads: heads of the mixer.
        d_v: width of v over all heads.
    """
    yield same("A_log", "A_log", n_heads)
    yield same("dt_bias", "dt_bias", n_heads)
    yield same(f"{norm}.weight", "norm.weight", d_v // n_heads)
    yield from linear(out, "out", d_model, d_v)


def _projections(
    d_model: int, *, n_heads: int, qk_heads: int, d_qk: int, d_v: int, **_: Any
) -> Iterator[Piece]:
    """Yield the pieces of the input projections, whose rows are stored for each head of keys."""
    d_key, shared, d_value = d_qk // qk_heads, n_heads // qk_heads, d_v // qk_heads
    sizes = [d_key, d_key, d_value, d_value]
    parts = [Part("q.weight", d_qk), Part("k.weight", d_qk), Part("v.weight", d_v), Part("gate.weight", d_v)]
    yield rows("in_proj_qkvz.weight", parts, d_model, order=[grouped(qk_heads, sizes)])
    parts = [Part("beta.projection.weight", n_heads), Part("alpha.weight", n_heads)]
    yield rows("in_proj_ba.weight", parts, d_model, order=[grouped(qk_heads, [shared, shared])])


def _attention(config: ModelConfig, layer: int) -> Iterator[Piece]:
    """Yield the pieces of one layer of attention, whose queries and gates are stored head by head."""
    _, arguments = config.mixer_of(layer)
    n_heads, d_head = arguments["n_heads"], arguments["d_head"]
    turns = pairs(n_heads, turned(d_head, arguments))
    order, width = grouped(n_heads, [d_head, d_head]), n_heads * d_head
    for kind, columns in (("weight", [config.d_model]), ("bias", [])):
        if kind == "weight" or arguments["bias"]:
            parts = [Part(f"q.{kind}", width, [turns]), Part(f"gate.{kind}", width)]
            yield rows(f"q_proj.{kind}", parts, *columns, order=[order])
    others = {ours: theirs for ours, theirs in ATTENTION.items() if ours != "q"}
    yield from attention(config, layer, names=others, norm_changes=[PLUS_ONE])
