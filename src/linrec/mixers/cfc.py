"""CfC: Closed-form continuous-time neural networks (Hasani and others, 2022).

    u = phi(W [x_t, h_{t-1}] + b), and further layers u <- phi(W' u + b')
    s = sigmoid(A(u) dt_t + B(u))
    h_t = (1 - s) * tanh(F(u)) + s * tanh(G(u))                                                "default"
    h_t = tanh(F(u)) + s * tanh(G(u))                                                          "no_gate"
    h_t = a - a * exp(-dt_t (|w| + |F(u)|)) * F(u)                                             "pure"

x is the input, t time, dt the time since the step before, h the hidden state and output, u features of both,
s a gate that depends on the time. A, B, F and G are linear maps with biases, a and w vectors, and phi is an
activation.

With a mixed memory (Lechner and Hasani, 2020), the step of an LSTM comes first. Its output replaces h_{t-1}:

    i, g_i, g_f, g_o = V x_t + U h_{t-1} + c
    m_t = sigmoid(g_f + 1) * m_{t-1} + sigmoid(g_i) * tanh(i)
    h_{t-1} <- sigmoid(g_o) * tanh(m_t)
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import NonlinearMixer, beside_times, lstm_before, lstm_weights
from linrec.nn.mixer import State
from linrec.nn.projections import affine_map, matrix
from linrec.rules import COUNT, at_least

__all__ = ["CfC"]

Variant = Literal["default", "no_gate", "pure"]
Activation = Literal["lecun_tanh", "tanh", "relu", "silu", "gelu"]


class CfC(NonlinearMixer):
    """h_t = (1 - s) * tanh(F(u)) + s * tanh(G(u)), s = sigmoid(A(u) dt_t + B(u)): a gate that reads the time.

    The form approximates the solution of the differential equation of `linrec.mixers.ltc.LTC`, so that no
    solver is needed.

    With irregular steps, `dt` is the time in the gate. Without them, it is 1.

    | the paper's or the released code's | argument |
    |---|---|
    | without the second gate | `variant="no_gate"` |
    | the direct solution | `variant="pure"` |
    | CfC with mixed memory | `mixed_memory=True` |
    | units and layers of the backbone | `d_backbone`, `n_layers` |

    All weight matrices start Xavier-uniform, and biases as in torch's Linear. With "pure", a starts at 1 and
    w at 0. In the LSTM, U starts orthogonal and c uniform in +- 0.1. The backbone has no dropout.

    Args:
        d_model: width of the sequence and of h.
        d_backbone: width of u.
        n_layers: layers L of the backbone.
        activation: phi, "lecun_tanh" (1.7159 tanh(0.666 u)), "tanh", "relu", "silu" or "gelu".
        variant: "default", "no_gate" or "pure".
        mixed_memory: whether an LSTM runs before each step; the state then has 2 d_model channels.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a size below 1, or an unknown name.

    Source:
        Hasani and others, Closed-form continuous-time neural networks (2022); Lechner and Hasani, Learning
        Long-Term Dependencies in Irregularly-Sampled Time Series (2020); and the released code, ncps.

    Example:
        >>> mixer = CfC(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64), dt=torch.rand(2, 10))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        d_backbone: int = 128,
        n_layers: int = 1,
        activation: Activation = "lecun_tanh",
        variant: Variant = "default",
        mixed_memory: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, (2 if mixed_memory else 1) * d_model)
        at_least(1, d_backbone=d_backbone)
        at_least(1, most=COUNT, n_layers=n_layers)
        self.phi, self.variant = ACTIVATIONS[activation], variant
        self.mixed_memory, self.d_backbone = mixed_memory, d_backbone

        self.first = nn.Linear(2 * d_model, d_backbone)
        self.further = nn.ModuleList(nn.Linear(d_backbone, d_backbone) for _ in range(n_layers - 1))
        # F, and G, A and B
        self.heads = nn.Linear(d_backbone, d_model if variant == "pure" else 4 * d_model)
        for weight in (self.first.weight, *self.further.parameters(), *self.heads.weight.split(d_model)):
            if weight.ndim == 2:
                nn.init.xavier_uniform_(weight)
        if variant == "pure":
            self.a = nn.Parameter(torch.ones(d_model))
            self.w = nn.Parameter(torch.zeros(d_model))
        if mixed_memory:
            self.V, self.U = lstm_weights(d_model)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model); with a mixed memory, h and m, joined."""
        W, b = affine_map(self.first, 2 * self.d_model, x.device)
        W, W_h = W.split(self.d_model, 1)
        Wx, weights = functional.linear(x, W, b), [W_h]
        for layer in (*self.further, self.heads):
            weights += affine_map(layer, self.d_backbone, x.device)
        if self.variant == "pure":
            weights += [self.a, self.w]
        if self.mixed_memory:
            Wx, weights = torch.cat([Wx, self.V(x)], -1), [matrix(self.U, self.d_model, x.device), *weights]
        inputs = beside_times(Wx, dt)
        h, state = self.nonlinear_scan(self._cell, inputs, weights, state=state, reset=reset)
        return h[..., : self.d_model].to(Wx.dtype), state

    def _cell(self, h: Tensor, inputs: Tensor, *weights: Tensor) -> Tensor:
        """Return h_t; with a mixed memory, h_t and m_t, joined."""
        Wx, dt = inputs[..., :-1], inputs[..., -1:]
        if not self.mixed_memory:
            return self._closed_form(h, Wx, dt, *weights)
        Wx, Vx = Wx[..., : -4 * self.d_model], Wx[..., -4 * self.d_model :]
        h, m = h.chunk(2, -1)
        h, m = lstm_before(h, m, Vx, weights[0])
        return torch.cat([self._closed_form(h, Wx, dt, *weights[1:]), m], -1)

    def _closed_form(self, h: Tensor, Wx: Tensor, dt: Tensor, W_h: Tensor, *weights: Tensor) -> Tensor:
        """Return h_t from the h that the backbone reads."""
        u = self.phi(Wx + h @ W_h.mT)
        for _ in self.further:
            (W, b), weights = weights[:2], weights[2:]
            u = self.phi(functional.linear(u, W, b))
        (W, b), weights = weights[:2], weights[2:]
        heads = functional.linear(u, W, b)
        if self.variant == "pure":
            a, w = weights
            return a - a * torch.exp(-dt * (w.abs() + heads.abs())) * heads
        F, G, A, B = heads.chunk(4, -1)
        s = torch.sigmoid(A * dt + B)
        kept = 1 if self.variant == "no_gate" else 1 - s
        return kept * torch.tanh(F) + s * torch.tanh(G)
