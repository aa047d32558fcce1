"""Gates of recurrent state vectors, Block-Recurrent Transformer's."""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.parameters import mark

__all__ = ["GateKind", "StateGate"]

GateKind: TypeAlias = Literal["fixed", "full", "lstm"]

# standard deviation of biases, and variance of weights times their inputs, when training starts
BIAS_STD, GATE_VARIANCE = 0.1, 0.1
# standard deviation of a standard normal distribution that is cut at two standard deviations
CUT = 0.87962566103423978


class StateGate(nn.Module):
    """Return the next states from states S and hidden units h.

        z = W_z h + b_z                                               (tanh of it, with `tanh`)
        "fixed": g = sigmoid(b)                                       S' = g S + (1 - g) z
        "full":  g = sigmoid(W h + b + 1)                             S' = g S + (1 - g) z
        "lstm":  f = sigmoid(W_f h + b_f + 1), i = sigmoid(W_i h + b_i - 1)     S' = f S + i z

    When training starts, b, b_f and b_i are normal with a standard deviation of 0.1. W, W_f and W_i are
    truncated normal with a variance of 0.1 / `d_hidden`.

    Args:
        d_hidden: channels of h.
        d_model: channels of S.
        kind: "fixed", "full" or "lstm".
        tanh: whether z is between -1 and 1.

    Source:
        Hutchins and others, Block-Recurrent Transformers (2022), section 3.3. "full", the initial values of
        gates, and z without tanh are the released code's.

    Example:
        >>> gate = StateGate(4, 3, "lstm")
        >>> gate(torch.zeros(2, 5, 3), torch.zeros(2, 5, 4)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(self, d_hidden: int, d_model: int, kind: GateKind, *, tanh: bool = False) -> None:
        super().__init__()
        self.kind, self.tanh = kind, tanh
        self.z = nn.Linear(d_hidden, d_model)
        if kind == "fixed":
            self.bias = nn.Parameter(BIAS_STD * torch.randn(d_model))
            mark(self, "bias")
            return
        # f and i of "lstm" side by side
        self.gates = mark(nn.Linear(d_hidden, d_model * (2 if kind == "lstm" else 1)))
        std = (GATE_VARIANCE / d_hidden) ** 0.5 / CUT
        nn.init.trunc_normal_(self.gates.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.normal_(self.gates.bias, std=BIAS_STD)

    def forward(
        self, state: Float[Tensor, "b n d_model"], h: Float[Tensor, "b n d_hidden"]
    ) -> Float[Tensor, "b n d_model"]:
        """Return S', in the dtype of `state`."""
        z = self.z(h).to(state.dtype)
        z = torch.tanh(z) if self.tanh else z
        if self.kind == "lstm":
            f, i = self.gates(h).to(state.dtype).chunk(2, -1)
            return torch.sigmoid(f + 1) * state + torch.sigmoid(i - 1) * z
        logit = self.bias.to(state.dtype) if self.kind == "fixed" else self.gates(h).to(state.dtype) + 1
        return torch.lerp(z, state, torch.sigmoid(logit).expand_as(z))
