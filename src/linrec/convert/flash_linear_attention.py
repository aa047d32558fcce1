"""The block that models of flash-linear-attention share: RMSNorm, mixer, RMSNorm and SwiGLU."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from linrec.convert import decoder
from linrec.convert.checkpoint import Options
from linrec.convert.layers import swiglu
from linrec.convert.layout import Piece
from linrec.models import ModelConfig

__all__ = ["NAMES", "config_of", "head_norm", "layout_of"]

NAMES = decoder.Names("attn_norm", "mlp_norm", "mlp", embedding="embeddings")


def config_of(options: Options, mixer: str, arguments: dict[str, Any], **fields: Any) -> ModelConfig:
    """Return the configuration of a model with this mixer; `fields` override SwiGLU and RMSNorm."""
    for name in ("attn", "attnres_block_size"):
        options.supported(name, (None,))
    if "channel_mixing" not in fields:
        options.supported("hidden_act", ("swish",))
        # two thirds of the ratio, rounded up to a multiple of 256
        wide = int(options.read("hidden_size", int) * options.read("hidden_ratio", float, 4.0) * 2 / 3)
        fields["d_channel_mixing"] = options.read("intermediate_size", int, -(-wide // 256) * 256)
    return decoder.config_of(options, mixer, arguments, norm_eps=options.read("norm_eps", float), **fields)


def layout_of(
    options: Options,
    config: ModelConfig,
    mixer: Callable[[Options, ModelConfig], Iterable[Piece]],
    channel_mixing: Callable[[ModelConfig], Iterable[Piece]] = swiglu,
    names: decoder.Names = NAMES,
) -> Iterator[Piece]:
    """Yield the pieces of a model.

    Args:
        options: options of the checkpoint.
        config: configuration of the model.
        mixer: returns the pieces of one layer's mixer.
        channel_mixing: returns the pieces of one layer's channel mixing.
        names: names in the checkpoint.
    """
    return decoder.layout_of(config, lambda layer: ("attn.", mixer(options, config)), channel_mixing, names)


def head_norm(options: Options, gate: bool) -> tuple[str, str]:
    """Return the name of the heads' norm, and its name where norm and gate are fused the other way."""
    names = "g_norm_swish_gate.weight", "g_norm.weight"
    return names if gate and options.read("fuse_norm", bool, True) else names[::-1]
