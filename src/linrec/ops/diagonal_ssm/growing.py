"""A diagonal model whose entries may grow, until a horizon H at which their taps are largest.

    x_t = a e^g * x_{t-1} + b e^(-g H) u_t    y_t = Re(sum_n c_n x_tn)
    K_l = Re(sum_n c_n b_n a_n^l e^(g_n (l - H)))

with g >= 0, and |a| = 1 where g > 0. No tap up to the horizon is large, but e^(g H) and its reciprocal are
out of range in single precision where g H > 88. So states are scaled with time during a call: at its step s,
e^(g (n - s)) x_s has transitions of a alone. The state that a call returns is e^(g H / 2) x, in the middle of
the range.
"""

import math

import torch
from torch import Tensor

from linrec.ops import splitting
from linrec.ops.core.isolation import entering
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.diagonal_ssm.auto import pair_of
from linrec.ops.dispatch import Pair, exporting
from linrec.ops.long_conv import long_conv
from linrec.ops.long_conv.powers import Powers, last_power, powers, sums_of_powers, weighted_by_age
from linrec.ops.precision import real_dtype, without_autocast
from linrec.ops.scan import scan


def growing_ssm(
    u: Tensor,
    a: Tensor,
    growth: Tensor,
    b: Tensor,
    c: Tensor,
    horizon: int,
    *,
    state: Tensor | None,
    reset: Tensor | None,
    mode: str,
) -> tuple[Tensor, Tensor]:
    """Run the model; arguments and results are those of `diagonal_ssm` beside g (d, n) and H.

    Outputs are right for sequences of up to H + 1 steps however large g is, and longer ones until they grow
    out of range. The state is e^(g H / 2) x, and right for g H < 170 in single precision. The same bound
    holds for the outputs of exported programs, and where time is split over processes.
    """
    if splitting.current is not None or exporting() or u.numel() == 0:
        # the first step of a call, or its length, is not known here
        half = torch.exp(-growth * (horizon / 2))
        return diagonal_ssm(u, a * torch.exp(growth), b * half, c * half, state=state, reset=reset, mode=mode)
    pair = pair_of(u, a.shape[1], mode, "auto")
    state = None if state is None else entering(state.to(a.dtype), reset)
    with without_autocast(u.device.type):
        if pair[0] == "convolution":
            y, last = _convolution(u, a, growth, b, c, horizon, state, reset)
        else:
            y, last = _recurrence(u, a, growth, b, c, horizon, state, reset, pair)
    return y.to(u.dtype), last


def growing_kernel(a: Tensor, growth: Tensor, w: Tensor, horizon: int, length: int) -> Tensor:
    """Return the taps K (d, length), with w = c b."""
    return _taps(_tables(a, growth, length), a, growth, w, horizon)


def _recurrence(
    u: Tensor,
    a: Tensor,
    growth: Tensor,
    b: Tensor,
    c: Tensor,
    horizon: int,
    state: Tensor | None,
    reset: Tensor | None,
    pair: Pair,
) -> tuple[Tensor, Tensor]:
    mode, backend = pair
    time = u.shape[1]
    # of step s, the scale is e^(g (n - s)): as large as it can be without an input getting large
    n = time - 1 + min(horizon / 2, horizon - time + 1)
    s = torch.arange(time, device=u.device, dtype=growth.dtype)[:, None, None]
    inputs = (b * torch.exp(-growth * (horizon - n + s))) * u.to(growth.dtype)[..., None]
    before = None if state is None else _raised(state, growth * (n + 1 - horizon / 2)).flatten(-2)
    x, last = scan(a.flatten(), inputs.flatten(-2), state=before, reset=reset, mode=mode, backend=backend)
    y = (c * _raised(x.unflatten(-1, a.shape), growth * (s - n))).sum(-1).real
    return y, _raised(last.unflatten(-1, a.shape), growth * (time - 1 - n + horizon / 2))


def _convolution(
    u: Tensor,
    a: Tensor,
    growth: Tensor,
    b: Tensor,
    c: Tensor,
    horizon: int,
    state: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, time, _ = u.shape
    tables = _tables(a, growth, time, batch)
    y, _ = long_conv(u, _taps(tables, a, growth, c * b, horizon), reset=reset, mode="convolution")
    inputs = u.to(growth.dtype)
    if reset is not None:
        # those from the last reset on
        later = reset.flip(1).cumsum(1).flip(1) - reset.long()
        inputs = inputs.masked_fill(later[..., None] > 0, 0)
    grows, turned = growth > 0, _turned(a, growth, time)
    from_first = _raised(turned * weighted_by_age(tables, inputs.flip(1)), growth * (time - 1 - horizon / 2))
    last = b * torch.where(grows, from_first, weighted_by_age(tables, inputs))
    if state is None:
        return y, last
    # a step from now, and at the end
    now, end = a * state, a * turned * state
    weights = torch.stack([c * now * ~grows, c * _raised(end, growth * (time - horizon / 2)) * grows])
    forwards, backwards = sums_of_powers(tables, weights)
    response = (forwards + backwards.flip(-1)).mT
    through = torch.where(grows, _raised(end, growth * time), last_power(tables) * now)
    if reset is not None:
        response = response.masked_fill(reset.cumsum(1)[..., None] > 0, 0)
        through = through.masked_fill(reset.any(1)[:, None, None], 0)
    return y + response, last + through


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
