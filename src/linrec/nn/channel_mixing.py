"""Channel mixing by name."""

from typing import Literal, TypeAlias, cast

from torch import nn

from linrec.errors import unknown
from linrec.nn.ffn import FeedForward
from linrec.nn.glu import GLU, GLUActivation
from linrec.nn.rwkv_channel_mixing import RWKVChannelMixing

__all__ = ["ChannelMixing", "make_channel_mixing"]

ChannelMixing: TypeAlias = Literal["ffn", "glu", "swiglu", "geglu", "geglu_tanh", "bilinear", "rwkv", "none"]
_GATES = {
    "glu": "sigmoid",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "bilinear": "identity",
}


def make_channel_mixing(kind: ChannelMixing, d_model: int, d_hidden: int) -> nn.Module | None:
    """Return a `FeedForward` ("ffn"), a `GLU` by its name, an `RWKVChannelMixing` ("rwkv"), or None ("none").

    Args:
        kind: "ffn", "glu", "swiglu", "geglu", "geglu_tanh", "bilinear", "rwkv", or "none".
        d_model: width of input and output.
        d_hidden: hidden width. A gated unit has three matrices of it, all others two.

    Raises:
        ValueError: there is no such kind; the message names the nearest.

    Example:
        >>> make_channel_mixing("swiglu", 64, 128).activation
        'silu'
    """
    if kind == "ffn":
        return FeedForward(d_model, d_hidden)
    if kind == "rwkv":
        return RWKVChannelMixing(d_model, d_hidden)
    if kind == "none":
        return None
    if kind not in _GATES:
        raise unknown("channel mixing", kind, ["ffn", *_GATES, "rwkv", "none"])
    return GLU(d_model, d_hidden, activation=cast(GLUActivation, _GATES[kind]))
