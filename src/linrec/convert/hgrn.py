"""HGRN, as `HGRNForCausalLM` of flash-linear-attention has it: real, with a norm before the gate."""

import torch
from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]


def config(options: Options) -> ModelConfig:
    """The configuration of the model that config.json describes.

    Raises:
        ConversionError: an option that is missing or that linrec does not have.
    """
    options.supported("expand_ratio", (1, None), 1)
    options.supported("use_short_conv", (False,), False)
    options.supported("elementwise_affine", (True,), True)
    arguments = {
        "lower_bound": "increasing" if options.read("use_lower_bound", bool, True) else 0.0,
        "output_gate": "silu",
        "gate_before_norm": False,
        "output_norm": "rms",
        "norm_eps": options.read("norm_eps", float),
        "phase": "none",
        "complex_input": False,
    }
    return config_of(options, "hgru", arguments)


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of the model, of the checkpoint's tensors.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
    """
    found = weights_of(tensors, config, _mixer)
    return found | lower_bounds(tensors, config, config.d_model)


def lower_bounds(tensors: Tensors, config: ModelConfig, width: int) -> dict[str, Tensor]:
    """The lower bounds of all layers, under each layer's name for them."""
    if config.mixer_args["lower_bound"] != "increasing":
        return {}
    gamma = tensors.take("model.lower_bounds", config.n_layers, width)
    return {f"blocks.{layer}.mixer.bounds.gamma": gamma for layer in range(config.n_layers)}


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of one layer's mixer, whose biases are zero."""
    d_model, found = config.d_model, {}
    for ours, theirs in (("c", "i"), ("mu", "f"), ("gate", "g"), ("out", "o")):
        found[f"{ours}.weight"] = tensors.take(f"{prefix}{theirs}_proj.weight", d_model, d_model)
        found[f"{ours}.bias"] = torch.zeros(d_model)
    return found | {"norm.weight": tensors.take(prefix + "g_norm.weight", d_model)}
