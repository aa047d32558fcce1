"""The delta rule in chunks on tensor cores: the kernels that `gate_loop` does not have.

For a chunk, let T = (I + L)^-1, with L_nm = beta_n k_n . k_m D_nm below the diagonal. Let S be the state
before the chunk. The corrected values are

    W = U - P S        U = T (beta * V)        P = T (beta * e^P * K)

and everything else is the recurrence of `gate_loop` with values W. Backward, let G be the gradient of the
state after the chunk:

    dW = A^T dY + (e^R * K) G        dS = e^{P_C} G + (e^P * Q)^T dY - P^T dW        E = T^T dW

dV is beta * E, and the values' part of dbeta is E . V. The corrections add the gradients of a `gate_loop`
with queries beta * K, output gradients -E, and pairs n > m only.

The generalised delta rule writes Z under keys W, where -Z is what R reads. With A_xy for queries x and keys
y, and P' the sum of log decays before a step:

    Z = M V - P S       M = -T A_rk       P = T (e^P' * R)       L = A_rw

Its recurrence is that of `gate_loop` with keys W for the values Z beside keys K for V. Backward, dZ is as dW
above with keys W, dV has the further term M^T dZ, and the other gradients are those of two queries, Q for dY
and early R for -E, with two keys.
"""

import triton
import triton.language as tl

from linrec.ops.kernels.matrix.gates_triton import (
    CHANNEL,
    NONE,
    early,
    factor,
    from_start,
    neighbours,
    of_chunk,
    program,
    put,
    strided,
    tile,
    to_end,
    whole,
)
from linrec.ops.kernels.matrix.triton import mixing_of


