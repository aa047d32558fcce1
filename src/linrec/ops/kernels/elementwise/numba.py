"""CPU loops of elementwise recurrences; imported at the first use, because importing Numba is slow.

A lane is a batch row and a range of channels. Lanes run in parallel, and a lane iterates over time. The
innermost loop over channels is contiguous in every tensor, so that it is vectorised. Only the thin loops over
lanes are `parallel`, because that transformation makes Numba's compilation slow. Arrays are indexed, not
sliced: Numba counts references of slices, which takes longer than a step on few channels. Indices are
unsigned, because signed indices may count from the end, which prevents vectorisation.

`scan` reads its links `a`, each axis of full size or 1. The max-headed GateLoop computes its links
exp(log_decay + i phase) and inputs k v in registers. It saves a state per chunk of steps, and the adjoint
recomputes the others. A gate is (b, t, h), or (1, 1, h) if constant over time; without a phase, whose array
is then empty, everything is real.
"""

import math

import numba
import numpy as np
from numba import types
from numba.extending import overload

from linrec.ops.kernels.launch import lane_kernel

SPAN = 256
"""If `a` is constant over time, its gradient is summed over blocks of this many steps, and torch sums the
blocks: a single long sum in float32 would lose digits."""


@lane_kernel()
def _scan_lane(a, x, cut, y, carry, row, lo, hi, reverse):  # type: ignore[no-untyped-def]
    zero, one = np.uint64(0), np.uint64(1)
    time = np.uint64(x.shape[1])
    a_row = row if a.shape[0] > 1 else zero
    # `carry` stays in the L1 cache, whereas y would have to be read back
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
def _scan_lane_backward(a, before, cut, dy, da, dx, carry, block, row, lo, hi, first, stop, reverse):  # type: ignore[no-untyped-def]
    zero, one = np.uint64(0), np.uint64(1)
    time = np.uint64(dy.shape[1])
    a_row, a_moves, a_wide = row if a.shape[0] > 1 else zero, a.shape[1] > 1, a.shape[2] > 1
    # the adjoint runs in reverse; the last step it visits started from the initial state
    for step in range(first, stop):
        t = step if reverse else time - one - step
        t_before = zero if stop == time else t + one if reverse else t - one
        a_t, da_t = (t, t) if a_moves else (zero, t // np.uint64(SPAN))
        linked = cut.size == 0 or not cut[row, t]
        if linked and a_wide and a_moves and da.size > 0:
            # every step and channel has its own link: the common case, in a single loop over channels
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
def scan_forward(a, x, cut, state, last, y, width, reverse, first, stop):  # type: ignore[no-untyped-def]
    """Fill y (b, t, c) and last (b, c) for the lanes from first to stop.

    `state` (b, c) is the initial state, which may be `last`. A lane has `width` channels.
    """
    channels = np.uint64(x.shape[2])
    width = np.uint64(width)
    blocks = (channels + width - np.uint64(1)) // width
    # not in `last` itself, because other threads write nearby
    carry = np.empty(width, last.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, lo = lane // blocks, lane % blocks * width
        hi = min(lo + width, channels)
        for c in range(lo, hi):
            carry[c - lo] = state[row, c]
        _scan_lane(a, x, cut, y, carry, row, lo, hi, reverse)
        for c in range(lo, hi):
            last[row, c] = carry[c - lo]


@numba.njit(cache=True)
def scan_backward(a, y, cut, state, dy, da, dx, dstate, width, reverse, first, stop):  # type: ignore[no-untyped-def]
    """Fill dx (b, t, c) and, unless it is empty, da for the lanes from first to stop.

    `state` is (b, 1, c). dstate (b, c) holds the last state's gradient, then the initial state's. da has a
    row for every batch row. If `a` is constant over time, da has a step for each `SPAN` steps; if `a` is
    constant over channels, a column for each lane of the row. In both cases it must be zero at the start.
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
        _scan_lane_backward(a, y, cut, dy, da, dx, carry, block, row, lo, hi, start, end, reverse)
        _scan_lane_backward(a, state, cut, dy, da, dx, carry, block, row, lo, hi, end, time, reverse)
        for c in range(lo, hi):
            dstate[row, c] = carry[c - lo]


@numba.njit(cache=True, parallel=True)
def scan_forward_parallel(a, x, cut, state, last, y, width, reverse, lanes):  # type: ignore[no-untyped-def]
    """Run the serial kernel on all lanes, on Numba's threads."""
    for lane in numba.prange(lanes):
        scan_forward(a, x, cut, state, last, y, width, reverse, lane, lane + 1)


@numba.njit(cache=True, parallel=True)
def scan_backward_parallel(a, y, cut, state, dy, da, dx, dstate, width, reverse, lanes):  # type: ignore[no-untyped-def]
    """Run the serial kernel on all lanes, on Numba's threads."""
    for lane in numba.prange(lanes):
        scan_backward(a, y, cut, state, dy, da, dx, dstate, width, reverse, lane, lane + 1)


# Numba calls the C library for every exponential, sine and cosine; in float32 they are polynomials here, so
# that loops are vectorised
_CONTRACT = {"fastmath": {"contract"}}
# adding this rounds a float32 below 2^22 to an integer, which is then in the lowest bits
_ROUND, _ROUND_BITS = np.float32(1.5 * 2.0**23), np.int32(0x4B400000)
_LOG2_E = np.float32(1 / math.log(2))
# log 2 in two parts, pi / 2 in four: all parts but the last, times integers of 9 and 13 bits, are exact
_LOG_2 = np.float32(0.693145751953125), np.float32(1.428606765330187e-06)
_TWO_OVER_PI = np.float32(2 / math.pi)
_HALF_PI = tuple(np.float32(c) for c in (1.5703125, 4.83751297e-4, 7.54953362e-8, 2.56334407e-12))
# minimax: e^r = 1 + r + r^2 E(r), sin r = r + r z S(z), cos r = 1 - z / 2 + z^2 C(z), with z = r^2
_E = tuple(np.float32(c) for c in (0.5, 0.16666576266, 0.04166637361, 0.00836323481, 0.00139412179))
_S = tuple(np.float32(c) for c in (-0.16666667163, 0.00833333191, -0.00019840083, 2.72493912e-6))
_C = tuple(np.float32(c) for c in (0.04166666791, -0.00138888881, 2.48005963e-5, -2.73005043e-7))
_HALF, _ONE = np.float32(0.5), np.float32(1)
_LEAST, _MOST = np.float32(-105), np.float32(89)


def exponential(x):  # type: ignore[no-untyped-def]
    """Return e^x."""
    return math.exp(x)


def sine_cosine(x):  # type: ignore[no-untyped-def]
    """Return (sin x, cos x)."""
    return math.sin(x), math.cos(x)


@overload(exponential, jit_options=_CONTRACT)
def _exponential(x):  # type: ignore[no-untyped-def]
    def single(x):  # type: ignore[no-untyped-def]
        # outside of this range the result is 0 or inf; NaN passes
        x = _LEAST if x < _LEAST else x
        x = _MOST if x > _MOST else x
        shifted = x * _LOG2_E + _ROUND
        n = shifted - _ROUND
        r = x - n * _LOG_2[0] - n * _LOG_2[1]
        tail = (((_E[4] * r + _E[3]) * r + _E[2]) * r + _E[1]) * r + _E[0]
        # 2^n as two factors, because 2^-150 and 2^128 are not float32 numbers
        exponent = np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS)
        half = np.int32(exponent >> 1)
        low = np.int32((half + 127) << 23).view(np.float32)
        high = np.int32((exponent - half + 127) << 23).view(np.float32)
        return (r * r * tail + r + _ONE) * low * high

    return single if x == types.float32 else exponential


@overload(sine_cosine, jit_options=_CONTRACT)
def _sine_cosine(x):  # type: ignore[no-untyped-def]
    def single(x):  # type: ignore[no-untyped-def]
        shifted = x * _TWO_OVER_PI + _ROUND
        n = shifted - _ROUND
        r = x - n * _HALF_PI[0] - n * _HALF_PI[1] - n * _HALF_PI[2] - n * _HALF_PI[3]
        # for so large x that float32 numbers are a turn apart, any valid angle is acceptable
        r = -_ONE if r < -_ONE else r
        r = _ONE if r > _ONE else r
        z = r * r
        sine = r + r * z * (((_S[3] * z + _S[2]) * z + _S[1]) * z + _S[0])
        cosine = _ONE - z * _HALF + z * z * (((_C[3] * z + _C[2]) * z + _C[1]) * z + _C[0])
        quadrant = np.float32(shifted).view(np.int32)
        turned = np.int32(quadrant & 1) != 0
        s = cosine if turned else sine
        c = sine if turned else cosine
        s = -s if np.int32(quadrant & 2) != 0 else s
        c = -c if np.int32((quadrant + 1) & 2) != 0 else c
        return s, c

    return single if x == types.float32 else sine_cosine


@lane_kernel()
def _max_headed_lane(q, k, v, log_decay, phase, cut, starts, y, re, im, size, row, lo, hi):  # type: ignore[no-untyped-def]
    zero, one = np.uint64(0), np.uint64(1)
    turns = phase.size > 0
    decay_row, phase_row = row if log_decay.shape[0] > 1 else zero, row if phase.shape[0] > 1 else zero
    for t in range(np.uint64(q.shape[1])):
        if t % size == zero:
            chunk = t // size
            for c in range(lo, hi):
                starts[row, zero, chunk, c] = re[c - lo]
                if turns:
                    starts[row, one, chunk, c] = im[c - lo]
        decay_t, phase_t = t if log_decay.shape[1] > 1 else zero, t if phase.shape[1] > 1 else zero
        if cut.size > 0 and cut[row, t]:
            for c in range(lo, hi):
                re[c - lo] = k[row, t, c] * v[row, t, c]
                y[row, t, c] = q[row, t, c] * re[c - lo]
                if turns:
                    im[c - lo] = 0
        elif turns:
            for c in range(lo, hi):
                magnitude = exponential(log_decay[decay_row, decay_t, c])
                sine, cosine = sine_cosine(phase[phase_row, phase_t, c])
                a, a_i = magnitude * cosine, magnitude * sine
                h, h_i = re[c - lo], im[c - lo]
                re[c - lo] = a * h - a_i * h_i + k[row, t, c] * v[row, t, c]
                im[c - lo] = a * h_i + a_i * h
                y[row, t, c] = q[row, t, c] * re[c - lo]
        else:
            for c in range(lo, hi):
                a = exponential(log_decay[decay_row, decay_t, c])
                re[c - lo] = a * re[c - lo] + k[row, t, c] * v[row, t, c]
                y[row, t, c] = q[row, t, c] * re[c - lo]


@lane_kernel()
def _refill(  # type: ignore[no-untyped-def]
    q, k, v, log_decay, phase, cut, starts, dy, a, a_i, w, w_i, u, h, h_i, chunk, row, lo, hi, t0, t1
):
    """Fill links a, w_t = a_t h_{t-1}, and u_t = q_t dy_t for the steps of a chunk."""
    zero, one = np.uint64(0), np.uint64(1)
    turns = phase.size > 0
    decay_row, phase_row = row if log_decay.shape[0] > 1 else zero, row if phase.shape[0] > 1 else zero
    width = hi - lo
    for c in range(width):
        h[c] = starts[row, zero, chunk, lo + c]
        if turns:
            h_i[c] = starts[row, one, chunk, lo + c]
    for t in range(t0, t1):
        i = t - t0
        decay_t, phase_t = t if log_decay.shape[1] > 1 else zero, t if phase.shape[1] > 1 else zero
        for c in range(width):
            u[i, c] = q[row, t, lo + c] * dy[row, t, lo + c]
        if cut.size > 0 and cut[row, t]:
            for c in range(width):
                a[i, c] = 0
                w[i, c] = 0
                h[c] = k[row, t, lo + c] * v[row, t, lo + c]
            if turns:
                for c in range(width):
                    a_i[i, c] = 0
                    w_i[i, c] = 0
                    h_i[c] = 0
        elif turns:
            for c in range(width):
                magnitude = exponential(log_decay[decay_row, decay_t, lo + c])
                sine, cosine = sine_cosine(phase[phase_row, phase_t, lo + c])
                a[i, c], a_i[i, c] = magnitude * cosine, magnitude * sine
                w[i, c] = a[i, c] * h[c] - a_i[i, c] * h_i[c]
                w_i[i, c] = a[i, c] * h_i[c] + a_i[i, c] * h[c]
                h[c] = w[i, c] + k[row, t, lo + c] * v[row, t, lo + c]
                h_i[c] = w_i[i, c]
        else:
            for c in range(width):
                a[i, c] = exponential(log_decay[decay_row, decay_t, lo + c])
                w[i, c] = a[i, c] * h[c]
                h[c] = w[i, c] + k[row, t, lo + c] * v[row, t, lo + c]


@lane_kernel()
def _adjoint(cut, u, a, a_i, re, im, row, width, t0, t1):  # type: ignore[no-untyped-def]
    """Overwrite a_t by g_t = u_t + conj(a_{t+1}) g_{t+1}; (re, im) carries the second term."""
    turns = im.size > 0
    for step in range(t1 - t0):
        i = t1 - t0 - np.uint64(1) - step
        if turns:
            for c in range(width):
                g, g_i = u[i, c] + re[c], im[c]
                re[c] = a[i, c] * g + a_i[i, c] * g_i
                im[c] = a[i, c] * g_i - a_i[i, c] * g
                a[i, c], a_i[i, c] = g, g_i
        else:
            for c in range(width):
                g = u[i, c] + re[c]
                re[c] = a[i, c] * g
                a[i, c] = g
        # zero times infinity is NaN, so clear explicitly
        if cut.size > 0 and cut[row, t0 + i]:
            for c in range(width):
                re[c] = 0
                if turns:
                    im[c] = 0


@lane_kernel()
def _put(values, gradient, each_step, chunk, row, lo, hi, t0, t1):  # type: ignore[no-untyped-def]
    """Write a gate's gradient for the steps of a chunk, or their sum; do nothing if `gradient` is empty."""
    if gradient.size == 0:
        return
    for t in range(t0, t1):
        for c in range(hi - lo):
            if each_step:
                gradient[row, t, lo + c] = values[t - t0, c]
            else:
                gradient[row, chunk, lo + c] += values[t - t0, c]


@lane_kernel()
def _spread(k, v, dy, g, g_i, w, w_i, u, dq, dk, dv, row, lo, hi, t0, t1):  # type: ignore[no-untyped-def]
    """Fill dq, dk and dv for the steps of a chunk; overwrite u by dlog_decay and w_i by dphase."""
    turns = w_i.size > 0
    for t in range(t0, t1):
        i = t - t0
        for c in range(hi - lo):
            k_c, v_c = k[row, t, lo + c], v[row, t, lo + c]
            dq[row, t, lo + c] = dy[row, t, lo + c] * (w[i, c] + k_c * v_c)
            dk[row, t, lo + c] = g[i, c] * v_c
            dv[row, t, lo + c] = g[i, c] * k_c
            u[i, c] = g[i, c] * w[i, c]
        if turns:
            for c in range(hi - lo):
                u[i, c] += g_i[i, c] * w_i[i, c]
                w_i[i, c] = g_i[i, c] * w[i, c] - g[i, c] * w_i[i, c]


@numba.njit(cache=True)
def _split(state, re, im, row, lo, hi):  # type: ignore[no-untyped-def]
    for c in range(hi - lo):
        re[c] = state[row, lo + c, 0]
        if im.size > 0:
            im[c] = state[row, lo + c, 1]


@numba.njit(cache=True)
def _join(state, re, im, row, lo, hi):  # type: ignore[no-untyped-def]
    for c in range(hi - lo):
        state[row, lo + c, 0] = re[c]
        if im.size > 0:
            state[row, lo + c, 1] = im[c]


@numba.njit(cache=True)
def max_headed_forward(  # type: ignore[no-untyped-def]
    q, k, v, log_decay, phase, cut, state, last, starts, y, size, width, first, stop
):
    """Fill y (b, t, h), last (b, h, 1 or 2) and starts (b, 1 or 2, chunks, h), for lanes from first to stop.

    `state` (b, h, 1 or 2), real and imaginary part, is the initial state, which may be `last`. A chunk has
    `size` steps, a lane `width` heads.
    """
    channels, size, width = np.uint64(q.shape[2]), np.uint64(size), np.uint64(width)
    blocks = (channels + width - np.uint64(1)) // width
    # not in `last` itself, because other threads write nearby
    re, im = np.empty(width, q.dtype), np.empty(width if phase.size > 0 else np.uint64(0), q.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, lo = lane // blocks, lane % blocks * width
        hi = min(lo + width, channels)
        _split(state, re, im, row, lo, hi)
        _max_headed_lane(q, k, v, log_decay, phase, cut, starts, y, re, im, size, row, lo, hi)
        _join(last, re, im, row, lo, hi)


@numba.njit(cache=True)
def max_headed_backward(  # type: ignore[no-untyped-def]
    q, k, v, log_decay, phase, cut, starts, dy, dq, dk, dv, ddecay, dphase, dstate, size, width, first, stop
):
    """Fill dq, dk and dv, and add to ddecay and dphase, for the lanes from first to stop.

    With g_t = q_t dy_t + conj(a_{t+1}) g_{t+1} and w_t = a_t h_{t-1} = h_t - k_t v_t:
    dq = dy Re h, dk = v Re g, dv = k Re g, dlog_decay = Re(g conj w), dphase = Im(g conj w).

    dstate (b, h, 1 or 2) holds the last state's gradient, then the initial state's. ddecay and dphase are
    (b, t, h), zeros (b, chunks, h) if the gate is constant, or empty.
    """
    time, channels = np.uint64(q.shape[1]), np.uint64(q.shape[2])
    size, width, one = np.uint64(size), np.uint64(width), np.uint64(1)
    blocks, chunks = (channels + width - one) // width, (time + size - one) // size
    each_decay, each_phase = log_decay.shape[1] > 1, phase.shape[1] > 1
    full, imaginary = (size, width), (size if phase.size > 0 else np.uint64(0), width)
    a, w, u = np.empty(full, q.dtype), np.empty(full, q.dtype), np.empty(full, q.dtype)
    a_i, w_i = np.empty(imaginary, q.dtype), np.empty(imaginary, q.dtype)
    h, h_i, re = np.empty(width, q.dtype), np.empty(width, q.dtype), np.empty(width, q.dtype)
    im = np.empty(width if phase.size > 0 else np.uint64(0), q.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, lo = lane // blocks, lane % blocks * width
        hi = min(lo + width, channels)
        _split(dstate, re, im, row, lo, hi)
        for after in range(chunks):
            # memory is read fastest in forward order, so only data in the cache is walked backwards
            chunk = chunks - one - after
            t0 = chunk * size
            t1 = min(t0 + size, time)
            made = a, a_i, w, w_i, u, h, h_i
            _refill(q, k, v, log_decay, phase, cut, starts, dy, *made, chunk, row, lo, hi, t0, t1)
            _adjoint(cut, u, a, a_i, re, im, row, hi - lo, t0, t1)
            _spread(k, v, dy, a, a_i, w, w_i, u, dq, dk, dv, row, lo, hi, t0, t1)
            _put(u, ddecay, each_decay, chunk, row, lo, hi, t0, t1)
            _put(w_i, dphase, each_phase, chunk, row, lo, hi, t0, t1)
        _join(dstate, re, im, row, lo, hi)


@numba.njit(cache=True, parallel=True)
def max_headed_forward_parallel(  # type: ignore[no-untyped-def]
    q, k, v, log_decay, phase, cut, state, last, starts, y, size, width, lanes
):
    """Run the serial kernel on all lanes, on Numba's threads."""
    for i in numba.prange(lanes):
        max_headed_forward(q, k, v, log_decay, phase, cut, state, last, starts, y, size, width, i, i + 1)


@numba.njit(cache=True, parallel=True)
def max_headed_backward_parallel(  # type: ignore[no-untyped-def]
    q, k, v, log_decay, phase, cut, starts, dy, dq, dk, dv, ddecay, dphase, dstate, size, width, lanes
):
    """Run the serial kernel on all lanes, on Numba's threads."""
    for i in numba.prange(lanes):
        inputs, gradients = (q, k, v, log_decay, phase), (dq, dk, dv, ddecay, dphase, dstate)
        max_headed_backward(*inputs, cut, starts, dy, *gradients, size, width, i, i + 1)
