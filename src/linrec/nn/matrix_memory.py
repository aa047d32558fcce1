"""The gates of the mLSTM's memory and their stabiliser, which xLSTM and xLSTM-7B have in common."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.gates import GateLinear, gate_projected
from linrec.nn.head import soft_cap
from linrec.nn.parameters import mark
from linrec.nn.running_maximum import maxima_around_steps
from linrec.ops.core.call import refuse_split_time
from linrec.rules import at_least, choice, positive

__all__ = ["ForgetGate", "MemoryGates", "Stabilised", "stabilised"]

ForgetGate = Literal["sigmoid", "exponential", "none"]

# range over the heads of the argument of the forget gate's sigmoid when training starts, in the released code
FORGET_BIAS = (3.0, 6.0)
# bound of denominators in the released code, for m so large that exp(-m) is zero
EPS = 1e-6


class MemoryGates(nn.Module):
    """i_t = exp(w_i x_t + b_i) and f_t = sigmoid(w_f x_t + b_f), or exp, one of each per head, as logarithms.

    When training starts, w_i, w_f and b_i are zero, and f_t is sigmoid(3) to sigmoid(6), spread over the
    heads: the released code. The forget gate is marked as group "transition" without weight decay.

    Args:
        d_gates: width of x.
        n_heads: heads h.
        input_gate: whether there is i_t; without, it is 1.
        forget_gate: "sigmoid", "exponential", or "none" for f_t = 1.
        gate_cap: the soft cap c of both gates' arguments z, c tanh(z / c) in place of z; or None.
        gate_std: standard deviation of w_i and w_f when training starts.

    Raises:
        ValueError: an unknown `forget_gate`, a `gate_cap` that is not positive, or a `gate_std` below 0.

    Source:
        xLSTM (Beck and others, 2024), the forward pass of the mLSTM.

    Example:
        >>> import torch
        >>> log_i, log_f = MemoryGates(8, 2)(torch.zeros(1, 10, 8))
        >>> log_i.shape, torch.allclose(log_f[0, 0].exp(), torch.tensor([3.0, 6.0]).sigmoid())
        (torch.Size([1, 10, 2]), True)
    """

    def __init__(
        self,
        d_gates: int,
        n_heads: int,
        *,
        input_gate: bool = True,
        forget_gate: ForgetGate = "sigmoid",
        gate_cap: float | None = None,
        gate_std: float = 0.0,
    ) -> None:
        super().__init__()
        choice(ForgetGate, forget_gate=forget_gate)
        positive(gate_cap=gate_cap, or_none=True, cure="None is no cap.")
        at_least(0, gate_std=gate_std, cure="It is a standard deviation.")
        self.n_heads, self.gate_cap, self.sigmoid = n_heads, gate_cap, forget_gate == "sigmoid"
        self.i = GateLinear(d_gates, n_heads) if input_gate else None
        if self.i is not None:
            nn.init.normal_(self.i.weight, std=gate_std)
            nn.init.zeros_(self.i.bias)
        self.f: GateLinear | None = None
        if forget_gate != "none":
            self.f = mark(GateLinear(d_gates, n_heads))
            nn.init.normal_(self.f.weight, std=gate_std)
            bias = torch.linspace(*FORGET_BIAS, n_heads)
            with torch.no_grad():
                self.f.bias.copy_(bias if self.sigmoid else functional.logsigmoid(bias))

    def forward(
        self, x: Float[Tensor, "b t d_gates"]
    ) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b t h"]]:
        """Return log i_t and log f_t (b, t, h) in float32 or better; zeros for a gate that is not there."""
        zeros = x.new_zeros(*x.shape[:2], self.n_heads, dtype=torch.promote_types(x.dtype, torch.float32))
        gates = [gate for gate in (self.i, self.f) if gate is not None]
        arguments = [soft_cap(z, self.gate_cap) for z in gate_projected(x, *gates)] if gates else []
        log_i = zeros if self.i is None else arguments[0]
        if self.f is None:
            return log_i, zeros
        return log_i, functional.logsigmoid(arguments[-1]) if self.sigmoid else arguments[-1]


class Stabilised(NamedTuple):
    """Inputs of `normalized_gate_loop` for a memory that is kept times exp(-m_t).

    Attributes:
        q: queries (b, t, h, dk).
        k: i_t exp(-m_t) k_t / sqrt(dk), (b, t, h, dk), formed in the precision of gates and rounded once.
        v: values (b, t, h, dv).
        log_f: log f_t + m_{t-1} - m_t, (b, t, h).
        floor: exp(-m_t), (b, t, h), at least 1e-6.
        m: m of the last step, (b, h).
    """

    q: Float[Tensor, "b t h dk"]
    k: Float[Tensor, "b t h dk"]
    v: Float[Tensor, "b t h dv"]
    log_f: Float[Tensor, "b t h"]
    floor: Float[Tensor, "b t h"]
    m: Float[Tensor, "b h"]


def stabilised(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_i: Float[Tensor, "b t h"],
    log_f: Float[Tensor, "b t h"],
    m: Float[Tensor, "b h"] | None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Stabilised:
    """Return the inputs of a memory kept times exp(-m_t), m_t = max(log f_t + m_{t-1}, log i_t, 0).

    No gate of this memory overflows. The paper's m_t has no zero in it. h_t does not depend on m_t, and below
    zero, only exp(-m_t) itself could overflow.

    Args:
        q: queries.
        k: keys.
        v: values.
        log_i: log i_t.
        log_f: log f_t.
        m: m_0, the last m of an earlier call; None is -inf.
        reset: (b, t) bool, true where m starts from -inf.

    Source:
        xLSTM (Beck and others, 2024), the stabiliser of the sLSTM's gates.

    Example:
        >>> log_i, q = torch.tensor([100.0, 0.0]).reshape(1, 2, 1), torch.ones(1, 2, 1, 1)
        >>> inputs = stabilised(q, q, q, log_i, torch.zeros(1, 2, 1), None)
        >>> inputs.m.item(), inputs.k.flatten()[0].item(), inputs.log_f.flatten().tolist()
        (100.0, 1.0, [-inf, 0.0])
    """
    # the largest exponent so far is over the steps of all processes
    refuse_split_time("mlstm")
    m = log_i.new_full((len(log_i), log_i.shape[-1]), -torch.inf) if m is None else m
    earlier, now, last = maxima_around_steps(log_i.clamp(min=0), m, log_f, reset=reset)
    # at most 1, so no dtype of k overflows
    weighted = (log_i - now).exp()[..., None] / math.sqrt(k.shape[-1]) * k
    floor = (-now).exp().clamp(min=EPS)
    return Stabilised(q, weighted.to(k.dtype), v, log_f + earlier - now, floor, last)
