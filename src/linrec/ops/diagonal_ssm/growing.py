"""A diagonal model whose entries may grow, until a horizon H at which their taps are largest.

    x_t = a e^g * x_{t-1} + b e^(-g H) u_t    y_t = Re(sum_n c_n x_tn)
    K_l = Re(sum_n c_n b_n a_n^l e^(g_n (l - H)))

with g >= 0, and |a| = 1 where g > 0. No tap up to the horizon is large, but e^(g H) and its reciprocal are
out of range in single precision where g H > 88. So states are scaled with time during a call: at its step s,
e^(g (n - s)) x_s has transitions of a alone. The state that a call returns is e^(g H / 2) x, in the middle of
the range.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.handlers import time_is_split
from linrec.ops.core.isolation import entering
from linrec.ops.core.machine import exporting
from linrec.ops.core.precision import real_dtype
from linrec.ops.core.stationary import convolved
from linrec.ops.diagonal_ssm import OPERATOR as DIAGONAL
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.diagonal_ssm.torch import backends
from linrec.ops.long_conv import long_conv
from linrec.ops.long_conv.powers import Powers, last_power, powers, sums_of_powers, weighted_by_age
from linrec.ops.scan import scan


class GrowingSSM(NamedTuple):
    """What backends take: the inputs of `diagonal_ssm`, with g and H.

    Attributes:
        u: (b, t, d).
        a: (d, n), as all factors.
        growth: g, real.
        b: in the dtype of a.
        c: in the dtype of a.
        horizon: H, in steps.
        state: (b, d, n), or None for zeros.
        reset: (b, t) bool, or None.
    """

    u: Tensor
    a: Tensor
    growth: Tensor
    b: Tensor
    c: Tensor
    horizon: int
    state: Tensor | None
    reset: Tensor | None


def growing_ssm(given: GrowingSSM, mode: str) -> tuple[Tensor, Tensor]:
    """Run the model, and return y and the state as `diagonal_ssm` does.

    Outputs are right for sequences of up to H + 1 steps however large g is, and longer ones until they grow
    out of range. The state is e^(g H / 2) x, and right for g H < 170 in single precision. The same bound
    holds for the outputs of exported programs, and where time is split over processes.
    """
    if time_is_split() or exporting():
        # the first step of a call, or its length, is not known here
        u, a, growth, b, c, horizon, state, reset = given
        half = torch.exp(-growth * (horizon / 2))
        return diagonal_ssm(u, a * torch.exp(growth), b * half, c * half, state=state, reset=reset, mode=mode)
    return OPERATOR(given, mode, "auto")


def growing_kernel(a: Tensor, growth: Tensor, w: Tensor, horizon: int, length: int) -> Tensor:
    """Return the taps K (d, length), with w = c b."""
    return _taps(_tables(a, growth, length), a, growth, w, horizon)


def _recurrence(given: GrowingSSM, mode: str, backend: str) -> tuple[Tensor, Tensor]:
    u, a, growth, b, c, horizon, state, reset = given
    time = u.shape[1]
    # of step s, the scale is e^(g (n - s)): as large as it can be without an input getting large
    n = time - 1 + min(horizon / 2, horizon - time + 1)
    s = torch.arange(time, device=u.device, dtype=growth.dtype)[:, None, None]
    inputs = (b * torch.exp(-growth * (horizon - n + s))) * u.to(growth.dtype)[..., None]
    if state is not None:
        state = _raised(entering(state, reset), growth * (n + 1 - horizon / 2)).flatten(-2)
    x, last = scan(a.flatten(), inputs.flatten(-2), state=state, reset=reset, mode=mode, backend=backend)
    y = (c * _raised(x.unflatten(-1, a.shape), growth * (s - n))).sum(-1).real
    return y, _raised(last.unflatten(-1, a.shape), growth * (time - 1 - n + horizon / 2))


def _convolution(given: GrowingSSM, backend: str) -> tuple[Tensor, Tensor]:
    u, a, growth, b, c, horizon, state, reset = given
    time = u.shape[1]
    tables = _tables(a, growth, time, u.shape[0])
    kernel = _taps(tables, a, growth, c * b, horizon)
    y, _ = long_conv(u, kernel, reset=reset, mode="convolution", backend=backend)
    grows, turned = growth > 0, _turned(a, growth, time)

    def last(u: Tensor) -> Tensor:
        from_first = turned * weighted_by_age(tables, u.flip(1))
        from_first = _raised(from_first, growth * (time - 1 - horizon / 2))
        return b * torch.where(grows, from_first, weighted_by_age(tables, u))

    def response(state: Tensor) -> tuple[Tensor, Tensor]:
        # a step from now, and at the end
        now, end = a * state, a * turned * state
        weights = torch.stack([c * now * ~grows, c * _raised(end, growth * (time - horizon / 2)) * grows])
        forwards, backwards = sums_of_powers(tables, weights)
        through = torch.where(grows, _raised(end, growth * time), last_power(tables) * now)
        return (forwards + backwards.flip(-1)).mT, through

    return convolved(y, u.to(growth.dtype), state, reset, last, response)


OPERATOR = replace(
    DIAGONAL,
    name="growing_ssm",
    inputs=GrowingSSM,
    canonical=lambda given: given,
    backends=backends(_convolution, _recurrence),
)


def _tables(a: Tensor, growth: Tensor, time: int, rows: int = 1) -> Powers:
    """Powers of a, or of 1 / (a e^g) where it grows."""
    return powers(torch.where(growth > 0, a.conj(), a) * torch.exp(-growth), time, rows)


def _turned(a: Tensor, growth: Tensor, time: int) -> Tensor:
    """a^(time - 1) where it grows, else 1."""
    return last_power(powers(torch.where(growth > 0, a, 1), time))


def _taps(tables: Powers, a: Tensor, growth: Tensor, w: Tensor, horizon: int) -> Tensor:
    """K of w = c b; taps that grow are made from the last to the first."""
    time, grows = tables.length, growth > 0
    last = _raised(w * _turned(a, growth, time), growth * (time - 1 - horizon))
    forwards, backwards = sums_of_powers(tables, torch.stack([w * ~grows, last * grows]))
    return forwards + backwards.flip(-1)


def _raised(x: Tensor, exponent: Tensor) -> Tensor:
    """x e^exponent, zero where x is, and right where x is as small as the exponential is large."""
    largest = math.log(torch.finfo(real_dtype(x.dtype)).max)
    half = torch.exp(exponent.clamp(max=2 * largest) / 2)
    return x * half * half
