"""CPU loops of the selective scan; imported at the first use, because importing Numba is slow.

A lane is a batch row and a range of channels, whose states (n, width) stay in the L1 cache over time: the
innermost loops are over its channels. A state is saved per chunk of steps; the adjoint recomputes the others,
chunk by chunk. A and D have a single row, or a row for each batch row.
"""

import numba
import numpy as np

from linrec.ops.kernels.elementwise.numba import exponential
from linrec.ops.kernels.launch import lane_kernel


@lane_kernel()
def _forward_lane(x, dt, A, B, C, D, cut, h, u, out, starts, y, size, row, lo, hi):  # type: ignore[no-untyped-def]
    zero = np.uint64(0)
    own, own_D = row if A.shape[0] > 1 else zero, row if D.shape[0] > 1 else zero
    width, states = hi - lo, np.uint64(A.shape[1])
    for t in range(np.uint64(x.shape[1])):
        if starts.size > 0 and t % size == zero:
            for n in range(states):
                for c in range(width):
                    starts[row, t // size, n, lo + c] = h[n, c]
        if cut.size > 0 and cut[row, t]:
            for n in range(states):
                for c in range(width):
                    h[n, c] = 0
        for c in range(width):
            u[c] = dt[row, t, lo + c] * x[row, t, lo + c]
            out[c] = D[own_D, lo + c] * x[row, t, lo + c]
        for n in range(states):
            b, seen = B[row, t, n], C[row, t, n]
            for c in range(width):
                h[n, c] = exponential(dt[row, t, lo + c] * A[own, n, lo + c]) * h[n, c] + b * u[c]
                out[c] += seen * h[n, c]
        for c in range(width):
            y[row, t, lo + c] = out[c]


@lane_kernel()
def _refill(x, dt, A, B, cut, starts, h, a, w, u, chunk, row, lo, hi, t0, t1):  # type: ignore[no-untyped-def]
    """Fill the links a and w_t = a_t h_{t-1} for the steps of a chunk."""
    zero = np.uint64(0)
    own = row if A.shape[0] > 1 else zero
    width, states = hi - lo, np.uint64(A.shape[1])
    for n in range(states):
        for c in range(width):
            h[n, c] = starts[row, chunk, n, lo + c]
    for t in range(t0, t1):
        i = t - t0
        for c in range(width):
            u[c] = dt[row, t, lo + c] * x[row, t, lo + c]
        if cut.size > 0 and cut[row, t]:
            for n in range(states):
                for c in range(width):
                    a[i, n, c] = 0
                    w[i, n, c] = 0
                    h[n, c] = B[row, t, n] * u[c]
        else:
            for n in range(states):
                b = B[row, t, n]
                for c in range(width):
                    a[i, n, c] = exponential(dt[row, t, lo + c] * A[own, n, lo + c])
                    w[i, n, c] = a[i, n, c] * h[n, c]
                    h[n, c] = w[i, n, c] + b * u[c]


# sums over channels may be reordered, so that they are vectorised
@lane_kernel(fastmath={"contract", "reassoc"})
def _adjoint(  # type: ignore[no-untyped-def]
    x, dt, A, B, C, D, cut, dy, a, w, carry, u, gB, gAw, dx, ddt, dA, dB, dC, dD, block, row, lo, hi, t0, t1
):
    zero, one = np.uint64(0), np.uint64(1)
    own, own_D = row if A.shape[0] > 1 else zero, row if D.shape[0] > 1 else zero
    width, states = hi - lo, np.uint64(A.shape[1])
    for step in range(t1 - t0):
        i = t1 - t0 - one - step
        t = t0 + i
        for c in range(width):
            u[c] = dt[row, t, lo + c] * x[row, t, lo + c]
            gB[c], gAw[c] = 0, 0
        for n in range(states):
            b, seen = B[row, t, n], C[row, t, n]
            of_B, of_C = x.dtype.type(0), x.dtype.type(0)
            for c in range(width):
                of_B += (seen * dy[row, t, lo + c] + carry[n, c]) * u[c]
                of_C += dy[row, t, lo + c] * (w[i, n, c] + b * u[c])
            for c in range(width):
                g = seen * dy[row, t, lo + c] + carry[n, c]
                gw = g * w[i, n, c]
                gB[c] += g * b
                gAw[c] += gw * A[own, n, lo + c]
                dA[row, n, lo + c] += gw * dt[row, t, lo + c]
                carry[n, c] = a[i, n, c] * g
            dB[block, row, t, n], dC[block, row, t, n] = of_B, of_C
        # zero times infinity is NaN, so clear explicitly
        if cut.size > 0 and cut[row, t]:
            for n in range(states):
                for c in range(width):
                    carry[n, c] = 0
        for c in range(width):
            dx[row, t, lo + c] = dt[row, t, lo + c] * gB[c] + D[own_D, lo + c] * dy[row, t, lo + c]
            ddt[row, t, lo + c] = x[row, t, lo + c] * gB[c] + gAw[c]
            dD[row, lo + c] += x[row, t, lo + c] * dy[row, t, lo + c]


@numba.njit(cache=True)
def forward(x, dt, A, B, C, D, cut, state, last, starts, y, size, width, first, stop):  # type: ignore[no-untyped-def]
    """Fill y (b, t, c), last (b, n, c) and starts (b, chunks, n, c) for the lanes from first to stop.

    `state` (b, n, c) is the initial state, which may be `last`. A chunk has `size` steps, a lane `width`
    channels.
    """
    channels, size, width = np.uint64(x.shape[2]), np.uint64(size), np.uint64(width)
    blocks = (channels + width - np.uint64(1)) // width
    # not in `last` itself, because other threads write nearby
    h = np.empty((np.uint64(A.shape[1]), width), x.dtype)
    u, out = np.empty(width, x.dtype), np.empty(width, x.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, lo = lane // blocks, lane % blocks * width
        hi = min(lo + width, channels)
        h[:, : hi - lo] = state[row, :, lo:hi]
        _forward_lane(x, dt, A, B, C, D, cut, h, u, out, starts, y, size, row, lo, hi)
        last[row, :, lo:hi] = h[:, : hi - lo]


@numba.njit(cache=True)
def backward(  # type: ignore[no-untyped-def]
    x, dt, A, B, C, D, cut, starts, dy, dx, ddt, dA, dB, dC, dD, dstate, size, width, first, stop
):
    """Fill dx and ddt (b, t, c), dB and dC (lanes of a row, b, t, n), for the lanes from first to stop.

    At the start, dA (b, n, c) and dD (b, c) must be zeros, and dstate (b, n, c) the last state's gradient.
    """
    time, channels = np.uint64(x.shape[1]), np.uint64(x.shape[2])
    size, width, one = np.uint64(size), np.uint64(width), np.uint64(1)
    blocks, chunks = (channels + width - one) // width, (time + size - one) // size
    full = (np.uint64(A.shape[1]), width)
    a, w = np.empty((size, full[0], width), x.dtype), np.empty((size, full[0], width), x.dtype)
    h, carry = np.empty(full, x.dtype), np.empty(full, x.dtype)
    u, gB, gAw = np.empty(width, x.dtype), np.empty(width, x.dtype), np.empty(width, x.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, block = lane // blocks, lane % blocks
        lo = block * width
        hi = min(lo + width, channels)
        carry[:, : hi - lo] = dstate[row, :, lo:hi]
        for after in range(chunks):
            # memory is read fastest in forward order, so only data in the cache is walked backwards
            chunk = chunks - one - after
            t0 = chunk * size
            t1 = min(t0 + size, time)
            _refill(x, dt, A, B, cut, starts, h, a, w, u, chunk, row, lo, hi, t0, t1)
            _adjoint(
                x, dt, A, B, C, D, cut, dy, a, w, carry, u, gB, gAw,
                dx, ddt, dA, dB, dC, dD, block, row, lo, hi, t0, t1,
            )  # fmt: skip
        dstate[row, :, lo:hi] = carry[:, : hi - lo]


@numba.njit(cache=True, parallel=True)
def forward_parallel(x, dt, A, B, C, D, cut, state, last, starts, y, size, width, lanes):  # type: ignore[no-untyped-def]
    """Run the serial kernel on all lanes, on Numba's threads."""
    for i in numba.prange(lanes):
        forward(x, dt, A, B, C, D, cut, state, last, starts, y, size, width, i, i + 1)


@numba.njit(cache=True, parallel=True)
def backward_parallel(  # type: ignore[no-untyped-def]
    x, dt, A, B, C, D, cut, starts, dy, dx, ddt, dA, dB, dC, dD, dstate, size, width, lanes
):
    """Run the serial kernel on all lanes, on Numba's threads."""
    for i in numba.prange(lanes):
        backward(
            x, dt, A, B, C, D, cut, starts, dy, dx, ddt, dA, dB, dC, dD, dstate, size, width, i, i + 1
        )  # fmt: skip
