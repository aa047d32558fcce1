"""Channel mixing by name."""

from typing import Literal, TypeAlias, cast

from torch import nn

from linrec.errors import unknown
from linrec.nn.ffn import FeedForward, FFNActivation
from linrec.nn.glu import GLU, GLUActivation
from linrec.nn.rwkv_channel_mixing import RWKVChannelMixing

__all__ = ["ChannelMixing", "make_channel_mixing"]

ChannelMixing: TypeAlias = Literal[
    "ffn", "squared_relu", "glu", "swiglu", "geglu", "geglu_tanh", "bilinear", "rwkv", "none"
]
_ACTIVATIONS = {"ffn": "gelu", "squared_relu": "squared_relu"}
_GATES = {
    "glu": "sigmoid",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "bilinear": "identity",
}


def make_channel_mixing(
    kind: ChannelMixing, d_model: int, d_hidden: int, *, bias: bool = True
) -> nn.Module | None:
    """Return a `FeedForward`, a `GLU`, an `RWKVChannelMixing`, or None, by name.

    Args:
        kind: "ffn" and "squared_relu", which are a `FeedForward`; "glu", "swiglu", "geglu", "geglu_tanh" and
            "bilinear", which are a `GLU`; "rwkv"; or "none".
        d_model: width of input and output.
        d_hidden: hidden width. A gated unit has three matrices of it, all others two.
        bias: whether the linear layers have biases; "rwkv" has no bias.

    Raises:
        ValueError: there is no such kind; the message names the nearest.

    Example:
        >>> make_channel_mixing("swiglu", 64, 128).activation
        'silu'
    """
    if kind in _ACTIVATIONS:
        return FeedForward(d_model, d_hidden, activation=cast(FFNActivation, _ACTIVATIONS[kind]), bias=bias)
    if kind == "rwkv":
        return RWKVChannelMixing(d_model, d_hidden)
    if kind == "none":
        return None
    if kind not in _GATES:
        raise unknown("channel mixing", kind, [*_ACTIVATIONS, *_GATES, "rwkv", "none"])
    return GLU(d_model, d_hidden, activation=cast(GLUActivation, _GATES[kind]), bias=bias)
