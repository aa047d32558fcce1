"""Real recurrences of matrix states on GPUs: in chunks on tensor cores, and step by step, by `steps`.

Chunks have C steps. Let S be the state before a chunk, G the gradient of the state after it, and for each key
channel

    P_n = sum of log decays over 1..n        R_m = sum over m+1..C        D_nm = exp(sum over m+1..n), n >= m

With A_nm = sum over channels of q_n k_m D_nm, the forward pass is

    Y = A V + (e^P * Q) S              S <- e^{P_C} S + (e^R * K)^T V

With B = dY V^T on and below the diagonal, the backward pass is

    dq_n = sum_m B_nm D_nm k_m + e^P_n S dy_n              dV = A^T dY + (e^R * K) G
    dk_m = sum_n B_nm D_nm q_n + e^R_m G v_m               G <- e^{P_C} G + (e^P * Q)^T dY

The gradient of the log decay of step j sums all terms that pass step j: pairs n >= j > m, reads of the state
at n >= j, keys at m < j that reach the end, and the state that crosses the whole chunk.

With a decay per head, D is a single factor for each pair of steps. With a decay per channel, pairs are
grouped as in `segments.matrix`, for L = 1, 2, 4, .. C/2. At level L, a pair is separated at a multiple of L:
m is in the L steps before it, and n in the L steps from it on. Its weight is e^(suffix of m) e^(prefix of n)
within these steps, so every L takes a single matrix product.

All exponents are <= 0. They are computed in one of two ways. If EXACT, each exponent is a sum of its own
terms without subtraction; a zero decay or a reset is a log decay of -10,000, whose exponential is zero.
Otherwise, for 16-bit inputs, exponents are differences of P, which `chunk_sums` computes once, with log
decays clipped at -100, where exp underflows in float32. The error of a difference of sums of up to 64 such
terms is at most 5e-4, an eighth of bfloat16's rounding error. The gradient of log decays is then a single
running sum of q dq - k dk.
"""

import triton
import triton.language as tl

from linrec.ops.kernels.matrix.gates_triton import (
    CHANNEL,
    HEAD,
    LEAST,
    LOG2_E,
    NONE,
    early,
    factor,
    from_start,
    log_decays,
    neighbours,
    of_chunk,
    of_level,
    of_pairs,
    program,
    put,
    right,
    strided,
    tile,
    to_end,
    whole,
)


