"""Gated DeltaNet, as `GatedDeltaNetForCausalLM` of flash-linear-attention has it.

The layer divides q by the root of its channels, which its norm undoes but for the eps: `norm_eps` here is
larger by their number.
"""

from torch import Tensor

from linrec.convert import delta_net
from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]


def config(options: Options) -> ModelConfig:
    """The configuration of the model that config.json describes.

    Raises:
        ConversionError: an option that is missing or that linrec does not have.
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
    """The state_dict of the model, of the checkpoint's tensors.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
    """
    return weights_of(tensors, config, _mixer)


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of one layer's mixer."""
    n_heads = config.mixer_args["n_heads"]
    return {
        **delta_net.mixer(tensors, prefix, config),
        "alpha.weight": tensors.take(prefix + "a_proj.weight", n_heads, config.d_model),
        "A_log": tensors.take(prefix + "A_log", n_heads),
        "dt_bias": tensors.take(prefix + "dt_bias", n_heads),
    }
