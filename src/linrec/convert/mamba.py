"""Mamba, as in `MambaForCausalLM` of transformers.

`residual_in_fp32` affects precision only, `use_mambapy` and `use_associative_scan` affect speed only. Apart
from the rank, the `time_step_` options only affect initialisation.
"""

from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.mamba2 import backbone
from linrec.models import ModelConfig

__all__ = ["config", "mixer", "weights"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    options.supported("hidden_act", ("silu", "swish"))
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=options.read("hidden_size", int),
        n_layers=options.read("num_hidden_layers", int),
        mixer="mamba",
        mixer_args={
            "expand": options.read("expand", int),
            "d_state": options.read("state_size", int),
            "dt_rank": options.read("time_step_rank", int),
            "conv_size": options.read("conv_kernel", int),
            "conv_bias": options.read("use_conv_bias", bool),
            "bias": options.read("use_bias", bool),
        },
        channel_mixing="none",
        norm="rms",
        norm_eps=options.read("layer_norm_epsilon", float),
        # transformers omits options at their default values from config.json
        tie_embeddings=options.read("tie_word_embeddings", bool, True),
        head_bias=False,
    )


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    return backbone(tensors, config, mixer)


def mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    arguments, d_model = config.mixer_args, config.d_model
    d_inner, d_state, rank = arguments["expand"] * d_model, arguments["d_state"], arguments["dt_rank"]
    taps = tensors.take(prefix + "conv1d.weight", d_inner, 1, arguments["conv_size"])
    found = {
        "xz.weight": tensors.take(prefix + "in_proj.weight", 2 * d_inner, d_model),
        # torch's convolution stores the tap of the current step last
        "conv.weight": taps[:, 0].flip(-1),
        "dtBC.weight": tensors.take(prefix + "x_proj.weight", rank + 2 * d_state, d_inner),
        "W_dt.weight": tensors.take(prefix + "dt_proj.weight", d_inner, rank),
        "W_dt.bias": tensors.take(prefix + "dt_proj.bias", d_inner),
        "A_log": tensors.take(prefix + "A_log", d_inner, d_state),
        "D": tensors.take(prefix + "D", d_inner),
        "out.weight": tensors.take(prefix + "out_proj.weight", d_model, d_inner),
    }
    if arguments["conv_bias"]:
        found["conv.bias"] = tensors.take(prefix + "conv1d.bias", d_inner)
    if arguments["bias"]:
        found["xz.bias"] = tensors.take(prefix + "in_proj.bias", 2 * d_inner)
        found["out.bias"] = tensors.take(prefix + "out_proj.bias", d_model)
    return found
