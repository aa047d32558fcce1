"""DeltaNet, as in `DeltaNetForCausalLM` of flash-linear-attention.

The released layer divides q by the square root of its number of channels. The norm undoes the division up to
its eps, so `norm_eps` here is multiplied by the number of channels.
"""

from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, convolution, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]

# eps of the released code; it is added to the squared norm of q and k, not to the sum of their features
QK_EPS = 1e-6


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
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


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    return weights_of(tensors, config, mixer)


def mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer, without parameters of a decay."""
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