@triton.jit
def chunk_sums(  # type: ignore[no-untyped-def]
    decays, reset, sums, TIME, strides,
    WIDTH: tl.constexpr, RESET: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill P (b, t, width), to base 2, for a chunk and some columns, which span heads and channels."""
    block, chunk, b = program(tl.cdiv(WIDTH, BLOCK), tl.cdiv(TIME, CHUNK))
    columns = block * BLOCK + tl.arange(0, BLOCK)
    steps, end = chunk * CHUNK + tl.arange(0, CHUNK), chunk * CHUNK + CHUNK
    g = log_decays(decays, reset, b, 0, steps, end, TIME, strides, columns, WIDTH, CHANNEL, RESET, tl.float32)
    put(sums, tl.cumsum(tl.maximum(g, LEAST) * LOG2_E, axis=0), b, 0, steps, TIME, 1, WIDTH, columns)


@triton.jit
def chunk_states(  # type: ignore[no-untyped-def]
    keys, values, decays, reset, start, left, factors, states, end, TIME, CHUNKS, strides, LENGTH, PIECES,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, REVERSE: tl.constexpr, WEIGHED: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill the state before each chunk and the last; with REVERSE, from q and dy, the gradient after each.

    With WEIGHED, the keys are already e^R * K.

    Few heads do not occupy a GPU, so time is divided into PIECES segments of LENGTH chunks. A first, LOCAL
    run computes each segment's final state from zeros, and the factor (b, h, segments, dk) by which it
    reduces its initial state. In a second run, each segment starts from the combined result of the previous
    segments.
    """
    block_k, block_v, rest = program(tl.cdiv(DK, BLOCK_K), tl.cdiv(DV, BLOCK_V))
    piece, matrix = rest % PIECES, (rest // PIECES).to(tl.int64)
    b, h = matrix // HEADS, matrix % HEADS
    rows = block_k * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < DK)[:, None] & (columns < DV)[None, :]
    at = rows[:, None] * DV + columns[None, :]
    size = DK * DV
    first_piece = matrix * PIECES
    if LOCAL:
        state = tl.zeros((BLOCK_K, BLOCK_V), WIDE)
    else:
        state = tl.load(start + matrix * size + at, mask=inside, other=0.0).to(WIDE)
        for i in range(piece):
            of_piece = tl.load(factors + (first_piece + i) * DK + rows, mask=rows < DK, other=0.0)
            state *= of_piece[:, None]
            state += tl.load(left + (first_piece + i) * size + at, mask=inside, other=0.0)
    reduced = tl.full((BLOCK_K,), 1.0, WIDE)
    for i in range(piece * LENGTH, tl.minimum((piece + 1) * LENGTH, CHUNKS)):
        chunk = CHUNKS - 1 - i if REVERSE else i
        if not LOCAL:
            place = (matrix * CHUNKS + chunk) * size
            tl.store(states + place + at, state.to(states.dtype.element_ty), mask=inside)
        steps = chunk * CHUNK + tl.arange(0, CHUNK)
        k = strided(keys, LAYOUTS, 0, b, h, steps, TIME, DK, rows)
        v = strided(values, LAYOUTS, 1, b, h, steps, TIME, DV, columns)
        if DECAY != NONE:
            first, second = of_chunk(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
            )
            if not WEIGHED:
                weight = from_start(first, second, EXACT) if REVERSE else to_end(first, second, DECAY, EXACT)
                k = (k * factor(weight, DECAY)).to(k.dtype)
            total = whole(first, second, EXACT)
            state = state * (total[:, None] if DECAY == CHANNEL else total)
            if LOCAL:
                reduced *= total
        state = tl.dot(tl.trans(k), v, state, input_precision=PRECISION, out_dtype=WIDE)
    if LOCAL:
        tl.store(left + (first_piece + piece) * size + at, state, mask=inside)
        tl.store(factors + (first_piece + piece) * DK + rows, reduced, mask=rows < DK)
    elif piece == PIECES - 1:
        tl.store(end + matrix * size + at, state.to(end.dtype.element_ty), mask=inside)


@triton.jit
def mixings(  # type: ignore[no-untyped-def]
    q, k, decays, reset, matrices, read, written, TIME, CHUNKS, strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, LEVELS: tl.constexpr, WEIGH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill A (b, h, chunk, C, C) for a chunk; with WEIGH also e^P * Q as `read` and e^R * K as `written`."""
    _, chunk, matrix = program(1, CHUNKS)
    b, h = matrix // HEADS, matrix % HEADS
    n = tl.arange(0, CHUNK)
    mixing = mixing_of(
        q, k, decays, reset, read, written, b, h, chunk, TIME, strides, HEADS, DK, DECAY, RESET, EXACT,
        LEVELS, False, False, WEIGH, CHUNK, BLOCK_K, PRECISION, WIDE, LAYOUTS, 0, 1,
    )  # fmt: skip
    place = (matrix.to(tl.int64) * CHUNKS + chunk) * (CHUNK * CHUNK)
    tl.store(matrices + place + n[:, None] * CHUNK + n[None, :], mixing.to(matrices.dtype.element_ty))


@triton.jit
def mixing_of(  # type: ignore[no-untyped-def]
    q, k, decays, reset, read, written, b, h, chunk, TIME, strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, EXACT: tl.constexpr,
    LEVELS: tl.constexpr, STRICT: tl.constexpr, EARLY: tl.constexpr, WEIGH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
    OF_Q: tl.constexpr, OF_K: tl.constexpr,
):  # fmt: skip
    """Return A (CHUNK, CHUNK) for a chunk, with STRICT without its diagonal; see `mixings`.

    EARLY queries, which are STRICT, read the state before the decay of their step. OF_Q and OF_K are the
    indices of the layouts of q and k.
    """
    n = tl.arange(0, CHUNK)
    steps = chunk * CHUNK + n
    mixing = tl.zeros((CHUNK, CHUNK), WIDE)
    for block in range(tl.cdiv(DK, BLOCK_K)):
        rows = block * BLOCK_K + tl.arange(0, BLOCK_K)
        queries = strided(q, LAYOUTS, OF_Q, b, h, steps, TIME, DK, rows)
        keys = strided(k, LAYOUTS, OF_K, b, h, steps, TIME, DK, rows)
        if DECAY == CHANNEL:
            first, second = of_chunk(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, CHANNEL, RESET, EXACT, CHUNK, WIDE
            )
            reading = first
            if EARLY:
                reading = early(
                    decays, reset, b, h, chunk, TIME, strides, rows,
                    HEADS, DK, CHANNEL, RESET, EXACT, CHUNK, WIDE,
                )  # fmt: skip
            # converted once, not at every level
            wide_q, wide_k = queries.to(WIDE), keys.to(WIDE)
            if WEIGH:
                from_here = wide_q * from_start(first, second, EXACT)
                put(read, from_here, b, h, steps, TIME, HEADS, DK, rows)
                to_there = wide_k * to_end(first, second, CHANNEL, EXACT)
                put(written, to_there, b, h, steps, TIME, HEADS, DK, rows)
            if not STRICT:
                own = tl.sum(wide_q * wide_k, axis=1)
                mixing += tl.where(n[:, None] == n[None, :], own[:, None], 0.0)
            for level in range(LEVELS):
                weight = of_level(
                    first, reading, decays, b, h, chunk, TIME, rows, level, HEADS, DK, EXACT, EARLY, CHUNK
                )
                # right blocks read and left blocks write
                x = (tl.where(right(level, CHUNK)[:, None], wide_q, wide_k) * weight).to(keys.dtype)
                pairs = tl.dot(x, tl.trans(x), input_precision=PRECISION, out_dtype=WIDE)
                mixing += tl.where(neighbours(level, CHUNK), pairs, 0.0)
        else:
            mixing = tl.dot(queries, tl.trans(keys), mixing, input_precision=PRECISION, out_dtype=WIDE)
    if DECAY == HEAD:
        first, _ = of_chunk(
            decays, reset, b, h, chunk, TIME, strides, n, HEADS, 1, HEAD, RESET, EXACT, CHUNK, WIDE
        )
        reading = first
        if EARLY:
            reading = early(
                decays, reset, b, h, chunk, TIME, strides, n, HEADS, 1, HEAD, RESET, EXACT, CHUNK, WIDE
            )
        mixing *= of_pairs(first, reading, False, EXACT, EARLY, CHUNK)
    inside = n[:, None] > n[None, :] if STRICT else n[:, None] >= n[None, :]
    return tl.where(inside, mixing, 0.0)


@triton.jit
def mixed(  # type: ignore[no-untyped-def]
    q, k, values, decays, reset, matrices, states, others, added, out, TIME, CHUNKS, strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, REVERSE: tl.constexpr, WEIGHED: tl.constexpr, MORE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill Y for a chunk and some columns of v; with REVERSE, dV from dy and the gradients of states.

    `matrices` come from `mixings` if CHANNEL; otherwise A is computed here. With WEIGHED, the queries are
    already e^P * Q. MORE adds the products of the matrices `others` with the values `added`.
    """
    block_v, chunk, matrix = program(tl.cdiv(DV, BLOCK_V), CHUNKS)
    b, h = matrix // HEADS, matrix % HEADS
    steps = chunk * CHUNK + tl.arange(0, CHUNK)
    n = tl.arange(0, CHUNK)
    columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    matrix = matrix.to(tl.int64) * CHUNKS + chunk
    # small heads are bound by memory latency, so all loads are issued before the first product
    EARLY: tl.constexpr = DK <= BLOCK_K
    if EARLY:
        given = strided(values, LAYOUTS, 2, b, h, steps, TIME, DV, columns)
    mixing = tl.zeros((CHUNK, CHUNK), WIDE)
    result = tl.zeros((CHUNK, BLOCK_V), WIDE)
    for block in range(tl.cdiv(DK, BLOCK_K)):
        rows = block * BLOCK_K + tl.arange(0, BLOCK_K)
        x = strided(k if REVERSE else q, LAYOUTS, 1 if REVERSE else 0, b, h, steps, TIME, DK, rows)
        if DECAY == CHANNEL:
            if not WEIGHED:
                first, second = of_chunk(
                    decays, reset, b, h, chunk, TIME, strides, rows,
                    HEADS, DK, CHANNEL, RESET, EXACT, CHUNK, WIDE,
                )  # fmt: skip
                weight = (
                    to_end(first, second, CHANNEL, EXACT) if REVERSE else from_start(first, second, EXACT)
                )
                x = (x * weight).to(x.dtype)
        else:
            other = strided(q if REVERSE else k, LAYOUTS, 0 if REVERSE else 1, b, h, steps, TIME, DK, rows)
            mixing = tl.dot(x, tl.trans(other), mixing, input_precision=PRECISION, out_dtype=WIDE)
        inside = (rows < DK)[:, None] & (columns < DV)[None, :]
        at = matrix * (DK * DV) + rows[:, None] * DV + columns[None, :]
        state = tl.load(states + at, mask=inside, other=0.0)
        result = tl.dot(x, state.to(x.dtype), result, input_precision=PRECISION, out_dtype=WIDE)
    if not EARLY:
        given = strided(values, LAYOUTS, 2, b, h, steps, TIME, DV, columns)
    at = n[None, :] * CHUNK + n[:, None] if REVERSE else n[:, None] * CHUNK + n[None, :]
    if DECAY == CHANNEL:
        weights = tl.load(matrices + matrix * (CHUNK * CHUNK) + at)
    elif DECAY == HEAD:
        first, second = of_chunk(
            decays, reset, b, h, chunk, TIME, strides, columns, HEADS, 1, HEAD, RESET, EXACT, CHUNK, WIDE
        )
        weight = to_end(first, second, HEAD, EXACT) if REVERSE else from_start(first, second, EXACT)
        result *= weight[:, None]
        weights = (mixing * of_pairs(first, first, REVERSE, EXACT, False, CHUNK)).to(given.dtype)
    else:
        later = n[:, None] <= n[None, :] if REVERSE else n[:, None] >= n[None, :]
        weights = tl.where(later, mixing, 0.0).to(given.dtype)
    result = tl.dot(weights, given, result, input_precision=PRECISION, out_dtype=WIDE)
    if MORE:
        weights = tl.load(others + matrix * (CHUNK * CHUNK) + at)
        given = tile(added, b, h, steps, TIME, HEADS, DV, columns)
        result = tl.dot(weights, given, result, input_precision=PRECISION, out_dtype=WIDE)
    put(out, result, b, h, steps, TIME, HEADS, DV, columns)


@triton.jit
def part(x, rows, i: tl.constexpr, PARTS: tl.constexpr, DK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load part i of the numbers of a row: its real parts if i = 0, its imaginary parts if i = 1."""
    return tl.load(x + rows * PARTS + i, mask=rows < DK, other=0.0).to(WIDE)


@triton.jit
def of_step(gate, rows, KIND: tl.constexpr, DK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a gate of a step: a number if HEAD, (rows, 1) if CHANNEL."""
    if KIND == CHANNEL:
        return part(gate, rows, 0, 1, DK, WIDE)[:, None]
    else:
        return tl.load(gate).to(WIDE)


@triton.jit
def steps(  # type: ignore[no-untyped-def]
    q, k, v, beta, r, w, decays, phases, reset, start, y, end, TIME, strides, phase_strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, PHASE: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, RESET: tl.constexpr, COMPLEX: tl.constexpr,
    PARTS_Q: tl.constexpr, PARTS_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill Y for all steps, and the last state, for `gate_loop`, `delta_rule` or the generalised rule.

    A program holds some columns of a state in its registers and iterates over time. For a single step, it
    reads and writes each number once.

    `decays` are log decays, with strides (batch, time, head), and a number per step, or DK numbers if
    CHANNEL; `phases` likewise. If COMPLEX, the state is complex. Q has PARTS_Q = 2 parts if it is complex, or
    1, and K has PARTS_K. The parts of a complex number are adjacent.
    """
    # on a single grid axis, because the other axes are limited to 65,535 programs
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    PARTS: tl.constexpr = 2 if COMPLEX else 1
    block, matrix = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    b, h = (matrix // HEADS).to(tl.int64), matrix % HEADS
    rows = tl.arange(0, BLOCK_K)
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    # both parts of each number, in the order of memory
    entries = block * (PARTS * BLOCK_V) + tl.arange(0, PARTS * BLOCK_V)
    inside = (rows < DK)[:, None] & (entries < PARTS * DV)[None, :]
    at = matrix.to(tl.int64) * (PARTS * DK * DV) + rows[:, None] * (PARTS * DV) + entries[None, :]
    state = tl.load(start + at, mask=inside, other=0.0).to(WIDE)
    if COMPLEX:
        state, imaginary = tl.split(tl.reshape(state, (BLOCK_K, BLOCK_V, 2)))
    for t in range(TIME):
        step = b * TIME + t
        place = step * HEADS + h
        row_q = q + step * LAYOUTS[0][0] + h * LAYOUTS[0][1]
        row_k = k + step * LAYOUTS[1][0] + h * LAYOUTS[1][1]
        row_v = step * LAYOUTS[2][0] + h * LAYOUTS[2][1]
        query = part(row_q, rows, 0, PARTS_Q, DK, WIDE)
        key = part(row_k, rows, 0, PARTS_K, DK, WIDE)
        value = tl.load(v + row_v + columns, mask=columns < DV, other=0.0).to(WIDE)
        if RESET:
            cut = tl.load(reset + b * TIME + t) != 0
            state = tl.where(cut, 0.0, state)
            if COMPLEX:
                imaginary = tl.where(cut, 0.0, imaginary)
        if ERASE:
            read = part(r + step * LAYOUTS[3][0] + h * LAYOUTS[3][1], rows, 0, 1, DK, WIDE)
            erased = tl.sum(state * read[:, None], axis=0)
        if DECAY != NONE:
            gate = decays + b * strides[0] + t * strides[1] + h * strides[2]
            magnitude = tl.exp(of_step(gate, rows, DECAY, DK, WIDE))
            state *= magnitude
            if COMPLEX:
                imaginary *= magnitude
        if PHASE != NONE:
            gate = phases + b * phase_strides[0] + t * phase_strides[1] + h * phase_strides[2]
            angle = of_step(gate, rows, PHASE, DK, WIDE)
            cos, sin = tl.cos(angle), tl.sin(angle)
            state, imaginary = state * cos - imaginary * sin, state * sin + imaginary * cos
        if ERASE:
            write = part(w + step * LAYOUTS[4][0] + h * LAYOUTS[4][1], rows, 0, 1, DK, WIDE)
            state -= write[:, None] * erased[None, :]
        if DELTA:
            found = tl.sum(state * key[:, None], axis=0)
            value = tl.load(beta + place).to(WIDE) * (value - found)
        state += key[:, None] * value[None, :]
        if PARTS_K == 2:
            imaginary += part(row_k, rows, 1, PARTS_K, DK, WIDE)[:, None] * value[None, :]
        found = state * query[:, None]
        if COMPLEX and PARTS_Q == 2:
            found -= imaginary * part(row_q, rows, 1, PARTS_Q, DK, WIDE)[:, None]
        tl.store(y + place * DV + columns, tl.sum(found, axis=0).to(y.dtype.element_ty), mask=columns < DV)
    if COMPLEX:
        state = tl.reshape(tl.join(state, imaginary), (BLOCK_K, PARTS * BLOCK_V))
    tl.store(end + at, state.to(end.dtype.element_ty), mask=inside)
