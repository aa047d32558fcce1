"""The largest exponent so far, which divides sums of exponentials, and the mLSTM's gates, which need it."""

import math
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.gates import GateLinear, gate_projected
from linrec.nn.head import soft_cap
from linrec.nn.parameters import mark
from linrec.ops.core.ambient import exporting
from linrec.ops.core.call import in_turn, time_is_split
from linrec.ops.core.loop import raised, recurrence
from linrec.rules import at_least, choice, positive

__all__ = ["ForgetGate", "MemoryGates", "Stabilised", "maxima_around_steps", "running_maximum", "stabilised"]

ForgetGate = Literal["sigmoid", "exponential", "none"]

# of the mLSTM's released code: range over the heads of the argument of the forget gate's sigmoid when
# training starts, and bound of denominators, for m so large that exp(-m) is zero
FORGET_BIAS, EPS = (3.0, 6.0), 1e-6


def running_maximum(
    x: Float[Tensor, "b t *c"],
    before: Float[Tensor, "b *c"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b steps *c"]:
    """m_t = max(m_{t-1} + log_decay_t, x_t), m_0 = before: the largest of exponents that decay.

    A sum s_t = exp(log_decay_t) s_{t-1} + exp(x_t) u_t, kept as exp(-m_t) s_t, neither overflows nor loses
    its largest part. The sum itself does not depend on m, so m has no gradient here.

    Without decays and resets this is a cumulative maximum; with them, log2(t) passes over the steps, each of
    which doubles the stretch that a step has looked back.

    Args:
        x: exponents (b, t, ..), not +inf.
        before: m_0 (b, ..), -inf where nothing came before.
        log_decay: (b, t, ..), or (..) where it is constant in time, of either sign, not +inf; None is 0.
        reset: (b, t) bool; true at t makes m_t = x_t.

    Returns:
        m_0 .. m_t, (b, t + 1, ..), in the dtype of `x`.
    """
    largest = torch.cat([before.detach()[:, None].to(x.dtype), x.detach()], 1)
    if log_decay is None and reset is None:
        return largest.cummax(1).values
    fall = torch.zeros_like(x) if log_decay is None else log_decay.detach().to(x.dtype).expand_as(x)
    if exporting():
        if reset is not None:
            fall = fall.masked_fill(reset.reshape(*reset.shape, *[1] * (x.dim() - 2)), -torch.inf)
        start = largest[:, 0]
        later = recurrence(fall, x.detach(), start, product=raised, plus=torch.maximum, zero=-torch.inf)
        return torch.cat([largest[:, :1], later], 1)
    # from step t-1 to step t, for t = 1 ..; the entry before m_0 is never read
    fall = torch.cat([torch.zeros_like(largest[:, :1]), fall], 1)
    cut = None
    if reset is not None:
        cut = functional.pad(reset, (1, 0)).reshape(*largest.shape[:2], *[1] * (x.dim() - 2))
    span = 1
    while span < largest.shape[1]:
        earlier = largest[:, :-span] + fall[:, span:]
        if cut is not None:
            # the sum of -inf and NaN would be NaN
            earlier = earlier.masked_fill(cut[:, span:], -torch.inf)
            cut = torch.cat([cut[:, :span], cut[:, span:] | cut[:, :-span]], 1)
        largest = torch.cat([largest[:, :span], torch.maximum(largest[:, span:], earlier)], 1)
        fall = torch.cat([fall[:, :span], fall[:, span:] + fall[:, :-span]], 1)
        span *= 2
    return largest


def maxima_around_steps(
    x: Float[Tensor, "b t *c"],
    before: Float[Tensor, "b *c"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t *c"], Float[Tensor, "b t *c"], Float[Tensor, "b *c"]]:
    """Return m_{t-1} and m_t of `running_maximum` for every step t, and the last m.

    m_{t-1} is -inf where a new sequence starts. The last m shares no memory with the others.
    """

    def maxima(before: Tensor) -> tuple[Tensor, Tensor]:
        m = running_maximum(x, before, log_decay, reset=reset)
        return m, m[:, -1].clone()

    # if time is split, processes wait for m alone; exported programs have no change of the gradient's mode
    with torch.no_grad() if time_is_split() else nullcontext():
        m, last = in_turn("running_maximum", maxima, before, [])
    earlier = m[:, :-1]
    if reset is not None:
        earlier = earlier.masked_fill(reset.reshape(*reset.shape, *[1] * (x.dim() - 2)), -torch.inf)
    return earlier, m[:, 1:], last


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

    Source:
        xLSTM (Beck and others, 2024), the forward pass of the mLSTM.
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
    """
    m = log_i.new_full((len(log_i), log_i.shape[-1]), -torch.inf) if m is None else m
    earlier, now, last = maxima_around_steps(log_i.clamp(min=0), m, log_f, reset=reset)
    # at most 1, so no dtype of k overflows
    weighted = (log_i - now).exp()[..., None] / math.sqrt(k.shape[-1]) * k
    floor = (-now).exp().clamp(min=EPS)
    return Stabilised(q, weighted.to(k.dtype), v, log_f + earlier - now, floor, last)
