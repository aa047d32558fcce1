"""Gated DeltaNet, as in `GatedDeltaNetForCausalLM` of flash-linear-attention.

The released layer divides q by the square root of its number of channels. The norm undoes the division up to
its eps, so `norm_eps` here is multiplied by the number of channels.
"""

from torch import Tensor

from linrec.convert import delta_net
from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    d_head, qk_heads = options.read("head_dim", int), options.read("num_heads", int)
    n_heads = options.read("num_v_heads", int, qk_heads)
    arguments = {
        "n_heads": n_heads,
        "qk_heads": qk_heads,
        "d_qk": qk_heads * d_head,
        "d_v": n_heads * int(d_head * options.read("expand_v", float)),
        "qk_eps": delta_net.QK_EPS,
        "beta": "double_sigmoid" if options.read("allow_neg_eigval", bool, False) else "sigmoid",
        "conv_size": options.read("conv_size", int) if options.read("use_short_conv", bool, True) else None,
        "norm_eps": options.read("norm_eps", float) * d_head,
        "output_gate": options.read("use_gate", bool, True),
    }
    return config_of(options, "gated_delta_net", arguments)


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    return weights_of(tensors, config, _mixer)


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer."""
    n_heads = config.mixer_args["n_heads"]
    return {
        **delta_net.mixer(tensors, prefix, config),
        "alpha.weight": tensors.take(prefix + "a_proj.weight", n_heads, config.d_model),
        "A_log": tensors.take(prefix + "A_log", n_heads),
        "dt_bias": tensors.take(prefix + "dt_bias", n_heads),
    }
