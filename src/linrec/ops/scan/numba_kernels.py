"""CPU loops of the elementwise recurrence; imported at the first use, because importing Numba is slow.

A lane is one batch row and a run of channels; lanes run in parallel, time runs inside a lane, and the
innermost loop over channels is contiguous in every tensor, so that it becomes vector instructions. Each axis
of `a` has full size or 1. Only the thin loops over lanes are `parallel`: that transformation is what takes
Numba long to compile.
"""

import numba
import numpy as np

SPAN = 256
"""Where `a` is constant in time, its gradient is summed over runs of so many steps, and the runs by torch:
one long sum in float32 would lose digits."""

# fused multiply-add is allowed, reordering sums and ignoring NaN is not
_FASTMATH = {"contract"}


@numba.njit(cache=True, fastmath=_FASTMATH)
def _forward_lane(a, x, cut, state, y, last, row, lo, hi, reverse):  # type: ignore[no-untyped-def]
    time = x.shape[1]
    a_row, a_moves, a_wide = row % a.shape[0], a.shape[1] > 1, a.shape[2] > 1
    before = state[row, lo:hi]
    for step in range(time):
        t = time - 1 - step if reverse else step
        a_t = t if a_moves else 0
        here = y[row, t, lo:hi]
        x_here = x[row, t, lo:hi]
        if cut.size > 0 and cut[row, t]:
            for c in range(here.size):
                here[c] = x_here[c]
        elif a_wide:
            a_here = a[a_row, a_t, lo:hi]
            for c in range(here.size):
                here[c] = a_here[c] * before[c] + x_here[c]
        else:
            link = a[a_row, a_t, 0]
            for c in range(here.size):
                here[c] = link * before[c] + x_here[c]
        before = here
    last[row, lo:hi] = before


@numba.njit(cache=True, fastmath=_FASTMATH)
def _backward_lane(a, y, cut, state, dy, dlast, da, dx, dstate, block, row, lo, hi, reverse):  # type: ignore[no-untyped-def]
    time = y.shape[1]
    a_row, a_moves, a_wide = row % a.shape[0], a.shape[1] > 1, a.shape[2] > 1
    carry = dstate[row, lo:hi]
    carry[:] = dlast[row, lo:hi]
    for step in range(time):
        # the adjoint runs against the recurrence, whose first step came from `state`
        t = step if reverse else time - 1 - step
        before = state[row, lo:hi] if step == time - 1 else y[row, t + 1 if reverse else t - 1, lo:hi]
        a_t = t if a_moves else 0
        linked = cut.size == 0 or not cut[row, t]
        dy_here = dy[row, t, lo:hi]
        dx_here = dx[row, t, lo:hi]
        if linked and a_wide and a_moves and da.size > 0:
            # every step and channel has its own link: the common case, in one pass over the channels
            a_here = a[a_row, a_t, lo:hi]
            da_here = da[row, t, lo:hi]
            for c in range(carry.size):
                gradient = carry[c] + dy_here[c]
                dx_here[c] = gradient
                da_here[c] = gradient * np.conj(before[c])
                carry[c] = np.conj(a_here[c]) * gradient
            continue
        for c in range(carry.size):
            carry[c] += dy_here[c]
            dx_here[c] = carry[c]
        if not linked:
            carry[:] = 0
            continue
        if da.size > 0:
            da_t = t if a_moves else t // SPAN
            if a_wide:
                da_here = da[row, da_t, lo:hi]
                for c in range(carry.size):
                    da_here[c] += carry[c] * np.conj(before[c])
            else:
                total = da[row, da_t, block]
                for c in range(carry.size):
                    total += carry[c] * np.conj(before[c])
                da[row, da_t, block] = total
        if a_wide:
            a_here = a[a_row, a_t, lo:hi]
            for c in range(carry.size):
                carry[c] *= np.conj(a_here[c])
        else:
            link = np.conj(a[a_row, a_t, 0])
            for c in range(carry.size):
                carry[c] *= link


@numba.njit(cache=True)
def forward(a, x, cut, state, y, last, width, reverse, first, stop):  # type: ignore[no-untyped-def]
    """Fill y (b, t, c) and last (b, c) for the lanes from first to stop; a lane has `width` channels."""
    channels = x.shape[2]
    blocks = (channels + width - 1) // width
    for lane in range(first, stop):
        lo = lane % blocks * width
        _forward_lane(a, x, cut, state, y, last, lane // blocks, lo, min(lo + width, channels), reverse)


@numba.njit(cache=True)
def backward(a, y, cut, state, dy, dlast, da, dx, dstate, width, reverse, first, stop):  # type: ignore[no-untyped-def]
    """Fill dx (b, t, c) and dstate (b, c) for the lanes from first to stop, and add to da unless it is empty.

    da has a row for every batch row; where `a` is constant in time, one step for each `SPAN` steps; where `a`
    is constant over channels, one column for each lane of the row.
    """
    channels = y.shape[2]
    blocks = (channels + width - 1) // width
    for lane in range(first, stop):
        block = lane % blocks
        lo, hi = block * width, min(block * width + width, channels)
        _backward_lane(a, y, cut, state, dy, dlast, da, dx, dstate, block, lane // blocks, lo, hi, reverse)


@numba.njit(cache=True, parallel=True)
def forward_parallel(a, x, cut, state, y, last, width, reverse, lanes):  # type: ignore[no-untyped-def]
    """Do the same for all lanes, spread over Numba's threads."""
    for lane in numba.prange(lanes):
        forward(a, x, cut, state, y, last, width, reverse, lane, lane + 1)


@numba.njit(cache=True, parallel=True)
def backward_parallel(a, y, cut, state, dy, dlast, da, dx, dstate, width, reverse, lanes):  # type: ignore[no-untyped-def]
    """Do the same for all lanes, spread over Numba's threads."""
    for lane in numba.prange(lanes):
        backward(a, y, cut, state, dy, dlast, da, dx, dstate, width, reverse, lane, lane + 1)
