"""The block that models of flash-linear-attention share: RMSNorm, mixer, RMSNorm and SwiGLU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.models import ModelConfig

__all__ = ["config_of", "convolution", "weights_of"]

Part = Callable[[Tensors, str, ModelConfig], dict[str, Tensor]]


def config_of(options: Options, mixer: str, arguments: dict[str, Any], **model: Any) -> ModelConfig:
    """Return the configuration of a model with this mixer; `model` overrides SwiGLU and RMSNorm.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    for name in ("attn", "attnres_block_size"):
        options.supported(name, (None,))
    d_model = options.read("hidden_size", int)
    if "channel_mixing" not in model:
        options.supported("hidden_act", ("swish",))
        # two thirds of the ratio, rounded up to a multiple of 256
        wide = int(d_model * options.read("hidden_ratio", float, 4.0) * 2 / 3)
        model["d_channel_mixing"] = options.read("intermediate_size", int, -(-wide // 256) * 256)
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=options.read("num_hidden_layers", int),
        mixer=mixer,
        mixer_args=arguments,
        norm_eps=options.read("norm_eps", float),
        tie_embeddings=options.read("tie_word_embeddings", bool, False),
        head_bias=False,
        **{"channel_mixing": "swiglu", "norm": "rms", **model},
    )


def weights_of(
    tensors: Tensors,
    config: ModelConfig,
    mixer: Part,
    *,
    channel_mixing: Part | None = None,
    names: Sequence[str] = ("mlp_norm", "mlp"),
    first_norm: str | None = None,
) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Args:
        tensors: tensors of the checkpoint.
        config: configuration of the model.
        mixer: returns the `state_dict` of one layer's mixer, given the tensors, their prefix and the
            configuration.
        channel_mixing: the same for the channel mixing; None means SwiGLU.
        names: the checkpoint's names of the second norm and of the channel mixing.
        first_norm: the checkpoint's name of the embedding's norm, which is stored in the first layer.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    size = config.vocab_size, config.d_model
    embedding = tensors.take("model.embeddings.weight", *size)
    found = {"embedding.weight": embedding}
    norms = {"model.norm": "norm"}
    if first_norm is not None:
        norms[f"model.layers.0.{first_norm}"] = "embedding_norm"
    for layer in range(config.n_layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        norms |= {theirs + "attn_norm": ours + "mixer_norm", theirs + names[0]: ours + "channel_mixing_norm"}
        parts = {
            "mixer.": mixer(tensors, theirs + "attn.", config),
            "channel_mixing.": (channel_mixing or _swiglu)(tensors, f"{theirs}{names[1]}.", config),
        }
        for part, taken in parts.items():
            found |= {ours + part + name: tensor for name, tensor in taken.items()}
    for theirs, ours in norms.items():
        for name in ("weight", "bias") if config.norm == "layer" else ("weight",):
            found[f"{ours}.{name}"] = tensors.take(f"{theirs}.{name}", config.d_model)
    if config.tie_embeddings:
        tensors.take_copy("lm_head.weight", embedding)
        return found | {"head.weight": embedding}
    return found | {"head.weight": tensors.take("lm_head.weight", *size)}


def convolution(tensors: Tensors, prefix: str, widths: dict[str, int], size: int) -> dict[str, Tensor]:
    """Return the taps of several tensors' short convolutions, concatenated.

    Args:
        tensors: tensors of the checkpoint.
        prefix: prefix of the layer's mixer.
        widths: number of channels by tensor name, in linrec's order.
        size: number of taps.
    """
    taps = [tensors.take(f"{prefix}{name}_conv1d.weight", width, 1, size) for name, width in widths.items()]
    # torch's convolution stores the tap of the current step last
    return {"conv.weight": torch.cat(taps)[:, 0].flip(-1)}


def _swiglu(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's channel mixing; linrec's biases are zero."""
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    found = {}
    for name, rows, columns in (
        ("gate", d_hidden, d_model),
        ("up", d_hidden, d_model),
        ("down", d_model, d_hidden),
    ):
        found[f"{name}.weight"] = tensors.take(f"{prefix}{name}_proj.weight", rows, columns)
        found[f"{name}.bias"] = torch.zeros(rows)
    return found
