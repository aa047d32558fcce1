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
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.nn.gates import Gate
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.token_shift import token_shift
from linrec.ops.inspection import elementwise_mixing
from linrec.ops.scan import scan

__all__ = ["QRNN", "QRNNState"]

Pooling = Literal["f", "fo", "ifo"]


class QRNNState(NamedTuple):
    """What a QRNN carries from one piece of a sequence to the next.

    Attributes:
        tail: the last inputs of the convolution, newest first, (b, width - 1, d_model); None where it sees
            one step.
        cell: c, (b, d_model).
    """

    tail: Float[Tensor, "b width-1 d_model"] | None
    cell: Float[Tensor, "b d_model"]


class QRNN(Mixer):
    """c_t = f_t . c_{t-1} + (1 - f_t) . z_t, h_t = o_t . c_t, with z, f and o convolutions of the input.

    The defaults are the paper's layer of its language models, fo-pooling over two steps. Weights start as
    those of torch's Conv1d. W_f and W_i are marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence.
        width: steps k that the convolution sees; 1 is no convolution.
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
        >>> import torch
        >>> mixer = QRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.tail.shape, state.cell.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 1, 64]), torch.Size([2, 64]))
    """

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
        if width < 1:
            raise ValueError(f"`width` must be at least 1 step; got {width}. The paper's is 2.")
        if pooling not in ("f", "fo", "ifo"):
            raise unknown("`pooling`", pooling, ["f", "fo", "ifo"])
        if not 0 <= zoneout < 1:
            raise ValueError(f"`zoneout` must be in [0, 1); got {zoneout}.")
        self.width, self.zoneout = width, zoneout

        self.z = nn.Linear(width * d_model, d_model)
        self.f = Gate(width * d_model, d_model, refine=refine, uniform_init=uniform_init)
        self.o = None if pooling == "f" else nn.Linear(width * d_model, d_model)
        self.i = Gate(width * d_model, d_model) if pooling == "ifo" else None

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], QRNNState]:
        """Mix `x` over time; see `Mixer.forward`. The state is a `QRNNState`."""
        self.check_input(x, reset, state)
        tail, cell = (None, None) if state is None else state
        X, tail = self._windows(x, tail, reset)
        f, i = self._gates(X)
        z = torch.tanh(self.z(X)).to(f.dtype)
        c, cell = scan(f, i * z, state=cell, reset=reset)
        c = c.to(x.dtype)
        h = c if self.o is None else torch.sigmoid(self.o(X)) * c
        return h, QRNNState(tail, cell)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> QRNNState:
        """Zeros."""
        device, dtype = self.z.weight.device if device is None else device, self._state_dtype()
        tail = None
        if self.width > 1:
            tail = torch.zeros(batch, self.width - 1, self.d_model, dtype=dtype, device=device)
        return QRNNState(tail, torch.zeros(batch, self.d_model, dtype=dtype, device=device))

    @property
    def state_size(self) -> int:
        """Elements of c and of the convolution's tail, width d_model."""
        return self.width * self.d_model

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """f_t; see `Mixer.transitions`."""
        X, _ = self._windows(x, None, None)
        return Transitions(self._gates(X)[0], None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of what z is multiplied by in c."""
        X, _ = self._windows(x, None, reset)
        return elementwise_mixing(*self._gates(X), x, reset)

    def _windows(self, x: Tensor, tail: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x_t, x_{t-1}, ... side by side (b, t, width d_model), and the tail to go on from."""
        steps, last = [x], []
        for lag in range(self.width - 1):
            before, end = token_shift(steps[-1], None if tail is None else tail[:, lag], reset=reset)
            steps.append(before)
            last.append(end)
        return torch.cat(steps, -1), torch.stack(last, 1) if last else None

    def _gates(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """f, and what z is multiplied by."""
        f, rest = self.f(X)
        if self.zoneout and self.training:
            kept = torch.rand_like(f) < self.zoneout
            f, rest = f.masked_fill(kept, 1), rest.masked_fill(kept, 0)
        elif self.zoneout:
            f, rest = f + self.zoneout * rest, (1 - self.zoneout) * rest
        return f, rest if self.i is None else self.i(X)[0]
