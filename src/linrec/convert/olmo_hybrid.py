"""OLMo Hybrid, as in `OlmoHybridForCausalLM` of transformers: Gated DeltaNet and attention.

Norms stand before the sublayers of Gated DeltaNet blocks, and after the sublayers of attention blocks. The
norm of the heads of Gated DeltaNet has an eps of its own. Attention has no positions if `rope_theta` is null;
`partial_rotary_factor` is ignored, as in released code. transformers renames norms when it saves a model, and
then cuts the taps of q, k and v into equal parts; both forms are read, and the published form is written. The
released layer divides q by the square root of its number of channels; the norm undoes the division up to its
eps, so `norm_eps` here is multiplied by the number of channels. Options of initialisation do not affect a
trained model.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from linrec.convert.checkpoint import Options
from linrec.convert.decoder import config_of
from linrec.convert.layers import (
    attention,
    attention_arguments,
    layer_types,
    linear,
    rotary_table,
    stacked_taps,
    swiglu,
    vocabulary,
    whole_rotary,
)
from linrec.convert.layout import Piece, same, within
from linrec.convert.qwen3_next import MIXERS, delta_arguments, recurrent
from linrec.models import ModelConfig
from linrec.models.block import NormPosition

__all__ = ["config", "layout"]

HEAD_NORM_EPS = 1e-5
# the position of the norms of each kind of block; their published names, and the names by transformers
NORM_POSITIONS: Mapping[str, NormPosition] = {"gated_delta_net": "pre", "attention": "output"}
NORMS = {
    "gated_delta_net": {
        "mixer_norm": ("input_layernorm", "attention_layer_norm"),
        "channel_mixing_norm": ("post_attention_layernorm", "feedforward_layer_norm"),
    },
    "attention": {
        "mixer_norm": ("post_attention_layernorm", "feedforward_layer_norm"),
        "channel_mixing_norm": ("post_feedforward_layernorm", "post_feedforward_layernorm"),
    },
}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("silu",))
    pattern = layer_types(options, MIXERS)
    d_model, eps = options.read("hidden_size", int), options.read("rms_norm_eps", float)
    doubled = options.read("linear_allow_neg_eigval", bool, True)
    arguments = {
        "attention": {
            **attention_arguments(options, d_model),
            **_positions(options),
            "qk_norm": "all",
            "qk_norm_eps": eps,
        },
        "gated_delta_net": {
            **delta_arguments(options, HEAD_NORM_EPS),
            "beta": "double_sigmoid" if doubled else "sigmoid",
        },
    }
    positions = tuple(NORM_POSITIONS[name] for name in pattern)
    return config_of(options, pattern, arguments, norm_position=positions)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model = config.d_model
    yield from vocabulary(config)
    yield same("model.norm.weight", "norm.weight", d_model)
    for layer in range(config.n_layers):
        name, arguments = config.mixer_of(layer)
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        for norm, (place, saved) in NORMS[name].items():
            names = f"{theirs}{place}.weight", f"{ours}{norm}.weight"
            yield same(*names, d_model, older=f"{theirs}{saved}.weight")
        if name == "attention":
            yield from within(f"{theirs}self_attn.", f"{ours}mixer.", attention(config, layer))
        else:
            parts = [*_inputs(d_model, **arguments), *recurrent("o_norm", "o_proj", d_model, **arguments)]
            yield from within(f"{theirs}linear_attn.", f"{ours}mixer.", parts)
        yield from within(f"{theirs}mlp.", f"{ours}channel_mixing.", swiglu(config))


def _positions(options: Options) -> dict[str, Any]:
    """Return the arguments of attention for positions."""
    table = rotary_table(options)
    if table.is_null("rope_theta") or ("rope_theta" not in table and options.is_null("rope_theta")):
        return {"positions": "none"}
    return whole_rotary(options)


def _inputs(d_model: int, *, n_heads: int, d_qk: int, d_v: int, conv_size: int, **_: Any) -> Iterator[Piece]:
    """Yield the pieces of the projections and the convolution of Gated DeltaNet."""
    widths = {"q": d_qk, "k": d_qk, "v": d_v}
    for name, width in widths.items():
        yield from linear(f"{name}_proj", name, width, d_model)
    yield from linear("g_proj", "gate", d_v, d_model)
    yield from linear("a_proj", "alpha", n_heads, d_model)
    yield from linear("b_proj", "beta.projection", n_heads, d_model)
    # transformers cuts the channels into equal parts
    yield stacked_taps(widths, conv_size, uneven=True)
