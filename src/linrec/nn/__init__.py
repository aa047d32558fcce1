"""Parts that mixers and models share: gates, norms, channel mixers, and the marks on parameters."""

from linrec.nn.channel_mixing import ChannelMixing, make_channel_mixing
from linrec.nn.embedding import Embedding
from linrec.nn.ffn import FeedForward
from linrec.nn.float32 import Float32Module
from linrec.nn.gates import Gate, GateLinear, Transition
from linrec.nn.glu import GLU
from linrec.nn.head import Head
from linrec.nn.lower_bounds import LowerBounds
from linrec.nn.norms import RMSNorm, make_norm
from linrec.nn.pair_head import PairHead
from linrec.nn.parameters import ParameterGroup, groups_of, mark
from linrec.nn.rotary import Rotary
from linrec.nn.rwkv_channel_mixing import RWKVChannelMixing

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