@triton.jit
def _inverse(below, EXACT: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (I + L)^-1 for a matrix L (CHUNK, CHUNK) that is zero on and above the diagonal.

    Inverses of diagonal blocks are joined pairwise: T - T A T inverts two neighbouring blocks, where A holds
    the entries of L between them. Up to blocks of 16 steps, only the diagonal blocks are multiplied.
    """
    # for 16-bit inputs the rounding of tf32 is negligible
    precision: tl.constexpr = "ieee" if tl.float64 == WIDE else ("tf32x3" if EXACT else "tf32")
    BLOCKS: tl.constexpr = CHUNK // 16
    n, m = tl.arange(0, BLOCKS), tl.arange(0, 16)
    same = (n[:, None] == n[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(below, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2)
    ones = tl.where(m[:, None] == m[None, :], 1.0, 0.0).to(WIDE)[None, :, :]
    inverses = ones - tl.where(neighbours(0, 16)[None, :, :], blocks, 0.0)
    for level in range(1, 4):
        inverses = _joined(
            inverses, tl.where(neighbours(level, 16)[None, :, :], blocks, 0.0), precision, WIDE
        )
    inverse = tl.reshape(tl.where(same, inverses[:, :, None, :], 0.0), (CHUNK, CHUNK))
    for level in range(4, LEVELS):
        inverse = _joined(inverse, tl.where(neighbours(level, CHUNK), below, 0.0), precision, WIDE)
    return inverse


@triton.jit
def _joined(inverse, between, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return T - T A T."""
    left = tl.dot(inverse, between, input_precision=PRECISION, out_dtype=WIDE)
    return inverse - tl.dot(left, inverse, input_precision=PRECISION, out_dtype=WIDE)


@triton.jit
def corrections(  # type: ignore[no-untyped-def]
    k, v, beta, decays, reset, inverses, read, values, TIME, CHUNKS, strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, LEVELS: tl.constexpr, KNOWN: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Compute T of a chunk, unless it is KNOWN; store P as `read` and U as `values`."""
    _, chunk, matrix = program(1, CHUNKS)
    b, h = matrix // HEADS, matrix % HEADS
    n = tl.arange(0, CHUNK)
    steps = chunk * CHUNK + n
    strength = tl.load(beta + (b.to(tl.int64) * TIME + steps) * HEADS + h, mask=steps < TIME, other=0.0)
    strength = strength.to(WIDE)
    at = (matrix.to(tl.int64) * CHUNKS + chunk) * (CHUNK * CHUNK) + n[:, None] * CHUNK + n[None, :]
    if KNOWN:
        inverse = tl.load(inverses + at).to(WIDE)
    else:
        below = strength[:, None] * mixing_of(
            k, k, decays, reset, k, k, b, h, chunk, TIME, strides, HEADS, DK, DECAY, RESET, EXACT, LEVELS,
            True, False, False, CHUNK, BLOCK_K, PRECISION, WIDE, LAYOUTS, 0, 1,
        )  # fmt: skip
        inverse = _inverse(below, EXACT, LEVELS, CHUNK, WIDE)
        tl.store(inverses + at, inverse.to(inverses.dtype.element_ty))
    weights = (inverse * strength[None, :]).to(k.dtype.element_ty)
    for block in range(tl.cdiv(DK, BLOCK_K)):
        rows = block * BLOCK_K + tl.arange(0, BLOCK_K)
        keys = strided(k, LAYOUTS, 0, b, h, steps, TIME, DK, rows)
        if DECAY != NONE:
            first, second = of_chunk(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
            )
            keys = (keys * factor(from_start(first, second, EXACT), DECAY)).to(keys.dtype)
        result = tl.dot(weights, keys, input_precision=PRECISION, out_dtype=WIDE)
        put(read, result, b, h, steps, TIME, HEADS, DK, rows)
    for block in range(tl.cdiv(DV, BLOCK_V)):
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        given = strided(v, LAYOUTS, 2, b, h, steps, TIME, DV, columns)
        result = tl.dot(weights, given, input_precision=PRECISION, out_dtype=WIDE)
        put(values, result, b, h, steps, TIME, HEADS, DV, columns)


@triton.jit
def erasures(  # type: ignore[no-untyped-def]
    r, w, k, v, decays, reset, inverses, writes, read, values, TIME, CHUNKS, strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, LEVELS: tl.constexpr, KNOWN: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Compute T and M of a chunk, unless they are KNOWN; store P as `read` and U as `values`."""
    _, chunk, matrix = program(1, CHUNKS)
    b, h = matrix // HEADS, matrix % HEADS
    n = tl.arange(0, CHUNK)
    steps = chunk * CHUNK + n
    at = (matrix.to(tl.int64) * CHUNKS + chunk) * (CHUNK * CHUNK) + n[:, None] * CHUNK + n[None, :]
    if KNOWN:
        inverse = tl.load(inverses + at)
        weights = tl.load(writes + at)
    else:
        below = mixing_of(
            r, w, decays, reset, r, w, b, h, chunk, TIME, strides, HEADS, DK, DECAY, RESET, EXACT, LEVELS,
            True, True, False, CHUNK, BLOCK_K, PRECISION, WIDE, LAYOUTS, 0, 1,
        )  # fmt: skip
        whole_inverse = _inverse(below, EXACT, LEVELS, CHUNK, WIDE)
        inverse = whole_inverse.to(inverses.dtype.element_ty)
        tl.store(inverses + at, inverse)
        mixing = mixing_of(
            r, k, decays, reset, r, k, b, h, chunk, TIME, strides, HEADS, DK, DECAY, RESET, EXACT, LEVELS,
            True, True, False, CHUNK, BLOCK_K, PRECISION, WIDE, LAYOUTS, 0, 2,
        )  # fmt: skip
        precision: tl.constexpr = "ieee" if tl.float64 == WIDE else ("tf32x3" if EXACT else "tf32")
        product = tl.dot(whole_inverse, mixing, input_precision=precision, out_dtype=WIDE)
        weights = (-product).to(writes.dtype.element_ty)
        tl.store(writes + at, weights)
    for block in range(tl.cdiv(DK, BLOCK_K)):
        rows = block * BLOCK_K + tl.arange(0, BLOCK_K)
        reads = strided(r, LAYOUTS, 0, b, h, steps, TIME, DK, rows)
        if DECAY != NONE:
            reading = early(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
            )
            reads = (reads * factor(from_start(reading, reading, EXACT), DECAY)).to(reads.dtype)
        result = tl.dot(inverse, reads, input_precision=PRECISION, out_dtype=WIDE)
        put(read, result, b, h, steps, TIME, HEADS, DK, rows)
    for block in range(tl.cdiv(DV, BLOCK_V)):
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        given = strided(v, LAYOUTS, 3, b, h, steps, TIME, DV, columns)
        result = tl.dot(weights, given, input_precision=PRECISION, out_dtype=WIDE)
        put(values, result, b, h, steps, TIME, HEADS, DV, columns)


@triton.jit
def value_gradients(  # type: ignore[no-untyped-def]
    inverses, dcorrected, v, beta, through, dv, dbeta, TIME, CHUNKS, strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, STRENGTHS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill E (`through`) for a chunk and some columns; with STRENGTHS dV and E . V (b, t, h, blocks) too."""
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    block, chunk, matrix = program(BLOCKS, CHUNKS)
    b, h = matrix // HEADS, matrix % HEADS
    n = tl.arange(0, CHUNK)
    steps = chunk * CHUNK + n
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (matrix.to(tl.int64) * CHUNKS + chunk) * (CHUNK * CHUNK)
    turned = tl.load(inverses + place + n[None, :] * CHUNK + n[:, None])
    given = tile(dcorrected, b, h, steps, TIME, HEADS, DV, columns)
    result = tl.dot(turned, given, input_precision=PRECISION, out_dtype=WIDE)
    put(through, result, b, h, steps, TIME, HEADS, DV, columns)
    if STRENGTHS:
        at = (b.to(tl.int64) * TIME + steps) * HEADS + h
        strength = tl.load(beta + at, mask=steps < TIME, other=0.0).to(WIDE)
        put(dv, strength[:, None] * result, b, h, steps, TIME, HEADS, DV, columns)
        values = strided(v, LAYOUTS, 0, b, h, steps, TIME, DV, columns)
        of_beta = tl.sum(result * values, axis=1)
        tl.store(dbeta + at * BLOCKS + block, of_beta, mask=steps < TIME)


@triton.jit
def delta_states(  # type: ignore[no-untyped-def]
    keys, read, values, others, added, decays, reset, start, left, transitions, states, end, corrected,
    TIME, CHUNKS, strides, LENGTH, PIECES,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, LOCAL: tl.constexpr, MORE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill W = U - P S, the states before the chunks, and the last state, for some columns.

    P is `read` and U is `values`. With MORE, the keys `others` write the values `added` too.

    Few heads do not occupy a GPU, so time is divided into PIECES segments of LENGTH chunks, each with an
    initial state in `start` (b, h, segments, dk, dv). A first, LOCAL run provides these states: a segment
    maps its initial state S to M S + N. N is its final state from zeros. The transition M is its final state
    from the identity without values. The blocks of columns after the values' blocks compute M.
    """
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    ALL: tl.constexpr = BLOCKS + ((DK + BLOCK_V - 1) // BLOCK_V if LOCAL else 0)
    block, piece, matrix = program(ALL, PIECES)
    b, h = matrix // HEADS, matrix % HEADS
    rows = tl.arange(0, BLOCK_K)
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < DK)[:, None] & (columns < DV)[None, :]
    at = rows[:, None] * DV + columns[None, :]
    size = DK * DV
    matrix = matrix.to(tl.int64)
    this = matrix * PIECES + piece
    of_unit = columns - BLOCKS * BLOCK_V
    if LOCAL:
        state = tl.where(rows[:, None] == of_unit[None, :], 1.0, 0.0).to(WIDE)
    else:
        state = tl.load(start + this * size + at, mask=inside, other=0.0).to(WIDE)
    for chunk in range(piece * LENGTH, tl.minimum((piece + 1) * LENGTH, CHUNKS)):
        if not LOCAL:
            place = (matrix * CHUNKS + chunk) * size
            tl.store(states + place + at, state.to(states.dtype.element_ty), mask=inside)
        steps = chunk * CHUNK + tl.arange(0, CHUNK)
        p = tile(read, b, h, steps, TIME, HEADS, DK, rows)
        w = tile(values, b, h, steps, TIME, HEADS, DV, columns).to(WIDE)
        w -= tl.dot(p, state.to(p.dtype), input_precision=PRECISION, out_dtype=WIDE)
        if not LOCAL:
            put(corrected, w, b, h, steps, TIME, HEADS, DV, columns)
        k = strided(keys, LAYOUTS, 0, b, h, steps, TIME, DK, rows)
        if MORE:
            other = strided(others, LAYOUTS, 1, b, h, steps, TIME, DK, rows)
            given = strided(added, LAYOUTS, 2, b, h, steps, TIME, DV, columns)
        if DECAY != NONE:
            first, second = of_chunk(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
            )
            weight = factor(to_end(first, second, DECAY, EXACT), DECAY)
            k = (k * weight).to(k.dtype)
            if MORE:
                other = (other * weight).to(other.dtype)
            total = whole(first, second, EXACT)
            state = state * (total[:, None] if DECAY == CHANNEL else total)
        state = tl.dot(tl.trans(k), w.to(k.dtype), state, input_precision=PRECISION, out_dtype=WIDE)
        if MORE:
            state = tl.dot(tl.trans(other), given, state, input_precision=PRECISION, out_dtype=WIDE)
    if LOCAL:
        tl.store(left + this * size + at, state, mask=inside)
        unit = (rows < DK)[:, None] & ((of_unit >= 0) & (of_unit < DK))[None, :]
        tl.store(transitions + this * (DK * DK) + rows[:, None] * DK + of_unit[None, :], state, mask=unit)
    elif piece == PIECES - 1:
        tl.store(end + matrix * size + at, state.to(end.dtype.element_ty), mask=inside)


@triton.jit
def delta_state_gradients(  # type: ignore[no-untyped-def]
    queries, keys, read, dy, matrices, decays, reset, start, left, gradients, end, dcorrected, TIME, CHUNKS,
    strides, LENGTH, PIECES,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, LOCAL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill dW, and G after each chunk and before the first, for some columns; `matrices` are A.

    `start` is the gradient after each segment. Before the segment, the gradient is M^T G + N, with M as in
    the forward pass, and N from a LOCAL run that starts from zeros.
    """
    block, piece, matrix = program(tl.cdiv(DV, BLOCK_V), PIECES)
    b, h = matrix // HEADS, matrix % HEADS
    n = tl.arange(0, CHUNK)
    rows = tl.arange(0, BLOCK_K)
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < DK)[:, None] & (columns < DV)[None, :]
    at = rows[:, None] * DV + columns[None, :]
    size = DK * DV
    matrix = matrix.to(tl.int64)
    this = matrix * PIECES + piece
    if LOCAL:
        gradient = tl.zeros((BLOCK_K, BLOCK_V), WIDE)
    else:
        gradient = tl.load(start + this * size + at, mask=inside, other=0.0).to(WIDE)
    stop = tl.minimum((piece + 1) * LENGTH, CHUNKS)
    for i in range(stop - piece * LENGTH):
        chunk = stop - 1 - i
        place = matrix * CHUNKS + chunk
        if not LOCAL:
            tl.store(gradients + place * size + at, gradient.to(gradients.dtype.element_ty), mask=inside)
        steps = chunk * CHUNK + n
        q = strided(queries, LAYOUTS, 0, b, h, steps, TIME, DK, rows)
        k = strided(keys, LAYOUTS, 1, b, h, steps, TIME, DK, rows)
        p = tile(read, b, h, steps, TIME, HEADS, DK, rows)
        given = strided(dy, LAYOUTS, 2, b, h, steps, TIME, DV, columns)
        turned = tl.load(matrices + place * (CHUNK * CHUNK) + n[None, :] * CHUNK + n[:, None])
        w = tl.dot(turned, given, input_precision=PRECISION, out_dtype=WIDE)
        old = gradient.to(k.dtype)
        if DECAY != NONE:
            first, second = of_chunk(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
            )
            k = (k * factor(to_end(first, second, DECAY, EXACT), DECAY)).to(k.dtype)
            q = (q * factor(from_start(first, second, EXACT), DECAY)).to(q.dtype)
            total = whole(first, second, EXACT)
            gradient = gradient * (total[:, None] if DECAY == CHANNEL else total)
        w = tl.dot(k, old, w, input_precision=PRECISION, out_dtype=WIDE)
        if not LOCAL:
            put(dcorrected, w, b, h, steps, TIME, HEADS, DV, columns)
        gradient = tl.dot(tl.trans(q), given, gradient, input_precision=PRECISION, out_dtype=WIDE)
        gradient -= tl.dot(tl.trans(p), w.to(p.dtype), input_precision=PRECISION, out_dtype=WIDE)
    if LOCAL:
        tl.store(left + this * size + at, gradient, mask=inside)
    elif piece == 0:
        tl.store(end + matrix * size + at, gradient.to(end.dtype.element_ty), mask=inside)
