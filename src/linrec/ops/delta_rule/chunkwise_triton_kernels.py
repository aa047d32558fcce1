"""The delta rule in chunks on tensor cores: what it has beyond `gate_loop`.

With the inverse T = (I + L)^-1 of a chunk, L_nm = beta_n k_n . k_m D_nm below the diagonal, the corrected
values are, of the state S before the chunk,

    W = U - P S        U = T (beta * V)        P = T (beta * e^P * K)

and all else is the recurrence of `gate_loop` with values W. Backward, with G the gradient of the state after
the chunk:

    dW = A^T dY + (e^R * K) G        dS = e^{P_C} G + (e^P * Q)^T dY - P^T dW        E = T^T dW

dV is beta * E. What W reads of the keys has the gradients of a `gate_loop` that is read by beta * K, with the
gradient -E of its outputs, and without a step's own pair.
"""

import triton
import triton.language as tl

from linrec.ops.gate_loop.chunkwise_triton_decays import (
    CHANNEL,
    NONE,
    factor,
    from_start,
    of_chunk,
    put,
    tile,
    to_end,
    whole,
)


@triton.jit
def applied(  # type: ignore[no-untyped-def]
    matrices,
    x,
    decays,
    reset,
    out,
    TIME,
    CHUNKS,
    strides,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DECAY: tl.constexpr,
    RESET: tl.constexpr,
    EXACT: tl.constexpr,
    TURNED: tl.constexpr,
    WEIGHED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """T X, or TURNED T^T X, of one chunk and some columns; of keys WEIGHED, e^P * X."""
    WIDTH: tl.constexpr = DK if WEIGHED else DV
    BLOCK: tl.constexpr = BLOCK_K if WEIGHED else BLOCK_V
    chunk = tl.program_id(1)
    b, h = tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    steps = chunk * CHUNK + tl.arange(0, CHUNK)
    n = tl.arange(0, CHUNK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = (tl.program_id(2).to(tl.int64) * CHUNKS + chunk) * (CHUNK * CHUNK)
    at = n[None, :] * CHUNK + n[:, None] if TURNED else n[:, None] * CHUNK + n[None, :]
    matrix = tl.load(matrices + place + at)
    given = tile(x, b, h, steps, TIME, HEADS, WIDTH, columns)
    if WEIGHED and DECAY != NONE:
        first, second = of_chunk(
            decays, reset, b, h, chunk, TIME, strides, columns, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
        )
        given = (given * factor(from_start(first, second, EXACT), DECAY)).to(given.dtype)
    result = tl.dot(matrix, given, input_precision=PRECISION, out_dtype=WIDE)
    put(out, result, b, h, steps, TIME, HEADS, WIDTH, columns)


@triton.jit
def delta_states(  # type: ignore[no-untyped-def]
    keys,
    read,
    values,
    decays,
    reset,
    start,
    states,
    end,
    corrected,
    TIME,
    CHUNKS,
    strides,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DECAY: tl.constexpr,
    RESET: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """W = U - P S of some columns, of P `read` and U `values`; states before the chunks, after the last."""
    b, h = tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    rows = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < DK)[:, None] & (columns < DV)[None, :]
    at = rows[:, None] * DV + columns[None, :]
    size = DK * DV
    matrix = tl.program_id(2).to(tl.int64)
    state = tl.load(start + matrix * size + at, mask=inside, other=0.0).to(WIDE)
    for chunk in range(CHUNKS):
        place = (matrix * CHUNKS + chunk) * size
        tl.store(states + place + at, state.to(states.dtype.element_ty), mask=inside)
        steps = chunk * CHUNK + tl.arange(0, CHUNK)
        p = tile(read, b, h, steps, TIME, HEADS, DK, rows)
        w = tile(values, b, h, steps, TIME, HEADS, DV, columns).to(WIDE)
        w -= tl.dot(p, state.to(p.dtype), input_precision=PRECISION, out_dtype=WIDE)
        put(corrected, w, b, h, steps, TIME, HEADS, DV, columns)
        k = tile(keys, b, h, steps, TIME, HEADS, DK, rows)
        if DECAY != NONE:
            first, second = of_chunk(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
            )
            k = (k * factor(to_end(first, second, DECAY, EXACT), DECAY)).to(k.dtype)
            total = whole(first, second, EXACT)
            state = state * (total[:, None] if DECAY == CHANNEL else total)
        state = tl.dot(tl.trans(k), w.to(k.dtype), state, input_precision=PRECISION, out_dtype=WIDE)
    tl.store(end + matrix * size + at, state.to(end.dtype.element_ty), mask=inside)


@triton.jit
def delta_state_gradients(  # type: ignore[no-untyped-def]
    queries,
    keys,
    read,
    dy,
    matrices,
    decays,
    reset,
    start,
    gradients,
    end,
    dcorrected,
    TIME,
    CHUNKS,
    strides,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DECAY: tl.constexpr,
    RESET: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dW of some columns, and G after each chunk and before the first; `matrices` are A."""
    b, h = tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    n = tl.arange(0, CHUNK)
    rows = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < DK)[:, None] & (columns < DV)[None, :]
    at = rows[:, None] * DV + columns[None, :]
    size = DK * DV
    matrix = tl.program_id(2).to(tl.int64)
    gradient = tl.load(start + matrix * size + at, mask=inside, other=0.0).to(WIDE)
    for i in range(CHUNKS):
        chunk = CHUNKS - 1 - i
        place = matrix * CHUNKS + chunk
        tl.store(gradients + place * size + at, gradient.to(gradients.dtype.element_ty), mask=inside)
        steps = chunk * CHUNK + n
        k = tile(keys, b, h, steps, TIME, HEADS, DK, rows)
        q = tile(queries, b, h, steps, TIME, HEADS, DK, rows)
        p = tile(read, b, h, steps, TIME, HEADS, DK, rows)
        given = tile(dy, b, h, steps, TIME, HEADS, DV, columns)
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
        put(dcorrected, w, b, h, steps, TIME, HEADS, DV, columns)
        gradient = tl.dot(tl.trans(q), given, gradient, input_precision=PRECISION, out_dtype=WIDE)
        gradient -= tl.dot(tl.trans(p), w.to(p.dtype), input_precision=PRECISION, out_dtype=WIDE)
    tl.store(end + matrix * size + at, gradient.to(end.dtype.element_ty), mask=inside)
