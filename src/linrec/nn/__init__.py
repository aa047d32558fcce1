"""Parts that mixers and models share: gates, norms, channel mixers, and the marks on parameters."""

from linrec.nn.channel_mixing import GLU, ChannelMixing, FeedForward, RWKVChannelMixing, make_channel_mixing
from linrec.nn.decays import LowerBounds
from linrec.nn.gates import Gate, GateLinear, Transition
from linrec.nn.head import Embedding, Head, PairHead
from linrec.nn.norms import RMSNorm, make_norm
from linrec.nn.parameters import Float32Module, ParameterGroup, groups_of, mark
from linrec.nn.rotary import Rotary

__all__ = [
    "GLU",
    "ChannelMixing",
    "Embedding",
    "FeedForward",
    "Float32Module",
    "Gate",
    "GateLinear",
    "Head",
    "LowerBounds",
    "PairHead",
    "ParameterGroup",
    "RMSNorm",
    "RWKVChannelMixing",
    "Rotary",
    "Transition",
    "groups_of",
    "make_channel_mixing",
    "make_norm",
    "mark",
]
