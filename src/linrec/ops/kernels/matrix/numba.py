"""CPU loops of matrix states; imported at the first use, because importing Numba is slow.

    S_t = diag(a_t) S_{t-1} + k_t w_t^T,    y_t = S_t^T q_t
    w_t = v_t, or by the delta rule w_t = beta_t e_t with e_t = v_t - (diag(a_t) S_{t-1})^T k_t

By the generalised delta rule a step also adds writes_t z_t^T, with z_t = -S_{t-1}^T reads_t.

A lane is a batch row, a head and a range of value channels, whose state (dk, width) stays in the cache over
time. The innermost loop over value channels is contiguous, so that it is vectorised. A state is saved per
chunk of steps; the adjoint recomputes the others, chunk by chunk.

`beta` (b, t, h), or `reads` and `writes` (b, t, h, dk), are empty if there is no correction. `a` is (b or 1,
t or 1, h, dk or 1). `cut` (b, t) is true where the state is cleared before a step, and is empty if there are
no resets.
"""

import numba
import numpy as np

from linrec.ops.kernels.launch import lane_kernel

# the adjoint sums over value channels in vectors: reordering a sum is allowed, ignoring NaN is not
_SUMMING = {"contract", "reassoc", "nsz"}


@lane_kernel()
def _erased(reads, S, z, row, t, head, width):  # type: ignore[no-untyped-def]
    """Fill z = -S^T reads_t."""
    for j in range(width):
        z[j] = 0
    for c in range(np.uint64(reads.shape[3])):
        read = reads[row, t, head, c]
        for j in range(width):
            z[j] -= read * S[c, j]


@lane_kernel()
def _forward_lane(  # type: ignore[no-untyped-def]
    q, k, v, beta, reads, writes, a, cut, starts, y, S, w, z, size, row, head, lo, hi
):
    zero = np.uint64(0)
    a_row, a_moves, a_wide = row if a.shape[0] > 1 else zero, a.shape[1] > 1, a.shape[3] > 1
    channels, width = np.uint64(q.shape[3]), hi - lo
    for t in range(np.uint64(q.shape[1])):
        if starts.size > 0 and t % size == zero:
            chunk = t // size
            for c in range(channels):
                for j in range(width):
                    starts[row, head, chunk, c, lo + j] = S[c, j]
        if cut.size > 0 and cut[row, t]:
            for c in range(channels):
                for j in range(width):
                    S[c, j] = 0
        a_t = t if a_moves else zero
        if beta.size > 0:
            for j in range(width):
                w[j] = 0
            for c in range(channels):
                key = k[row, t, head, c] * a[a_row, a_t, head, c if a_wide else zero]
                for j in range(width):
                    w[j] += key * S[c, j]
            strength = beta[row, t, head]
            for j in range(width):
                w[j] = strength * (v[row, t, head, lo + j] - w[j])
        else:
            for j in range(width):
                w[j] = v[row, t, head, lo + j]
        if reads.size > 0:
            _erased(reads, S, z, row, t, head, width)
        for j in range(width):
            y[row, t, head, lo + j] = 0
        for c in range(channels):
            kept, key = a[a_row, a_t, head, c if a_wide else zero], k[row, t, head, c]
            query = q[row, t, head, c]
            if reads.size > 0:
                write = writes[row, t, head, c]
                for j in range(width):
                    S[c, j] = kept * S[c, j] + key * w[j] + write * z[j]
                    y[row, t, head, lo + j] += query * S[c, j]
            else:
                for j in range(width):
                    S[c, j] = kept * S[c, j] + key * w[j]
                    y[row, t, head, lo + j] += query * S[c, j]


