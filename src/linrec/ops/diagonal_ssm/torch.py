"""The model as a convolution, and as `scan` on one channel per entry of its state.

Arguments and results as in `reference.py`.
"""

from torch import Tensor

from linrec.ops.core import stationary
from linrec.ops.core.isolation import entering
from linrec.ops.dispatch import Pair, exporting
from linrec.ops.long_conv import long_conv
from linrec.ops.long_conv.powers import last_power, power_tables, powers, sums_of_powers, weighted_by_age
from linrec.ops.precision import accumulation
from linrec.ops.scan import scan


def convolution(
    u: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    reset: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """y = K * u + the response of the initial state; the last state is a sum over all steps."""
    if exporting():
        return _any_length(u, a, b, c, state, reset)
    batch, time, _ = u.shape
    tables = powers(a, time, batch)
    y, _ = long_conv(u, sums_of_powers(tables, c * b), reset=reset, mode="convolution", backend=backend)
    inputs = u.to(accumulation(u.dtype))
    if reset is not None:
        # those from the last reset on
        later = reset.flip(1).cumsum(1).flip(1) - reset.long()
        inputs = inputs.masked_fill(later[..., None] > 0, 0)
    last = b * weighted_by_age(tables, inputs)
    if state is None:
        return y, last
    state = entering(state, reset)
    # a step from now, the state is a x, and no other power of a is needed
    response, through = sums_of_powers(tables, c * a * state).mT, last_power(tables) * a * state
    if reset is not None:
        response = response.masked_fill(reset.cumsum(1)[..., None] > 0, 0)
        through = through.masked_fill(reset.any(1)[:, None, None], 0)
    return y + response, last + through


def _any_length(
    u: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    near, far = (table.to(a.dtype) for table in power_tables(a, stationary.BLOCK, 2))
    columns, rows = b[..., None] * near, ((c * a)[..., None] * near).mT[:, None]
    taps = (c[..., None] * columns).sum(1, keepdim=True)
    squares = [near[..., 1 << bit] for bit in range(stationary.BLOCK.bit_length() - 1)]
    taps = taps.real if taps.is_complex() else taps
    tables = stationary.Tables([*squares, far[..., 1]], columns, rows, taps)
    y, last = stationary.stationary(u.to(accumulation(u.dtype)), tables, state, reset)
    return (y.real if y.is_complex() else y)[..., 0], last


def recurrence(
    u: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    reset: Tensor | None,
    pair: Pair,
) -> tuple[Tensor, Tensor]:
    """All states by `scan`, then what they give."""
    mode, backend = pair
    inputs = (b * u.to(a.dtype)[..., None]).flatten(-2)
    before = None if state is None else state.flatten(-2)
    x, last = scan(a.expand_as(c).flatten(), inputs, state=before, reset=reset, mode=mode, backend=backend)
    y = (c * x.unflatten(-1, c.shape)).sum(-1)
    return y.real if y.is_complex() else y, last.unflatten(-1, c.shape)
