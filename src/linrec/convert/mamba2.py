"""Mamba-2, as in `Mamba2ForCausalLM` of transformers.

transformers ignores `norm_before_gate` and `rms_norm`, which some config.json files contain: its layers
always have the norm, after the gate. `residual_in_fp32` and `chunk_size` affect precision and speed only.
"""

import math
from collections.abc import Callable

from torch import Tensor

from linrec.convert.checkpoint import ConversionError, Options, Tensors
from linrec.models import ModelConfig

__all__ = ["backbone", "config", "dt_limit", "mixer", "weights"]

Mixer = Callable[[Tensors, str, ModelConfig], dict[str, Tensor]]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    options.supported("hidden_act", ("silu", "swish"))
    d_model, expand = options.read("hidden_size", int), options.read("expand", int)
    n_heads, d_head = options.read("num_heads", int), options.read("head_dim", int)
    if n_heads * d_head != expand * d_model:
        raise ConversionError(
            f"{options.path}: `num_heads` * `head_dim` must be `expand` * `hidden_size` = "
            f"{expand * d_model}; got {n_heads} * {d_head}."
        )
    norm_eps = options.read("layer_norm_epsilon", float)
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=options.read("num_hidden_layers", int),
        mixer="mamba2",
        mixer_args={
            "expand": expand,
            "n_heads": n_heads,
            "d_state": options.read("state_size", int),
            "n_groups": options.read("n_groups", int),
            "conv_size": options.read("conv_kernel", int),
            "conv_bias": options.read("use_conv_bias", bool),
            "bias": options.read("use_bias", bool),
            "norm_eps": norm_eps,
            "dt_limit": dt_limit(options, "time_step_limit"),
        },
        channel_mixing="none",
        norm="rms",
        norm_eps=norm_eps,
        tie_embeddings=options.read("tie_word_embeddings", bool, False),
        head_bias=False,
    )


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    return backbone(tensors, config, mixer)


def backbone(tensors: Tensors, config: ModelConfig, mixer: Mixer) -> dict[str, Tensor]:
    """Return the `state_dict` of a model that differs from Mamba-2 only in its mixers.

    Args:
        tensors: tensors of the checkpoint.
        config: configuration of the model.
        mixer: returns the `state_dict` of one layer's mixer, given the tensors, prefix and configuration.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    d_model = config.d_model
    # the name in checkpoints of 2024
    old = "backbone.embedding.weight"
    name = old if old in tensors else "backbone.embeddings.weight"
    embedding = tensors.take(name, config.vocab_size, d_model)
    found = {"embedding.weight": embedding, "norm.weight": tensors.take("backbone.norm_f.weight", d_model)}
    for layer in range(config.n_layers):
        theirs, ours = f"backbone.layers.{layer}.", f"blocks.{layer}."
        found[ours + "mixer_norm.weight"] = tensors.take(theirs + "norm.weight", d_model)
        for key, tensor in mixer(tensors, theirs + "mixer.", config).items():
            found[f"{ours}mixer.{key}"] = tensor
    if config.tie_embeddings:
        tensors.take_copy("lm_head.weight", embedding)
        return found | {"head.weight": embedding}
    return found | {"head.weight": tensors.take("lm_head.weight", config.vocab_size, d_model)}


def dt_limit(options: Options, name: str, default: list[float] | None = None) -> tuple[float, float] | None:
    """Return the mixer's argument `dt_limit`.

    Args:
        options: options that contain the two limits.
        name: name of the option.
        default: the limits if the option is missing; None makes the option required.

    Raises:
        ConversionError: the option is missing or invalid.
    """
    limit = options.read(name, list, default)
    if len(limit) != 2:
        raise ConversionError(f"{options.path}: `{name}` must be two numbers; got {limit}.")
    low, high = limit
    return None if (low, high) == (0, math.inf) else (low, high)


def mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    arguments, d_model = config.mixer_args, config.d_model
    d_inner, n_heads = arguments["expand"] * d_model, arguments["n_heads"]
    convolved = d_inner + 2 * arguments["n_groups"] * arguments["d_state"]
    width = d_inner + convolved

    # rows of z, X, B, C and dt
    projection = tensors.take(prefix + "in_proj.weight", width + n_heads, d_model)
    taps = tensors.take(prefix + "conv1d.weight", convolved, 1, arguments["conv_size"])
    dt_bias = tensors.take(prefix + "dt_bias", n_heads)
    found = {
        "zXBC.weight": projection[:width],
        "dt.weight": projection[width:],
        # torch's convolution stores the tap of the current step last
        "conv.weight": taps[:, 0].flip(-1),
        "A_log": tensors.take(prefix + "A_log", n_heads),
        "out.weight": tensors.take(prefix + "out_proj.weight", d_model, d_inner),
    }
    # in transformers D is per head, and the norm is always there
    each = d_inner if arguments.get("D") == "channel" else n_heads
    found["D"] = tensors.take(prefix + "D", each).unflatten(0, (n_heads, -1))
    if arguments.get("output_norm") != "none":
        found["norm.weight"] = tensors.take(prefix + "norm.weight", d_inner)
    if arguments["conv_bias"]:
        found["conv.bias"] = tensors.take(prefix + "conv1d.bias", convolved)
    if arguments["bias"]:
        bias = tensors.take(prefix + "in_proj.bias", width + n_heads)
        found["zXBC.bias"] = bias[:width]
        # in transformers dt has two biases
        dt_bias = dt_bias + bias[width:]
        found["out.bias"] = tensors.take(prefix + "out_proj.bias", d_model)
    return found | {"dt.bias": dt_bias}
