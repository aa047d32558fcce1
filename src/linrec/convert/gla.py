"""GLA, as in `GLAForCausalLM` of flash-linear-attention.

The released layer divides q by the square root of its number of channels. The norm undoes the division up to
its eps, so `norm_eps` here is multiplied by the number of channels.
"""

import math
from collections.abc import Iterator

from linrec.convert.checkpoint import Options
from linrec.convert.flash_linear_attention import config_of, head_norm, layout_of
from linrec.convert.layers import linear, stacked_taps
from linrec.convert.layout import Piece, same
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

# constants of the released layer, which config.json does not contain
TAU, GATE_RANK = 16.0, 16


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("elementwise_affine", (True,), True)
    d_model, n_heads = options.read("hidden_size", int), options.read("num_heads", int)
    d_qk = int(d_model * options.read("expand_k", float))
    clamp_min = options.read("clamp_min", float, -math.inf)
    short = options.read("use_short_conv", bool, False)
    arguments = {
        "n_heads": n_heads,
        "kv_heads": options.read("num_kv_heads", int, n_heads),
        "d_qk": d_qk,
        "d_v": int(d_model * options.read("expand_v", float)),
        "feature_map": options.supported("feature_map", (None, "relu", "silu", "swish")) or "identity",
        "conv_size": options.read("conv_size", int) if short else None,
        "gate_rank": GATE_RANK,
        "tau": TAU,
        "clamp_min": None if clamp_min == -math.inf else clamp_min,
        "output_norm": "rms",
        "norm_eps": options.read("norm_eps", float) * (d_qk // n_heads),
        "output_gate": options.read("use_output_gate", bool, True),
        "gate_bias": False,
    }
    if arguments["feature_map"] == "swish":
        arguments["feature_map"] = "silu"
    return config_of(options, "gla", arguments)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    return layout_of(options, config, _mixer)


def _mixer(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's mixer."""
    arguments, d_model = config.mixer_args, config.d_model
    d_qk, d_v, n_heads = (arguments[name] for name in ("d_qk", "d_v", "n_heads"))
    shared, gate = n_heads // arguments["kv_heads"], arguments["output_gate"]
    widths = {"q": d_qk, "k": d_qk // shared, "v": d_v // shared}
    for name, width in widths.items():
        yield from linear(f"{name}_proj", name, width, d_model)
    if arguments["conv_size"] is not None:
        yield stacked_taps(widths, arguments["conv_size"])
    yield from linear("gk_proj.0", "alpha.0", GATE_RANK, d_model)
    yield from linear("gk_proj.1", "alpha.1", d_qk // shared, GATE_RANK, bias=True)
    if gate:
        yield from linear("g_proj", "gate", d_v, d_model)
    norm, other = head_norm(options, gate)
    yield same(norm, "norm.weight", d_v // n_heads, older=other)
    yield from linear("o_proj", "out", d_model, d_v)
