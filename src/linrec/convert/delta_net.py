"""DeltaNet, as in `DeltaNetForCausalLM` of flash-linear-attention.

The released layer divides q by the square root of its number of channels. The norm undoes the division up to
its eps, so `norm_eps` here is multiplied by the number of channels.
"""

from collections.abc import Iterator

from linrec.convert.checkpoint import Options
from linrec.convert.flash_linear_attention import config_of, layout_of
from linrec.convert.layers import linear, stacked_taps
from linrec.convert.layout import Piece, same
from linrec.models import ModelConfig

__all__ = ["QK_EPS", "config", "layout", "mixer"]

# eps of the released code; it is added to the squared norm of q and k, not to the sum of their features
QK_EPS = 1e-6


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    beta = "double_sigmoid" if options.read("allow_neg_eigval", bool, False) else "sigmoid"
    if not options.read("use_beta", bool, True):
        # with `allow_neg_eigval` the constant beta would be 2, a reflection
        options.supported("allow_neg_eigval", (False,), False)
        beta = "one"
    d_model, n_heads = options.read("hidden_size", int), options.read("num_heads", int)
    d_qk = int(d_model * options.read("expand_k", float))
    # features of both signs may sum to zero, so they cannot be normalised by their sum
    norm = options.supported("qk_norm", ("l2", "sum"), "l2")
    maps = ("silu", "relu", "elu", "identity") if norm == "l2" else ("relu", "elu")
    arguments = {
        "n_heads": n_heads,
        "d_qk": d_qk,
        "d_v": int(d_model * options.read("expand_v", float)),
        "feature_map": options.supported("qk_activation", maps, "silu"),
        "qk_norm": "l2" if norm == "l2" else "l1",
        "qk_eps": QK_EPS if norm == "l2" else 0.0,
        "beta": beta,
        "conv_size": options.read("conv_size", int) if options.read("use_short_conv", bool, True) else None,
        "norm_eps": options.read("norm_eps", float) * (d_qk // n_heads),
        "output_gate": options.read("use_gate", bool, False),
    }
    return config_of(options, "delta_net", arguments)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    return layout_of(options, config, mixer)


def mixer(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's mixer, without parameters of a decay."""
    arguments, d_model = config.mixer_args, config.d_model
    d_qk, d_v, n_heads = (arguments[name] for name in ("d_qk", "d_v", "n_heads"))
    widths = {"q": d_qk, "k": d_qk, "v": d_v}
    for name, width in widths.items():
        yield from linear(f"{name}_proj", name, width, d_model)
    if arguments["conv_size"] is not None:
        yield stacked_taps(widths, arguments["conv_size"])
    if arguments["beta"] != "one":
        yield from linear("b_proj", "beta.projection", n_heads, d_model)
    yield same("o_norm.weight", "norm.weight", d_v // n_heads)
    if arguments["output_gate"]:
        yield from linear("g_proj", "gate", d_v, d_model)
    yield from linear("o_proj", "out", d_model, d_v)
