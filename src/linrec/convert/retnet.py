"""RetNet, as `RetNetForCausalLM` of flash-linear-attention has it.

Its angles fall from 1 to base^(2 / dk - 1), and those of linrec's layer to 1 / base: another base gives the
same angles. It turns channel j with channel j + dk / 2, and linrec's layer turns neighbours.
"""

import torch
from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]

ROTARY_BASE = 10_000.0


def config(options: Options) -> ModelConfig:
    """The configuration of the model that config.json describes.

    Raises:
        ConversionError: an option that is missing or that linrec does not have.
    """
    options.supported("expand_k", (1.0,))
    options.supported("feature_map", (None,))
    options.supported("use_short_conv", (False,), False)
    options.supported("elementwise_affine", (True,), True)
    d_model, n_heads = options.read("hidden_size", int), options.read("num_heads", int)
    options.supported("num_kv_heads", (None, n_heads))
    arguments = {
        "n_heads": n_heads,
        "d_v": int(d_model * options.read("expand_v", float)),
        "rotary_base": ROTARY_BASE ** (1 - 2 * n_heads / d_model),
        "output_norm": "rms",
        "norm_eps": options.read("norm_eps", float),
        "output_gate": options.read("use_output_gate", bool, True),
    }
    return config_of(options, "retnet", arguments)


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of the model, of the checkpoint's tensors.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
    """
    return weights_of(tensors, config, _mixer)


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of one layer's mixer."""
    arguments, d_model = config.mixer_args, config.d_model
    d_v, n_heads = arguments["d_v"], arguments["n_heads"]
    found = {"v.weight": tensors.take(prefix + "v_proj.weight", d_v, d_model)}
    for name in ("q", "k"):
        rows = tensors.take(f"{prefix}{name}_proj.weight", d_model, d_model)
        # of each head, the first half beside the second
        halves = rows.unflatten(0, (n_heads, 2, -1)).transpose(1, 2)
        found[f"{name}.weight"] = halves.flatten(0, 2)
    if arguments["output_gate"]:
        found["gate.weight"] = tensors.take(prefix + "g_proj.weight", d_v, d_model)
    # its name where norm and gate are one kernel
    fused = prefix + "g_norm_swish_gate.weight"
    norm = tensors.take(fused if fused in tensors else prefix + "g_norm.weight", d_v // n_heads)
    # the norm here has no weight: its columns of W_O have it
    out = tensors.take(prefix + "o_proj.weight", d_model, d_v)
    return found | {"out.weight": out * torch.cat([norm] * n_heads)}
