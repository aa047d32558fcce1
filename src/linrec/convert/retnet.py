"""RetNet, as in `RetNetForCausalLM` of flash-linear-attention.

The released layer's angles fall from 1 to base^(2 / dk - 1), linrec's from 1 to 1 / base, so another base
gives the same angles. The released layer rotates channel j with channel j + dk / 2; linrec's rotates adjacent
channels.
"""

import torch
from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]

ROTARY_BASE = 10_000.0


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
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
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    return weights_of(tensors, config, _mixer)


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer."""
    arguments, d_model = config.mixer_args, config.d_model
    d_v, n_heads = arguments["d_v"], arguments["n_heads"]
    found = {"v.weight": tensors.take(prefix + "v_proj.weight", d_v, d_model)}
    for name in ("q", "k"):
        rows = tensors.take(f"{prefix}{name}_proj.weight", d_model, d_model)
        # interleave the two halves of each head, which makes rotary pairs adjacent
        halves = rows.unflatten(0, (n_heads, 2, -1)).transpose(1, 2)
        found[f"{name}.weight"] = halves.flatten(0, 2)
    if arguments["output_gate"]:
        found["gate.weight"] = tensors.take(prefix + "g_proj.weight", d_v, d_model)
    # the tensor's name if norm and gate are fused in one kernel
    fused = prefix + "g_norm_swish_gate.weight"
    norm = tensors.take(fused if fused in tensors else prefix + "g_norm.weight", d_v // n_heads)
    # the norm here has no weight: it is folded into the columns of W_O
    out = tensors.take(prefix + "o_proj.weight", d_model, d_v)
    return found | {"out.weight": out * torch.cat([norm] * n_heads)}
