"""Mamba-2, as `Mamba2ForCausalLM` of transformers has it.

transformers reads neither `norm_before_gate` nor `rms_norm`, which some config.json have: its layers always
have the norm, behind the gate. `residual_in_fp32` and `chunk_size` are matters of precision and speed.
"""

import math
from collections.abc import Callable

from torch import Tensor

from linrec.convert.checkpoint import ConversionError, Options, Tensors
from linrec.models import ModelConfig

__all__ = ["backbone", "config", "dt_limit", "mixer", "weights"]

Mixer = Callable[[Tensors, str, ModelConfig], dict[str, Tensor]]


def config(options: Options) -> ModelConfig:
    """The configuration of the model that config.json describes.

    Raises:
        ConversionError: an option that is missing or that linrec does not have.
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
    """The state_dict of the model, of the checkpoint's tensors.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
    """
    return backbone(tensors, config, mixer)


def backbone(tensors: Tensors, config: ModelConfig, mixer: Mixer) -> dict[str, Tensor]:
    """The state_dict of a model whose mixers alone are another architecture's.

    Args:
        tensors: of the checkpoint.
        config: of the model.
        mixer: makes the state_dict of one layer's mixer from the tensors, its prefix and the configuration.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
    """
    d_model = config.d_model
    # its name in checkpoints of 2024
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
    """The argument `dt_limit` of the mixer.

    Args:
        options: with two numbers.
        name: of the option.
        default: the numbers where they are not there; None: they must be.

    Raises:
        ConversionError: the option is missing, or something else.
    """
    limit = options.read(name, list, default)
    if len(limit) != 2:
        raise ConversionError(f"{options.path}: `{name}` must be two numbers; got {limit}.")
    low, high = limit
    return None if (low, high) == (0, math.inf) else (low, high)


def mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of one layer's mixer.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
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
        # torch's convolution has the tap of the current step last
        "conv.weight": taps[:, 0].flip(-1),
        "A_log": tensors.take(prefix + "A_log", n_heads),
        "out.weight": tensors.take(prefix + "out_proj.weight", d_model, d_inner),
    }
    # transformers has a D for each head, and always a norm
    each = d_inner if arguments.get("D") == "channel" else n_heads
    found["D"] = tensors.take(prefix + "D", each).unflatten(0, (n_heads, -1))
    if arguments.get("output_norm") != "none":
        found["norm.weight"] = tensors.take(prefix + "norm.weight", d_inner)
    if arguments["conv_bias"]:
        found["conv.bias"] = tensors.take(prefix + "conv1d.bias", convolved)
    if arguments["bias"]:
        bias = tensors.take(prefix + "in_proj.bias", width + n_heads)
        found["zXBC.bias"] = bias[:width]
        # dt has two biases there
        dt_bias = dt_bias + bias[width:]
        found["out.bias"] = tensors.take(prefix + "out_proj.bias", d_model)
    return found | {"dt.bias": dt_bias}
