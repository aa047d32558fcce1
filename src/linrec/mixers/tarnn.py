"""TARNN: time adaptive recurrent network (Kag and Saligrama, 2021).

    s_t = sigmoid(U_s h_{t-1} + W_s x_t + b_s)
    v_t = U_2 h_{t-1} + W_1 x_t + W_2 x_{t-1} + b
    g_0 = h_{t-1}
    u_i = phi(U_1 g_{i-1} + v_t) - g_{i-1} - h_{t-1} + B_1 x_t + B_2 h_{t-1}
    g_i = (1 - a_i) g_{i-1} + a_i u_i    i = 1..K
    h_t = (1 - s_t) * h_{t-1} + s_t * g_K

x is the input, t time, and h the hidden state and output. The gate s sets how fast time runs. g is the state
of an ordinary differential equation, a_i the learned length of inner step i, and phi an activation.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.nn.projections import matrix
from linrec.nn.token_shift import token_shift
from linrec.rules import COUNT, at_least

__all__ = ["TARNN"]

Activation = Literal["relu", "tanh", "sigmoid"]


class TARNNState(NamedTuple):
    """The memory of a TARNN.

    Args:
        h: the hidden state (b, d_model).
        x: the last input (b, d_model).
    """

    h: Tensor
    x: Tensor


class TARNN(NonlinearMixer):
    """h_t = (1 - s_t) * h_{t-1} + s_t * g_K: K Euler steps of an ordinary differential equation, and a gate.

    All matrices start at Gaussian values of standard deviation 0.1, b at zero, and a at 0.01, as in the
    released code. The code has an a for every position of the sequence, and x_1 in place of x_0. Here a is
    shared over time, and x_0 is zero. a, W_s, U_s and b_s are marked as group "transition" without weight
    decay.

    Args:
        d_model: width of the sequence and of the state.
        n_steps: inner steps K.
        activation: phi, "relu", "tanh" or "sigmoid".
        a_init: initial length of all inner steps.
        gate_inside: whether the gate acts in each inner step, g_i = g_{i-1} + a_i s_t * u_i, and h_t = g_K.
            b_s then starts at 0 in place of -3. This is `b_variant=False` of the released code.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: an unknown activation or mode, or a number is out of range.

    Source:
        Kag and Saligrama, Time Adaptive Recurrent Neural Network (2021), and the released code,
        anilkagak2/TARNN.

    Example:
        >>> mixer = TARNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.h.shape, state.x.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_steps: int = 1,
        activation: Activation = "relu",
        a_init: float = 0.01,
        gate_inside: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        at_least(1, most=COUNT, n_steps=n_steps)
        at_least(0, a_init=a_init)
        self.phi, self.gate_inside = ACTIVATIONS[activation], gate_inside

        self.W_1 = nn.Linear(d_model, d_model)
        self.W_2, self.B_1, self.U_1, self.U_2, self.B_2 = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(5)
        )
        self.W_s = mark(nn.Linear(d_model, d_model))
        self.U_s = mark(nn.Linear(d_model, d_model, bias=False))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1)
        nn.init.zeros_(self.W_1.bias)
        nn.init.constant_(self.W_s.bias, 0.0 if gate_inside else -3.0)
        self.a = nn.Parameter(torch.full((n_steps,), float(a_init)))
        mark(self, "a", float32=True)

    def mix(self, x: Tensor, state: TARNNState | None, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h and x."""
        start = self.started(x, state)
        before, last = token_shift(x, start.x, reset=reset)
        inputs = torch.cat([self.W_s(x), self.W_1(x) + self.W_2(before), self.B_1(x)], -1)
        weights = [
            matrix(layer, self.d_model, x.device) for layer in (self.U_s, self.U_1, self.U_2, self.B_2)
        ]
        # clones, because an exported loop refuses parameters that share memory
        lengths = [a_i.clone() for a_i in self.a]
        parameters = *weights, *lengths
        h, hidden = self.nonlinear_scan(self._cell, inputs, parameters, state=start.h, reset=reset)
        return h, TARNNState(hidden, last)

    def _cell(
        self, h: Tensor, inputs: Tensor, U_s: Tensor, U_1: Tensor, U_2: Tensor, B_2: Tensor, *a: Tensor
    ) -> Tensor:
        """Return h_t."""
        Wx_s, Wx, Bx = inputs.chunk(3, -1)
        s = torch.sigmoid(functional.linear(h, U_s) + Wx_s)
        Wx, Bx = Wx + functional.linear(h, U_2), Bx + functional.linear(h, B_2)
        g = h
        for a_i in a:
            u = self.phi(functional.linear(g, U_1) + Wx) - g - h + Bx
            g = g + a_i * s * u if self.gate_inside else (1 - a_i) * g + a_i * u
        return g if self.gate_inside else (1 - s) * h + s * g

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> TARNNState:
        """Return zeros."""
        zeros = torch.zeros(2, batch, self.d_model, **self.factory_kwargs(device))
        return TARNNState(zeros[0].clone(), zeros[1].clone())
