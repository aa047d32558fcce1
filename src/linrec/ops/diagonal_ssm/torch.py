"""The model as a convolution, and as `scan` with a channel per entry of its state.

In the model of `GrowingSSM`, entries of the state may grow until a horizon H, where their taps are largest:

    x_t = a e^g * x_{t-1} + b e^(-g H) u_t    y_t = Re(sum_n c_n x_tn)
    K_l = Re(sum_n c_n b_n a_n^l e^(g_n (l - H)))

with g >= 0, and |a| = 1 where g > 0. Taps up to the horizon do not overflow, but in single precision e^(g H)
overflows for g H > 88. So states are rescaled over time within a call: at step s, the state
e^(g (n - s)) x_s has the transition a. The state that a call returns is e^(g H / 2) x, in the middle of the
range.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core import stationary
from linrec.ops.core.ambient import exporting
from linrec.ops.core.backends import Backend
from linrec.ops.core.call import time_is_split
from linrec.ops.core.isolation import entering
from linrec.ops.core.precision import real_dtype
from linrec.ops.core.stationary import BLOCK, Run, Values, convolved
from linrec.ops.long_conv import long_conv
from linrec.ops.long_conv.powers import Powers, power_tables, powers, sums_of_powers, weighted_by_age
from linrec.ops.scan import BACKENDS, scan
from linrec.ops.scan.torch import Scan


class DiagonalSSM(NamedTuple):
    """Canonical inputs of the backends.

    Attributes:
        u: (b, t, d).
        a: (d, n) or (1, n), in the dtype of the state.
        b: same shape and dtype as a.
        c: (d, n), in the dtype of the state.
        state: (b, d, n), or None for zeros.
        reset: (b, t) bool, or None.
    """

    u: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    state: Tensor | None
    reset: Tensor | None


class GrowingSSM(NamedTuple):
    """Canonical inputs: the inputs of `diagonal_ssm`, with g and H.

    Attributes:
        u: (b, t, d).
        a: (d, n), like all factors.
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


def backends(convolution: Run, recurrence: Run) -> list[Backend]:
    """Return the table of a diagonal model.

    The states of all steps are n times as large as the input. They are materialised for few steps, where a
    convolution is slower, and if time is split, because a convolution needs all steps.

    Args:
        convolution: runs inputs with the `backend` of `long_conv`.
        recurrence: runs inputs with the `mode` and `backend` of `scan`, on the d n channels of the state.
    """

    def by_scan(entry: Backend) -> Backend:
        def auto(given: Any) -> bool:
            return entry.auto(Scan(given.a, given.u, given.state, given.reset, False))

        run = partial(recurrence, mode=entry.mode, backend=entry.name)
        return Backend(entry.mode, entry.name, run, f"all states by `scan`: {entry.about}", auto=auto)

    def is_long(given: Any) -> bool:
        return not stationary.is_short(given) and not time_is_split()

    # the first entry of `scan` is for a single step
    first, *others = [by_scan(entry) for entry in BACKENDS if entry.name != "reference"]
    return [first, *stationary.convolutions(convolution, is_long), *others]


def convolution(given: DiagonalSSM, backend: str) -> Values:
    """Compute y = K * u + the response of the initial state; the last state is a sum over all steps."""
    u, a, b, c, _, reset = given
    if exporting():
        return _any_length(given)
    tables = powers(a, u.shape[1], u.shape[0])
    y, _ = long_conv(u, sums_of_powers(tables, c * b), reset=reset, mode="convolution", backend=backend)

    def response(x: Tensor) -> Values:
        # the first step multiplies the state by a, so the response needs the same powers of a
        return sums_of_powers(tables, c * a * x).mT, tables.last * a * x

    return convolved(y, given, lambda u: b * weighted_by_age(tables, u), response)


def _any_length(given: DiagonalSSM) -> Values:
    _, a, b, c, _, _ = given
    near, far = (table.to(a.dtype) for table in power_tables(a, BLOCK, 2))
    columns, rows = b[..., None] * near, ((c * a)[..., None] * near).mT[:, None]
    taps = (c[..., None] * columns).sum(1, keepdim=True).real
    squares = [near[..., 1 << bit] for bit in range(BLOCK.bit_length() - 1)]
    tables = stationary.Tables([*squares, far[..., 1]], columns, rows, taps)
    y, last = stationary.stationary(given, tables)
    return y.real[..., 0], last


