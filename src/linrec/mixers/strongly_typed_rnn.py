"""Strongly-typed recurrent networks (Balduzzi and Ghifary, 2016): states are averaged, and never multiplied.

    z_t = W_z x_t                             f_t = sigmoid(W_f x_t + b_f)
    h_t = f_t * h_{t-1} + (1 - f_t) * z_t                                                   T-RNN

    z_t = V_z x_{t-1} + W_z x_t + b_z         f_t = sigmoid(V_f x_{t-1} + W_f x_t + b_f)
    o_t = tau(V_o x_{t-1} + W_o x_t + b_o)
    h_t = f_t * h_{t-1} + z_t * o_t                                                         T-GRU
    c_t = f_t * c_{t-1} + (1 - f_t) * z_t     h_t = c_t * o_t                               T-LSTM

x is the input, t time, z the features, f the forget gate, o the output gate, tau tanh, c the memory, and h
the output. No matrix multiplies a state, so the recurrence is linear and element-wise.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.gates import Gate
from linrec.nn.mixer import Mixer, State
from linrec.nn.token_shift import token_shift
from linrec.ops.inspection import note
from linrec.ops.scan import scan

__all__ = ["StronglyTypedRNN", "StronglyTypedState"]

Variant = Literal["rnn", "gru", "lstm"]


class StronglyTypedState(NamedTuple):
    """State of a strongly-typed network.

    Attributes:
        x: the last input (b, d_model); None in a T-RNN.
        c: c or h (b, d_model).
    """

    x: Float[Tensor, "b d_model"] | None
    c: Float[Tensor, "b d_model"]


class StronglyTypedRNN(Mixer):
    """c_t = f_t * c_{t-1} + (1 - f_t) * z_t: an average of features, whose weights depend on the input.

    | the paper's network | argument |
    |---|---|
    | T-RNN | `variant="rnn"` |
    | T-GRU | `variant="gru"` |
    | T-LSTM | `variant="lstm"` |

    All gates see inputs alone, so `scan` computes the recurrence, and `linrec.learning.RTRL` learns it
    exactly. A T-LSTM is a QRNN over two steps whose features have no tanh, and whose output gate has tanh in
    place of the sigmoid.

    Weights start as in torch's Linear; the paper draws them uniform in +- 0.08 or 0.1. W_f, V_f and b_f are
    marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence and of the state.
        variant: "rnn", "gru" or "lstm".

    Raises:
        ValueError: an unknown `variant`.

    Source:
        Balduzzi and Ghifary, Strongly-Typed Recurrent Neural Networks (2016), section 3.

    Example:
        >>> mixer = StronglyTypedRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.x.shape, state.c.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 64]))
    """

    recurrence = "scan"

    def __init__(self, d_model: int, *, variant: Variant = "lstm") -> None:
        super().__init__(d_model)
        self.variant = variant
        width = d_model if variant == "rnn" else 2 * d_model
        self.z = nn.Linear(width, d_model, bias=variant != "rnn")
        self.f = Gate(width, d_model)
        self.o = None if variant == "rnn" else nn.Linear(width, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h, and a `StronglyTypedState`."""
        last, c = (None, None) if state is None else state
        X = x
        if self.o is not None:
            before, last = token_shift(x, last, reset=reset)
            X = torch.cat([x, before], -1)
        f, rest = self.f(X)
        z = self.z(X).to(f.dtype)
        o = None if self.o is None else torch.tanh(self.o(X))
        factor = rest if o is None or self.variant == "lstm" else o.to(f.dtype)
        note(gate=factor)
        c, end = scan(f, factor * z, state=c, reset=reset)
        h = c.to(x.dtype)
        if o is not None and self.variant == "lstm":
            h = h * o
        return h, StronglyTypedState(last, end)
