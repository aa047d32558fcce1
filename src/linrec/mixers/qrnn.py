"""QRNN: Quasi-Recurrent Neural Networks (Bradbury, Merity, Xiong and Socher, 2016).

    Z = tanh(W_z * X)      F = sigmoid(W_f * X)      O = sigmoid(W_o * X)      I = sigmoid(W_i * X)
    c_t = f_t . c_{t-1} + (1 - f_t) . z_t            f- and fo-pooling
    c_t = f_t . c_{t-1} + i_t . z_t                  ifo-pooling
    h_t = o_t . c_t                                  fo- and ifo-pooling; h_t = c_t in f-pooling

X input, Z candidates, F forget, O output and I input gates of all steps, c memory cells, h output, t time,
. the product of channels. W * X is a causal convolution of `width` steps with whole matrices:
(W * X)_t = W_1 x_t + W_2 x_{t-1} + ... + b.
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
from linrec.rules import COUNT, at_least, require

__all__ = ["QRNN", "QRNNState"]

Pooling = Literal["f", "fo", "ifo"]


class QRNNState(NamedTuple):
    """State of a QRNN.

    Attributes:
        tail: the last inputs of the convolution, newest first, (b, width - 1, d_model); None if `width` is 1.
        cell: c, (b, d_model).
    """

    tail: Float[Tensor, "b width-1 d_model"] | None
    cell: Float[Tensor, "b d_model"]


class QRNN(Mixer):
    """c_t = f_t . c_{t-1} + (1 - f_t) . z_t, h_t = o_t . c_t, with z, f and o convolutions of the input.

    The defaults are the paper's layer of its language models, fo-pooling over two steps. Weights start like
    the weights of torch's Conv1d. W_f and W_i are marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence.
        width: steps k that the convolution sees; 1 disables the convolution.
        pooling: "f", "fo" or "ifo".
        zoneout: probability that a channel keeps its cell in a step, in training:
            F = 1 - dropout(1 - sigmoid(W_f * X)) without rescaling. Otherwise 1 - F is multiplied by
            1 - `zoneout`, as in the released code.
        refine: whether F has a refine gate; see `linrec.nn.Gate`.
        uniform_init: whether F starts uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: a `width` below 1, an unknown `pooling`, or a `zoneout` out of [0, 1).

    Source:
        QRNN (Bradbury and others, 2016), its convolution, pooling and zoneout; refine gate and uniform
        initialisation: Gu and others (2020).

    Example:
        >>> mixer = QRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.tail.shape, state.cell.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 1, 64]), torch.Size([2, 64]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        width: int = 2,
        pooling: Pooling = "fo",
        zoneout: float = 0.0,
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, most=COUNT, width=width, cure="The paper's is 2 steps.")
        require(0 <= zoneout < 1, f"`zoneout` must be in [0, 1); got {zoneout}.")
        self.width, self.zoneout = width, zoneout

        self.z = nn.Linear(width * d_model, d_model)
        self.f = Gate(width * d_model, d_model, refine=refine, uniform_init=uniform_init)
        self.o = None if pooling == "f" else nn.Linear(width * d_model, d_model)
        self.i = Gate(width * d_model, d_model) if pooling == "ifo" else None

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h, and a `QRNNState`."""
        tail, cell = (None, None) if state is None else state
        # x_t, x_{t-1}, .. side by side, which the convolutions see
        steps, last = [x], []
        for lag in range(self.width - 1):
            before, end = token_shift(steps[-1], None if tail is None else tail[:, lag], reset=reset)
            steps.append(before)
            last.append(end)
        tail = torch.stack(last, 1) if last else None
        X = torch.cat(steps, -1)

        z = torch.tanh(self.z(X))
        f, i = self.f(X)
        if self.zoneout and self.training:
            kept = torch.rand_like(f) < self.zoneout
            f, i = f.masked_fill(kept, 1), i.masked_fill(kept, 0)
        elif self.zoneout:
            f, i = f + self.zoneout * i, (1 - self.zoneout) * i
        if self.i is not None:
            i, _ = self.i(X)
        note(gate=i)
        c, cell = scan(f, i * z.to(f.dtype), state=cell, reset=reset)
        c = c.to(x.dtype)
        h = c if self.o is None else torch.sigmoid(self.o(X)) * c
        return h, QRNNState(tail, cell)
