"""The elementwise recurrence on the CPU by Numba."""

import math
from collections.abc import Sequence

from linrec.ops.core.kernel import NOTHING, Gradients, Space, add_up, like, terms
from linrec.ops.core.precision import accumulation
from linrec.ops.kernels import launch
from linrec.ops.kernels.launch import Kernels
from linrec.ops.scan.torch import Scan, Values, kernel

KERNELS = Kernels("elementwise.numba")


def _forward(out: Values, given: Scan) -> None:
    a, x, state, cut, reverse = given
    y = out.y if out.y.dtype == out.last.dtype else launch.empty(x.shape, out.last.dtype)
    start = out.last.zero_() if state is None else state
    work = launch.lanes_of(x)
    arrays = *map(launch.array, (a, x)), launch.cut_array(cut), launch.array(start)
    work.run(KERNELS, "scan_forward", *arrays, out.last.numpy(), y.numpy(), work.width, reverse)
    if y is not out.y:
        out.y.copy_(y)


def _gradients(given: Scan, kept: Values, d: Values, needs: Sequence[bool]) -> tuple[Space, ...]:
    dtype = accumulation(kept.y.dtype)
    return like(given.a if needs[0] else None, dtype), like(kept.y, dtype), like(d.last), NOTHING


def _adjoint(out: Gradients, given: Scan, kept: Values, d: Values) -> None:
    a, _, state, cut, reverse = given
    y, dstate = kept.y, out.state
    dstate.copy_(d.last)
    before = dstate.new_empty(dstate.shape)
    before.zero_() if state is None else before.copy_(state)
    work = launch.lanes_of(y)
    if out.a is None:
        da = launch.empty((0, 0, 0), dstate.dtype)
    else:
        # partial sums over blocks of steps, and over the lanes of a batch row
        steps = y.shape[1] if a.shape[1] > 1 else math.ceil(y.shape[1] / KERNELS.SPAN)
        da = terms(out.a, (y.shape[0], steps, y.shape[2] if a.shape[2] > 1 else work.blocks))
    # the kernel adds to the partial sums
    if 1 in a.shape[1:]:
        da.zero_()
    arrays = *map(launch.array, (a, y)), launch.cut_array(cut), before[:, None].numpy(), launch.array(d.y)
    found = da.numpy(), out.x.numpy(), dstate.numpy()
    work.run(KERNELS, "scan_backward", *arrays, *found, work.width, reverse)
    add_up((out.a,), (da,))


recurrent = kernel("scan_numba", forward=_forward, adjoint=_adjoint, gradients=_gradients)