@lane_kernel()
def _refill(  # type: ignore[no-untyped-def]
    k, v, beta, reads, writes, a, cut, starts, D, e, S, w, chunk, row, head, lo, hi, t0, t1
):
    """Fill D_t = diag(a_t) S_{t-1}, and e_t (v_t without correction), for the steps of a chunk.

    With `reads`, D_t is S_{t-1}, and e_t is z_t.
    """
    zero = np.uint64(0)
    a_row, a_moves, a_wide = row if a.shape[0] > 1 else zero, a.shape[1] > 1, a.shape[3] > 1
    channels, width = np.uint64(k.shape[3]), hi - lo
    for c in range(channels):
        for j in range(width):
            S[c, j] = starts[row, head, chunk, c, lo + j]
    for t in range(t0, t1):
        i = t - t0
        if cut.size > 0 and cut[row, t]:
            for c in range(channels):
                for j in range(width):
                    S[c, j] = 0
        a_t = t if a_moves else zero
        if reads.size > 0:
            _erased(reads, S, w, row, t, head, width)
            for j in range(width):
                e[i, j] = w[j]
            for c in range(channels):
                kept, key = a[a_row, a_t, head, c if a_wide else zero], k[row, t, head, c]
                write = writes[row, t, head, c]
                for j in range(width):
                    D[i, c, j] = S[c, j]
                    S[c, j] = kept * S[c, j] + key * v[row, t, head, lo + j] + write * w[j]
            continue
        for j in range(width):
            w[j] = v[row, t, head, lo + j]
        for c in range(channels):
            kept, key = a[a_row, a_t, head, c if a_wide else zero], k[row, t, head, c]
            for j in range(width):
                D[i, c, j] = kept * S[c, j]
            if beta.size > 0:
                for j in range(width):
                    w[j] -= key * D[i, c, j]
        for j in range(width):
            e[i, j] = w[j]
        if beta.size > 0:
            strength = beta[row, t, head]
            for j in range(width):
                w[j] *= strength
        for c in range(channels):
            key = k[row, t, head, c]
            for j in range(width):
                S[c, j] = D[i, c, j] + key * w[j]


@lane_kernel(fastmath=_SUMMING)
def _adjoint(  # type: ignore[no-untyped-def]
    q,
    k,
    beta,
    a,
    cut,
    D,
    e,
    dy,
    dq,
    dk,
    dv,
    dbeta,
    ddecay,
    dphase,
    G,
    w,
    u,
    chunk,
    block,
    row,
    head,
    lo,
    hi,
    t0,
    t1,
):
    """Run over the steps of a chunk in reverse; G carries the gradient of the state from step to step."""
    zero, one, nothing = np.uint64(0), np.uint64(1), G.dtype.type(0)
    a_row, a_moves, a_wide = row if a.shape[0] > 1 else zero, a.shape[1] > 1, a.shape[3] > 1
    channels, width = np.uint64(k.shape[3]), hi - lo
    for step in range(t1 - t0):
        i = t1 - t0 - one - step
        t = t0 + i
        a_t, da_t = (t, t) if a_moves else (zero, chunk)
        # u = G^T k, the gradient of w
        for j in range(width):
            w[j] = e[i, j]
            u[j] = 0
        for c in range(channels):
            query, key = q[row, t, head, c], k[row, t, head, c]
            for j in range(width):
                G[c, j] += query * dy[row, t, head, lo + j]
                u[j] += key * G[c, j]
        if beta.size > 0:
            strength, total = beta[row, t, head], nothing
            for j in range(width):
                total += u[j] * e[i, j]
                w[j] *= strength
                u[j] *= strength
            dbeta[block, row, t, head] = total
        if dphase.size > 0:
            half, dp_t = channels // np.uint64(2), t if dphase.shape[2] == q.shape[1] else chunk
            for c in range(half):
                turn = nothing
                for j in range(width):
                    turn += G[half + c, j] * D[i, c, j] - G[c, j] * D[i, half + c, j]
                dphase[block, row, dp_t, head, c if dphase.shape[4] > 1 else zero] += turn
        current = nothing
        for j in range(width):
            dv[row, t, head, lo + j] = u[j]
            current += w[j] * dy[row, t, head, lo + j]
        for c in range(channels):
            kept, key = a[a_row, a_t, head, c if a_wide else zero], k[row, t, head, c]
            query_sum, key_sum, decay_sum = nothing, nothing, nothing
            for j in range(width):
                query_sum += D[i, c, j] * dy[row, t, head, lo + j]
                key_sum += G[c, j] * w[j]
            if beta.size > 0:
                for j in range(width):
                    key_sum -= D[i, c, j] * u[j]
                    G[c, j] -= key * u[j]
            for j in range(width):
                decay_sum += G[c, j] * D[i, c, j]
                G[c, j] *= kept
            dq[block, row, t, head, c] = query_sum + key * current
            dk[block, row, t, head, c] = key_sum
            if ddecay.size > 0:
                ddecay[block, row, da_t, head, c if a_wide else zero] += decay_sum
        # zero times infinity is NaN, so clear explicitly
        if cut.size > 0 and cut[row, t]:
            for c in range(channels):
                for j in range(width):
                    G[c, j] = 0


