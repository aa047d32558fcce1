"""The block that models of flash-linear-attention share: RMSNorm, mixer, RMSNorm and SwiGLU."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from linrec.convert.checkpoint import Options
from linrec.convert.layers import swiglu, vocabulary
from linrec.convert.layout import TAPS, Piece, same, within
from linrec.models import ModelConfig

__all__ = ["config_of", "convolution", "head_norm", "layout_of"]

Part = Callable[[Options, ModelConfig], Iterable[Piece]]


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
        channel_mixing_bias=False,
        norm_eps=options.read("norm_eps", float),
        tie_embeddings=options.read("tie_word_embeddings", bool, False),
        head_bias=False,
        **{"channel_mixing": "swiglu", "norm": "rms", **model},
    )


def layout_of(
    options: Options,
    config: ModelConfig,
    mixer: Part,
    *,
    channel_mixing: Part | None = None,
    names: Sequence[str] = ("mlp_norm", "mlp"),
    first_norm: str | None = None,
) -> Iterator[Piece]:
    """Yield the pieces of a model.

    Args:
        options: options of the checkpoint.
        config: configuration of the model.
        mixer: returns the pieces of one layer's mixer.
        channel_mixing: the same for the channel mixing; None means SwiGLU.
        names: the checkpoint's names of the second norm and of the channel mixing.
        first_norm: the checkpoint's name of the embedding's norm, which is stored in the first layer.
    """
    yield from vocabulary(config, "model.embeddings.weight")
    norms = {"model.norm": "norm"}
    if first_norm is not None:
        norms[f"model.layers.0.{first_norm}"] = "embedding_norm"
    for layer in range(config.n_layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        norms |= {theirs + "attn_norm": ours + "mixer_norm", theirs + names[0]: ours + "channel_mixing_norm"}
        yield from within(f"{theirs}attn.", f"{ours}mixer.", mixer(options, config))
        unit = swiglu(config) if channel_mixing is None else channel_mixing(options, config)
        yield from within(f"{theirs}{names[1]}.", f"{ours}channel_mixing.", unit)
    for theirs, ours in norms.items():
        for name in ("weight", "bias") if config.norm == "layer" else ("weight",):
            yield same(f"{theirs}.{name}", f"{ours}.{name}", config.d_model)


def convolution(widths: Mapping[str, int], size: int) -> Piece:
    """Return the piece of the taps of several tensors' short convolutions.

    Args:
        widths: number of channels by tensor name, in linrec's order.
        size: number of taps.
    """
    return Piece(
        {f"{name}_conv1d.weight": (width, 1, size) for name, width in widths.items()},
        ["conv.weight"],
        lambda tensors: [TAPS.read(torch.cat([*tensors]))],
        lambda taps: TAPS.write(taps[0]).split([*widths.values()]),
    )


def head_norm(options: Options, gate: bool) -> tuple[str, str]:
    """Return the name of the heads' norm, and its name where norm and gate are fused the other way."""
    names = "g_norm_swish_gate.weight", "g_norm.weight"
    return names if gate and options.read("fuse_norm", bool, True) else names[::-1]
