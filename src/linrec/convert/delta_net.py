"""DeltaNet, as `DeltaNetForCausalLM` of flash-linear-attention has it.

The layer divides q by the root of its channels, which its norm undoes but for the eps: `norm_eps` here is
larger by their number.
"""

from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, convolution, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]

# of the released code, beside the squared norm of q and k, not beside their sum
QK_EPS = 1e-6


def config(options: Options) -> ModelConfig:
    """The configuration of the model that config.json describes.

    Raises:
        ConversionError: an option that is missing or that linrec does not have.
    """
    beta = "double_sigmoid" if options.read("allow_neg_eigval", bool, False) else "sigmoid"
    if not options.read("use_beta", bool, True):
        # strengths of 2 everywhere would be reflections
        options.supported("allow_neg_eigval", (False,), False)
        beta = "one"
    d_model, n_heads = options.read("hidden_size", int), options.read("num_heads", int)
    d_qk = int(d_model * options.read("expand_k", float))
    # a sum of features of either sign is no norm
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


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of the model, of the checkpoint's tensors.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
    """
    return weights_of(tensors, config, mixer)


def mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of one layer's mixer, but for a decay."""
    arguments, d_model = config.mixer_args, config.d_model
    d_qk, d_v, n_heads = (arguments[name] for name in ("d_qk", "d_v", "n_heads"))
    widths = {"q": d_qk, "k": d_qk, "v": d_v}
    found = {f"{n}.weight": tensors.take(f"{prefix}{n}_proj.weight", d, d_model) for n, d in widths.items()}
    if arguments["conv_size"] is not None:
        found |= convolution(tensors, prefix, widths, arguments["conv_size"])
    if arguments["beta"] != "one":
        found["beta.projection.weight"] = tensors.take(prefix + "b_proj.weight", n_heads, d_model)
    found["norm.weight"] = tensors.take(prefix + "o_norm.weight", d_v // n_heads)
    if arguments["output_gate"]:
        found["gate.weight"] = tensors.take(prefix + "g_proj.weight", d_v, d_model)
    return found | {"out.weight": tensors.take(prefix + "o_proj.weight", d_model, d_v)}
