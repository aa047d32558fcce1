"""The elementwise recurrence on the CPU by Numba."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from linrec.ops.core.kernel import NOTHING, like
from linrec.ops.core.precision import accumulation
from linrec.ops.kernels import Kernels, lanes
from linrec.ops.scan.torch import Scan, Values, kernel

KERNELS = Kernels("scan_numba")


def _forward(out: Values, given: Scan) -> None:
    a, x, state, cut, reverse = given
    y = out.y if out.y.dtype == out.last.dtype else lanes.empty(x.shape, out.last.dtype)
    _start(out.last, state)
    with lanes.threads_for(x.numel()) as threads:
        width = lanes.width_of(x, threads)
        arrays = lanes.array(a), lanes.array(x), lanes.cut_array(cut), out.last.numpy(), y.numpy()
        lanes.run(KERNELS, "forward", (*arrays, width, reverse), lanes.count(x, width), threads)
    if y is not out.y:
        out.y.copy_(y)


def _gradients(given: Scan, kept: Values, d: Values, needs: Sequence[bool]) -> Any:
    dtype = accumulation(kept.y.dtype)
    return like(given.a if needs[0] else None, dtype), like(kept.y, dtype), like(d.last), NOTHING


def _adjoint(out: Any, given: Scan, kept: Values, d: Values) -> None:
    a, _, state, cut, reverse = given
    y, dx, dstate = kept.y, out.x, out.state
    dstate.copy_(d.last)
    before = dstate.new_empty(dstate.shape)
    _start(before, state)
    with lanes.threads_for(y.numel()) as threads:
        width = lanes.width_of(y, threads)
        sums = (0, 0, 0) if out.a is None else _partial_sums(a, y, width)
        da = out.a if out.a is not None and out.a.shape == sums else lanes.empty(sums, dx.dtype)
        # what the kernel adds up, it does not write first
        if 1 in a.shape[1:]:
            da.zero_()
        arrays = (
            lanes.array(a),
            lanes.array(y),
            lanes.cut_array(cut),
            before[:, None].numpy(),
            lanes.array(d.y),
        )
        gradients = da.numpy(), dx.numpy(), dstate.numpy()
        lanes.run(KERNELS, "backward", (*arrays, *gradients, width, reverse), lanes.count(y, width), threads)
    if out.a is not None and da is not out.a:
        out.a.copy_(da.sum_to_size(a.shape))


def _partial_sums(a: Tensor, y: Tensor, width: int) -> tuple[int, int, int]:
    batch, time, channels = y.shape
    steps = time if a.shape[1] > 1 else math.ceil(time / KERNELS.SPAN)
    return batch, steps, channels if a.shape[2] > 1 else math.ceil(channels / width)


def _start(carry: Tensor, state: Tensor | None) -> None:
    carry.zero_() if state is None else carry.copy_(state)


recurrent = kernel("scan_numba", forward=_forward, adjoint=_adjoint, gradients=_gradients)
