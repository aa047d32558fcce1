"""HGRN, as in `HGRNForCausalLM` of flash-linear-attention: real, with a norm before the gate."""

from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, convolution, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    options.supported("elementwise_affine", (True,), True)
    short = options.read("use_short_conv", bool, False)
    arguments = {
        "d_state": int(options.read("hidden_size", int) * options.read("expand_ratio", float, 1.0)),
        "lower_bound": "increasing" if options.read("use_lower_bound", bool, True) else 0.0,
        "conv_size": options.read("conv_size", int) if short else None,
        "output_gate": "silu",
        "gate_before_norm": False,
        "output_norm": "rms",
        "norm_eps": options.read("norm_eps", float),
        "phase": "none",
        "complex_input": False,
        "bias": False,
    }
    return config_of(options, "hgru", arguments)


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    found = weights_of(tensors, config, _mixer)
    return found | lower_bounds(tensors, config, config.d_model)


def lower_bounds(tensors: Tensors, config: ModelConfig, width: int) -> dict[str, Tensor]:
    """Return the lower bounds of all layers, under the name that each layer has for them."""
    if config.mixer_args["lower_bound"] != "increasing":
        return {}
    gamma = tensors.take("model.lower_bounds", config.n_layers, width)
    return {f"blocks.{layer}.mixer.bounds.gamma": gamma for layer in range(config.n_layers)}


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer."""
    d_model, d_state = config.d_model, config.mixer_args["d_state"]
    found = {
        f"{ours}.weight": tensors.take(f"{prefix}{theirs}_proj.weight", d_state, d_model)
        for ours, theirs in (("c", "i"), ("mu", "f"), ("gate", "g"))
    }
    if config.mixer_args["conv_size"] is not None:
        found |= convolution(tensors, prefix, dict.fromkeys("if", d_state), config.mixer_args["conv_size"])
    found["norm.weight"] = tensors.take(prefix + "g_norm.weight", d_state)
    return found | {"out.weight": tensors.take(prefix + "o_proj.weight", d_model, d_state)}
