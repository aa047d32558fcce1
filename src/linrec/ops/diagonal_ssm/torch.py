"""The model as a convolution, and as `scan` on one channel per entry of its state."""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from linrec.ops.core.backends import Backend, few
from linrec.ops.core.handlers import time_is_split
from linrec.ops.core.machine import exporting
from linrec.ops.core.precision import wide
from linrec.ops.core.stationary import BLOCK, Run, Tables, convolutions, convolved, stationary
from linrec.ops.long_conv import long_conv
from linrec.ops.long_conv.powers import last_power, power_tables, powers, sums_of_powers, weighted_by_age
from linrec.ops.scan import BACKENDS, scan
from linrec.ops.scan.torch import Scan


class DiagonalSSM(NamedTuple):
    """What backends take.

    Attributes:
        u: (b, t, d).
        a: (d, n) or (1, n), in the dtype of the state.
        b: as a.
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


def backends(convolution: Run, recurrence: Run) -> list[Backend]:
    """Return the table of a diagonal model.

    The states of all steps are n times as large as the input. They are formed for few steps, of which there
    is little to convolve, and where time is split: a convolution needs all steps.

    Args:
        convolution: runs inputs with the `backend` of `long_conv`.
        recurrence: runs inputs with the `mode` and `backend` of `scan`, on the d n channels of the state.
    """

    def by_scan(entry: Backend) -> Backend:
        def auto(given: Any) -> bool:
            return entry.auto(Scan(given.a, given.u, given.state, given.reset, False))

        run = partial(recurrence, mode=entry.mode, backend=entry.name)
        return Backend(entry.mode, entry.name, run, f"all states by `scan`: {entry.about}", auto=auto)

    # one step is the first of `scan`
    first, *others = [by_scan(entry) for entry in BACKENDS if entry.name != "reference"]
    long = convolutions(convolution, lambda given: not few(given.u.shape[1], 16) and not time_is_split())
    return [first, *long, *others]


def convolution(given: DiagonalSSM, backend: str) -> tuple[Tensor, Tensor]:
    """y = K * u + the response of the initial state; the last state is a sum over all steps."""
    if exporting():
        return _any_length(given)
    u, a, b, c, state, reset = given
    tables = powers(a, u.shape[1], u.shape[0])
    y, _ = long_conv(u, sums_of_powers(tables, c * b), reset=reset, mode="convolution", backend=backend)

    def response(x: Tensor) -> tuple[Tensor, Tensor]:
        # a step from now, the state is a x, and no other power of a is needed
        return sums_of_powers(tables, c * a * x).mT, last_power(tables) * a * x

    return convolved(y, wide(u), state, reset, lambda u: b * weighted_by_age(tables, u), response)


def _any_length(given: DiagonalSSM) -> tuple[Tensor, Tensor]:
    u, a, b, c, state, reset = given
    near, far = (table.to(a.dtype) for table in power_tables(a, BLOCK, 2))
    columns, rows = b[..., None] * near, ((c * a)[..., None] * near).mT[:, None]
    taps = (c[..., None] * columns).sum(1, keepdim=True).real
    squares = [near[..., 1 << bit] for bit in range(BLOCK.bit_length() - 1)]
    y, last = stationary(wide(u), Tables([*squares, far[..., 1]], columns, rows, taps), state, reset)
    return y.real[..., 0], last


def recurrence(given: DiagonalSSM, mode: str, backend: str) -> tuple[Tensor, Tensor]:
    """All states by `scan`, then the outputs."""
    u, a, b, c, state, reset = given
    state = None if state is None else state.flatten(-2)
    inputs = (b * u[..., None]).flatten(-2)
    x, last = scan(a.expand_as(c).flatten(), inputs, state=state, reset=reset, mode=mode, backend=backend)
    return (c * x.unflatten(-1, c.shape)).sum(-1).real, last.unflatten(-1, c.shape)