@lane_kernel(fastmath=_SUMMING)
def _erasing_adjoint(  # type: ignore[no-untyped-def]
    q, k, v, reads, writes, a, cut, D, e, dy, dq, dk, dv, dr, dw, ddecay, G, u, dz,
    chunk, block, row, head, lo, hi, t0, t1,
):  # fmt: skip
    """Run over the steps of a chunk in reverse, as `_adjoint`, for the generalised delta rule."""
    zero, one, nothing = np.uint64(0), np.uint64(1), G.dtype.type(0)
    a_row, a_moves, a_wide = row if a.shape[0] > 1 else zero, a.shape[1] > 1, a.shape[3] > 1
    channels, width = np.uint64(k.shape[3]), hi - lo
    for step in range(t1 - t0):
        i = t1 - t0 - one - step
        t = t0 + i
        a_t, da_t = (t, t) if a_moves else (zero, chunk)
        for j in range(width):
            u[j] = 0
            dz[j] = 0
        for c in range(channels):
            query, key, write = q[row, t, head, c], k[row, t, head, c], writes[row, t, head, c]
            for j in range(width):
                G[c, j] += query * dy[row, t, head, lo + j]
                u[j] += key * G[c, j]
                dz[j] += write * G[c, j]
        of_key, of_write = nothing, nothing
        for j in range(width):
            dv[row, t, head, lo + j] = u[j]
            of_key += v[row, t, head, lo + j] * dy[row, t, head, lo + j]
            of_write += e[i, j] * dy[row, t, head, lo + j]
        for c in range(channels):
            kept, read = a[a_row, a_t, head, c if a_wide else zero], reads[row, t, head, c]
            query_sum, key_sum, read_sum, write_sum, decay_sum = nothing, nothing, nothing, nothing, nothing
            for j in range(width):
                query_sum += D[i, c, j] * dy[row, t, head, lo + j]
                key_sum += G[c, j] * v[row, t, head, lo + j]
                write_sum += G[c, j] * e[i, j]
                read_sum -= D[i, c, j] * dz[j]
                decay_sum += G[c, j] * D[i, c, j]
                G[c, j] = kept * G[c, j] - read * dz[j]
            key, write = k[row, t, head, c], writes[row, t, head, c]
            dq[block, row, t, head, c] = kept * query_sum + key * of_key + write * of_write
            dk[block, row, t, head, c] = key_sum
            dr[block, row, t, head, c] = read_sum
            dw[block, row, t, head, c] = write_sum
            if ddecay.size > 0:
                ddecay[block, row, da_t, head, c if a_wide else zero] += kept * decay_sum
        # zero times infinity is NaN, so clear explicitly
        if cut.size > 0 and cut[row, t]:
            for c in range(channels):
                for j in range(width):
                    G[c, j] = 0


