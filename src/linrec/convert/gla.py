"""GLA, as in `GLAForCausalLM` of flash-linear-attention.

The released layer divides q by the square root of its number of channels. The norm undoes the division up to
its eps, so `norm_eps` here is multiplied by the number of channels.
"""

import math

import torch
from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, convolution, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]

# constants of the released layer, which config.json does not contain
TAU, GATE_RANK = 16.0, 16


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    options.supported("elementwise_affine", (True,), True)
    d_model, n_heads = options.read("hidden_size", int), options.read("num_heads", int)
    d_qk = int(d_model * options.read("expand_k", float))
    clamp_min = options.read("clamp_min", float, -math.inf)
    short = options.read("use_short_conv", bool, False)
    arguments = {
        "n_heads": n_heads,
        "kv_heads": options.read("num_kv_heads", int, n_heads),
        "d_qk": d_qk,
        "d_v": int(d_model * options.read("expand_v", float)),
        "feature_map": options.supported("feature_map", (None, "relu", "silu", "swish")) or "identity",
        "conv_size": options.read("conv_size", int) if short else None,
        "gate_rank": GATE_RANK,
        "tau": TAU,
        "clamp_min": None if clamp_min == -math.inf else clamp_min,
        "output_norm": "rms",
        "norm_eps": options.read("norm_eps", float) * (d_qk // n_heads),
        "output_gate": options.read("use_output_gate", bool, True),
    }
    if arguments["feature_map"] == "swish":
        arguments["feature_map"] = "silu"
    return config_of(options, "gla", arguments)


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    return weights_of(tensors, config, _mixer)


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer."""
    arguments, d_model = config.mixer_args, config.d_model
    d_qk, d_v, n_heads = (arguments[name] for name in ("d_qk", "d_v", "n_heads"))
    shared = n_heads // arguments["kv_heads"]
    widths = {"q": d_qk, "k": d_qk // shared, "v": d_v // shared}
    found = {f"{n}.weight": tensors.take(f"{prefix}{n}_proj.weight", d, d_model) for n, d in widths.items()}
    if arguments["conv_size"] is not None:
        found |= convolution(tensors, prefix, widths, arguments["conv_size"])
    found["alpha.0.weight"] = tensors.take(prefix + "gk_proj.0.weight", GATE_RANK, d_model)
    found["alpha.1.weight"] = tensors.take(prefix + "gk_proj.1.weight", d_qk // shared, GATE_RANK)
    found["alpha.1.bias"] = tensors.take(prefix + "gk_proj.1.bias", d_qk // shared)
    if arguments["output_gate"]:
        found["gate.weight"] = tensors.take(prefix + "g_proj.weight", d_v, d_model)
        found["gate.bias"] = torch.zeros(d_v)
    # the tensor's name if norm and gate are fused in one kernel
    fused = prefix + "g_norm_swish_gate.weight"
    norm = fused if fused in tensors else prefix + "g_norm.weight"
    found["norm.weight"] = tensors.take(norm, d_v // n_heads)
    return found | {"out.weight": tensors.take(prefix + "o_proj.weight", d_model, d_v)}