def recurrence(given: DiagonalSSM, mode: str, backend: str) -> Values:
    """Compute all states by `scan`, then the outputs."""
    u, a, b, c, state, reset = given
    x, last = _states(a.expand_as(c), b * u[..., None], state, reset, mode, backend)
    return (c * x).sum(-1).real, last


def _states(
    a: Tensor, inputs: Tensor, state: Tensor | None, reset: Tensor | None, mode: str, backend: str
) -> Values:
    """Return all x_t = a * x_{t-1} + inputs_t, and the last state."""
    state = None if state is None else state.flatten(-2)
    x, last = scan(a.flatten(), inputs.flatten(-2), state=state, reset=reset, mode=mode, backend=backend)
    return x.unflatten(-1, a.shape), last.unflatten(-1, a.shape)


def growing_recurrence(given: GrowingSSM, mode: str, backend: str) -> Values:
    """Compute all states by `scan`, then the outputs."""
    u, a, growth, b, c, horizon, state, reset = given
    time = u.shape[1]
    # the scale at step s is e^(g (n - s)), with the largest n for which no input overflows
    n = time - 1 + min(horizon / 2, horizon - time + 1)
    s = torch.arange(time, device=u.device, dtype=growth.dtype)[:, None, None]
    inputs = (b * torch.exp(-growth * (horizon - n + s))) * u.to(growth.dtype)[..., None]
    if state is not None:
        state = _raised(entering(state, reset), growth * (n + 1 - horizon / 2))
    x, last = _states(a, inputs, state, reset, mode, backend)
    y = (c * _raised(x, growth * (s - n))).sum(-1).real
    return y, _raised(last, growth * (time - 1 - n + horizon / 2))


def growing_convolution(given: GrowingSSM, backend: str) -> Values:
    """Compute y = K * u + the response of the initial state; the last state is a sum over all steps."""
    u, a, growth, b, c, horizon, _, reset = given
    time = u.shape[1]
    tables = _tables(a, growth, time, u.shape[0])
    kernel = _taps(tables, a, growth, c * b, horizon)
    y, _ = long_conv(u, kernel, reset=reset, mode="convolution", backend=backend)
    grows, turned = growth > 0, _turned(a, growth, time)

    def last(u: Tensor) -> Tensor:
        from_first = turned * weighted_by_age(tables, u.flip(1))
        from_first = _raised(from_first, growth * (time - 1 - horizon / 2))
        return b * torch.where(grows, from_first, weighted_by_age(tables, u))

    def response(state: Tensor) -> Values:
        # after the first step, and at the end
        now, end = a * state, a * turned * state
        weights = torch.stack([c * now * ~grows, c * _raised(end, growth * (time - horizon / 2)) * grows])
        forwards, backwards = sums_of_powers(tables, weights)
        through = torch.where(grows, _raised(end, growth * time), tables.last * now)
        return (forwards + backwards.flip(-1)).mT, through

    return convolved(y, given, last, response)


def _tables(a: Tensor, growth: Tensor, time: int, rows: int = 1) -> Powers:
    """Return powers of a, or of 1 / (a e^g) for growing entries."""
    return powers(torch.where(growth > 0, a.conj(), a) * torch.exp(-growth), time, rows)


def _turned(a: Tensor, growth: Tensor, time: int) -> Tensor:
    """Return a^(time - 1) for growing entries, else 1."""
    return powers(torch.where(growth > 0, a, 1), time).last


def _taps(tables: Powers, a: Tensor, growth: Tensor, w: Tensor, horizon: int) -> Tensor:
    """Return K for w = c b; taps of growing entries are computed from the last to the first."""
    time, grows = tables.length, growth > 0
    last = _raised(w * _turned(a, growth, time), growth * (time - 1 - horizon))
    forwards, backwards = sums_of_powers(tables, torch.stack([w * ~grows, last * grows]))
    return forwards + backwards.flip(-1)


def _raised(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x e^exponent, zero if x is zero; correct even if only the exponential overflows."""
    largest = math.log(torch.finfo(real_dtype(x.dtype)).max)
    half = torch.exp(exponent.clamp(max=2 * largest) / 2)
    return x * half * half