@numba.njit(cache=True)
def forward(  # type: ignore[no-untyped-def]
    q, k, v, beta, reads, writes, a, cut, state, last, starts, y, size, width, first, stop
):
    """Fill y (b, t, h, dv), last (b, h, dk, dv) and starts (b, h, chunks, dk, dv), unless empty.

    Only the lanes from first to stop are filled. `state` (b, h, dk, dv) is the initial state, which may be
    `last`. A chunk has `size` steps, a lane `width` value channels.
    """
    heads, channels, values = np.uint64(q.shape[2]), np.uint64(q.shape[3]), np.uint64(v.shape[3])
    size, width = np.uint64(size), np.uint64(width)
    blocks = (values + width - np.uint64(1)) // width
    # not in `last` itself, whose rows may be longer
    S = np.empty((channels, width), q.dtype)
    w, z = np.empty(width, q.dtype), np.empty(width, q.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        row, head, lo = lane // blocks // heads, lane // blocks % heads, lane % blocks * width
        hi = min(lo + width, values)
        for c in range(channels):
            for j in range(hi - lo):
                S[c, j] = state[row, head, c, lo + j]
        _forward_lane(q, k, v, beta, reads, writes, a, cut, starts, y, S, w, z, size, row, head, lo, hi)
        for c in range(channels):
            for j in range(hi - lo):
                last[row, head, c, lo + j] = S[c, j]


@numba.njit(cache=True)
def backward(  # type: ignore[no-untyped-def]
    q, k, v, beta, reads, writes, a, cut, starts, dy,
    dq, dk, dv, dbeta, dr, dw, ddecay, dphase, dstate, size, width, first, stop,
):  # fmt: skip
    """Fill dq, dk, dv, dbeta, dr and dw, and add to ddecay and dphase, for the lanes from first to stop.

    With G_t = q_t dy_t^T + diag(a_{t+1}) F_{t+1}, D_t = diag(a_t) S_{t-1} and u_t = beta_t G_t^T k_t, the
    gradient of D_t is F_t = G_t - k_t u_t^T. Without correction, F_t = G_t and u_t = G_t^T k_t. Then

        dq_t = S_t dy_t,    dk_t = G_t w_t - D_t u_t,    dv_t = u_t,    dbeta_t = e_t^T G_t^T k_t
        dlog_decay_t = the sums over value channels of F_t D_t

    If channels c and c + dk / 2 are the real and imaginary part of a complex channel, a derivative with
    respect to its phase turns D_t = (R, I) into (-I, R). With the gradient F_t = (X, Z), dphase_t is the sum
    over value channels of Z R - X I.

    By the generalised delta rule, with D_t = S_{t-1} and x_t = G_t^T writes_t,

        F_t = diag(a_t) G_t - reads_t x_t^T,    dr_t = -D_t x_t,    dw_t = G_t z_t
        dlog_decay_t = the sums over value channels of diag(a_t) G_t D_t

    dstate (b, h, dk, dv) holds the last state's gradient, then the initial state's. All outputs except dv
    have a first axis for the blocks of value channels, which must be summed. ddecay and dphase have a step
    for each chunk if the gate is constant over time, and are empty without a gate.
    """
    time, heads = np.uint64(q.shape[1]), np.uint64(q.shape[2])
    channels, values = np.uint64(q.shape[3]), np.uint64(v.shape[3])
    size, width, one = np.uint64(size), np.uint64(width), np.uint64(1)
    blocks, chunks = (values + width - one) // width, (time + size - one) // size
    D, e = np.empty((size, channels, width), q.dtype), np.empty((size, width), q.dtype)
    S, G = np.empty((channels, width), q.dtype), np.empty((channels, width), q.dtype)
    w, u = np.empty(width, q.dtype), np.empty(width, q.dtype)
    for lane in range(np.uint64(first), np.uint64(stop)):
        block, row, head = lane % blocks, lane // blocks // heads, lane // blocks % heads
        lo = block * width
        hi = min(lo + width, values)
        for c in range(channels):
            for j in range(hi - lo):
                G[c, j] = dstate[row, head, c, lo + j]
        for after in range(chunks):
            # memory is read fastest in forward order, so only data in the cache is walked backwards
            chunk = chunks - one - after
            t0 = chunk * size
            t1 = min(t0 + size, time)
            _refill(
                k, v, beta, reads, writes, a, cut, starts, D, e, S, w, chunk, row, head, lo, hi, t0, t1
            )  # fmt: skip
            place = chunk, block, row, head, lo, hi, t0, t1
            if reads.size > 0:
                erasing = dq, dk, dv, dr, dw, ddecay
                _erasing_adjoint(q, k, v, reads, writes, a, cut, D, e, dy, *erasing, G, w, u, *place)
            else:
                gradients = dq, dk, dv, dbeta, ddecay, dphase
                _adjoint(q, k, beta, a, cut, D, e, dy, *gradients, G, w, u, *place)
        for c in range(channels):
            for j in range(hi - lo):
                dstate[row, head, c, lo + j] = G[c, j]


@numba.njit(cache=True, parallel=True)
def forward_parallel(  # type: ignore[no-untyped-def]
    q, k, v, beta, reads, writes, a, cut, state, last, starts, y, size, width, lanes
):
    """Run the serial kernel on all lanes, on Numba's threads."""
    for i in numba.prange(lanes):
        forward(q, k, v, beta, reads, writes, a, cut, state, last, starts, y, size, width, i, i + 1)


@numba.njit(cache=True, parallel=True)
def backward_parallel(  # type: ignore[no-untyped-def]
    q, k, v, beta, reads, writes, a, cut, starts, dy,
    dq, dk, dv, dbeta, dr, dw, ddecay, dphase, dstate, size, width, lanes,
):  # fmt: skip
    """Run the serial kernel on all lanes, on Numba's threads."""
    for i in numba.prange(lanes):
        gradients = dq, dk, dv, dbeta, dr, dw, ddecay, dphase, dstate
        backward(q, k, v, beta, reads, writes, a, cut, starts, dy, *gradients, size, width, i, i + 1)
