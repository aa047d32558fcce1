"""CPU loops of the elementwise recurrence; imported at the first use, because importing Numba is slow.

A lane is one batch row and a run of channels; lanes run in parallel, time runs inside a lane, and the
innermost loop over channels is contiguous in every tensor, so that it becomes vector instructions. Each axis
of `a` has full size or 1. Only the thin loops over lanes are `parallel`: that transformation is what takes
Numba long to compile. Arrays are indexed and not
sliced, because Numba counts references to a slice's array, which takes longer than a narrow step; indices are
unsigned, because a signed one may count from the end, and then loops do not become vector instructions.
"""

import numba
import numpy as np

from linrec.ops.kernels.lanes import lane_kernel

SPAN = 256
"""Where `a` is constant in time, its gradient is summed over runs of so many steps, and the runs by torch:
one long sum in float32 would lose digits."""


@lane_kernel()
def _forward_lane(a, x, cut, y, carry, row, lo, hi, reverse):  # type: ignore[no-untyped-def]
    zero, one = np.uint64(0), np.uint64(1)
    time = np.uint64(x.shape[1])
    a_row = row if a.shape[0] > 1 else zero
    # `carry` stays in the first cache, where y would have to be read back
    for step in range(time):
        t = time - one - step if reverse else step
        a_t = t if a.shape[1] > 1 else zero
        if cut.size > 0 and cut[row, t]:
            for c in range(lo, hi):
                carry[c - lo] = x[row, t, c]
                y[row, t, c] = carry[c - lo]
        elif a.shape[2] > 1:
            for c in range(lo, hi):
                carry[c - lo] = a[a_row, a_t, c] * carry[c - lo] + x[row, t, c]
                y[row, t, c] = carry[c - lo]
        else:
            link = a[a_row, a_t, zero]
            for c in range(lo, hi):
                carry[c - lo] = link * carry[c - lo] + x[row, t, c]
                y[row, t, c] = carry[c - lo]


@lane_kernel()
def _backward_lane(a, before, cut, dy, da, dx, carry, block, row, lo, hi, first, stop, reverse):  # type: ignore[no-untyped-def]
    zero, one = np.uint64(0), np.uint64(1)
    time = np.uint64(dy.shape[1])
    a_row, a_moves, a_wide = row if a.shape[0] > 1 else zero, a.shape[1] > 1, a.shape[2] > 1
    # the adjoint runs against the recurrence, whose first step came from the initial state
    for step in range(first, stop):
        t = step if reverse else time - one - step
        t_before = zero if stop == time else t + one if reverse else t - one
        a_t, da_t = (t, t) if a_moves else (zero, t // np.uint64(SPAN))
        linked = cut.size == 0 or not cut[row, t]
        if linked and a_wide and a_moves and da.size > 0:
            # every step and channel has its own link: the common case, in one pass over the channels
            for c in range(lo, hi):
                gradient = carry[c - lo] + dy[row, t, c]
                dx[row, t, c] = gradient
                da[row, t, c] = gradient * np.conj(before[row, t_before, c])
                carry[c - lo] = np.conj(a[a_row, t, c]) * gradient
            continue
        for c in range(lo, hi):
            carry[c - lo] += dy[row, t, c]
            dx[row, t, c] = carry[c - lo]
        if not linked:
            for c in range(lo, hi):
                carry[c - lo] = 0
                if a_wide and a_moves and da.size > 0:
                    da[row, t, c] = 0
        elif a_wide:
            if da.size > 0:
                for c in range(lo, hi):
                    da[row, da_t, c] += carry[c - lo] * np.conj(before[row, t_before, c])
            for c in range(lo, hi):
                carry[c - lo] *= np.conj(a[a_row, a_t, c])
        else:
            if da.size > 0:
                total = da[row, da_t, block]
                for c in range(lo, hi):
                    total += carry[c - lo] * np.conj(before[row, t_before, c])
                da[row, da_t, block] = total
            link = np.conj(a[a_row, a_t, zero])
            for c in range(lo, hi):
                carry[c - lo] *= link


@numba.njit(cache=True)
def forward(a, x, cut, last, y, width, reverse, first, stop):  # type: ignore[no-untyped-def]
    """Fill y (b, t, c) for the lanes from first to stop, and turn last (b, c) from first state into last one.

    A lane has `width` channels.
    """
    channels = np.uint64(x.shape[2])
    width = np.uint64(width)
    blocks = (channels + width - np.uint64(1)) // width
    # not in `last` itself, where other threads write next to it
    carry = np.empty(width, last.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, lo = lane // blocks, lane % blocks * width
        hi = min(lo + width, channels)
        for c in range(lo, hi):
            carry[c - lo] = last[row, c]
        _forward_lane(a, x, cut, y, carry, row, lo, hi, reverse)
        for c in range(lo, hi):
            last[row, c] = carry[c - lo]


@numba.njit(cache=True)
def backward(a, y, cut, state, dy, da, dx, dstate, width, reverse, first, stop):  # type: ignore[no-untyped-def]
    """Fill dx (b, t, c) and, unless it is empty, da for the lanes from first to stop.

    `state` is (b, 1, c). dstate (b, c) comes as the last state's gradient and goes as the first one's. da
    has a row for every batch row; where `a` is constant in time, one step for each `SPAN` steps; where `a` is
    constant over channels, one column for each lane of the row. It comes zeroed where `a` is constant.
    """
    channels, time = np.uint64(y.shape[2]), np.uint64(y.shape[1])
    width = np.uint64(width)
    blocks = (channels + width - np.uint64(1)) // width
    start, end = np.uint64(0), time - np.uint64(1)
    carry = np.empty(width, dstate.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, block = lane // blocks, lane % blocks
        lo, hi = block * width, min(block * width + width, channels)
        for c in range(lo, hi):
            carry[c - lo] = dstate[row, c]
        _backward_lane(a, y, cut, dy, da, dx, carry, block, row, lo, hi, start, end, reverse)
        _backward_lane(a, state, cut, dy, da, dx, carry, block, row, lo, hi, end, time, reverse)
        for c in range(lo, hi):
            dstate[row, c] = carry[c - lo]


@numba.njit(cache=True, parallel=True)
def forward_parallel(a, x, cut, last, y, width, reverse, lanes):  # type: ignore[no-untyped-def]
    """Do the same for all lanes, spread over Numba's threads."""
    for lane in numba.prange(lanes):
        forward(a, x, cut, last, y, width, reverse, lane, lane + 1)


@numba.njit(cache=True, parallel=True)
def backward_parallel(a, y, cut, state, dy, da, dx, dstate, width, reverse, lanes):  # type: ignore[no-untyped-def]
    """Do the same for all lanes, spread over Numba's threads."""
    for lane in numba.prange(lanes):
        backward(a, y, cut, state, dy, da, dx, dstate, width, reverse, lane, lane + 1)
