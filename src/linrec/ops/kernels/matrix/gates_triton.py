"""Gates of a chunk in the chunkwise GPU kernels: weights from decays, and gradients of q, k and decays.

See `triton.py` for the equations. The decays of a chunk are a pair. If EXACT, the pair is its log decays g,
and the same one step later, `later`. Else it is the sums P, and P of the last step.

EARLY queries read the state before the decay and the writes of their step. Their first decays are `early`:
g or P one step before, and zero at the first step of the chunk.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
HEAD = tl.constexpr(1)
CHANNEL = tl.constexpr(2)
# a log decay whose exponential is zero even in float64, and which can be multiplied by zero
NOTHING = tl.constexpr(-1e4)
# log decays are clipped at this value, where exp underflows in float32
LEAST = tl.constexpr(-100.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def program(FIRST, SECOND):  # type: ignore[no-untyped-def]
    """Return the index of this program along (FIRST, SECOND, any number); the first index varies fastest.

    All programs are on a single grid axis, because the other axes are limited to 65,535.
    """
    n = tl.program_id(0)
    return n % FIRST, (n // FIRST) % SECOND, n // FIRST // SECOND


@triton.jit
def strided(  # type: ignore[no-untyped-def]
    x, LAYOUTS: tl.constexpr, WHICH: tl.constexpr, b, h, steps, TIME, WIDTH: tl.constexpr, columns
):  # fmt: skip
    """Load elements (steps, columns) of a tensor (b, t, h, d), zeros outside of it.

    LAYOUTS[WHICH] is the pair of its strides of steps and heads; see `Layout` in `linrec.ops.matrix.triton`.
    """
    rows = (b.to(tl.int64) * TIME + steps) * LAYOUTS[WHICH][0] + h * LAYOUTS[WHICH][1]
    inside = (steps < TIME)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def tile(x, b, h, steps, TIME, HEADS: tl.constexpr, WIDTH: tl.constexpr, columns):  # type: ignore[no-untyped-def]
    """Load elements (steps, columns) of a contiguous tensor (b, t, h, d), zeros outside of it."""
    rows = (b.to(tl.int64) * TIME + steps) * HEADS + h
    inside = (steps < TIME)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)


@triton.jit
def put(x, value, b, h, steps, TIME, HEADS: tl.constexpr, WIDTH: tl.constexpr, columns):  # type: ignore[no-untyped-def]
    """Store elements at the coordinates of `tile`."""
    rows = (b.to(tl.int64) * TIME + steps) * HEADS + h
    inside = (steps < TIME)[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * WIDTH + columns[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def log_decays(  # type: ignore[no-untyped-def]
    decays, reset, b, h, steps, end, TIME, strides, columns, WIDTH: tl.constexpr, DECAY: tl.constexpr,
    RESET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load log decays of these steps, zeros from step `end` on: (steps,); if CHANNEL, (steps, columns)."""
    here = steps < tl.minimum(TIME, end)
    rows = b.to(tl.int64) * strides[0] + steps.to(tl.int64) * strides[1] + h * strides[2]
    if DECAY == CHANNEL:
        inside = here[:, None] & (columns < WIDTH)[None, :]
        result = tl.load(decays + rows[:, None] + columns[None, :], mask=inside, other=0.0).to(WIDE)
    else:
        result = tl.load(decays + rows, mask=here, other=0.0).to(WIDE)
    if RESET:
        cut = tl.load(reset + b.to(tl.int64) * TIME + steps, mask=here, other=0) != 0
        result = tl.where(rowwise(cut, DECAY), NOTHING, result)
    return tl.maximum(result, NOTHING)


@triton.jit
def rowwise(x, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Broadcast a tensor with one value per step to the shape of the decays."""
    if DECAY == CHANNEL and len(x.shape) == 1:
        x = x[:, None]
    return x


@triton.jit
def factor(x, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reshape a weight per step, or per step and channel, to multiply (steps, channels)."""
    return x if DECAY == CHANNEL else x[:, None]


@triton.jit
def _sums(decays, b, h, steps, TIME, HEADS: tl.constexpr, WIDTH: tl.constexpr, columns, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load P for these steps; past the end of time, P of the last step."""
    rows = (b.to(tl.int64) * TIME + tl.minimum(steps, TIME - 1)) * HEADS + h
    if DECAY == CHANNEL:
        inside = (columns < WIDTH)[None, :]
        sums = tl.load(decays + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    else:
        sums = tl.load(decays + rows)
    return sums


@triton.jit
def of_chunk(  # type: ignore[no-untyped-def]
    decays, reset, b, h, chunk, TIME, strides, columns, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    DECAY: tl.constexpr, RESET: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Load a chunk's decays, in the form for the functions below."""
    steps, end = chunk * CHUNK + tl.arange(0, CHUNK), chunk * CHUNK + CHUNK
    if EXACT:
        first = log_decays(decays, reset, b, h, steps, end, TIME, strides, columns, WIDTH, DECAY, RESET, WIDE)
        second = log_decays(
            decays, reset, b, h, steps + 1, end, TIME, strides, columns, WIDTH, DECAY, RESET, WIDE
        )
    else:
        first = _sums(decays, b, h, steps, TIME, HEADS, WIDTH, columns, DECAY)
        row = (b.to(tl.int64) * TIME + tl.minimum(end, TIME) - 1) * HEADS + h
        if DECAY == CHANNEL:
            second = tl.load(decays + row * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        else:
            second = tl.load(decays + row)
    return first, second


@triton.jit
def early(  # type: ignore[no-untyped-def]
    decays, reset, b, h, chunk, TIME, strides, columns, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    DECAY: tl.constexpr, RESET: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Load the first decays of EARLY queries."""
    n = tl.arange(0, CHUNK)
    steps = tl.maximum(chunk * CHUNK + n - 1, 0)
    if EXACT:
        end = chunk * CHUNK + CHUNK
        x = log_decays(decays, reset, b, h, steps, end, TIME, strides, columns, WIDTH, DECAY, RESET, WIDE)
    else:
        x = _sums(decays, b, h, steps, TIME, HEADS, WIDTH, columns, DECAY)
    return tl.where(rowwise(n > 0, DECAY), x, 0.0)


@triton.jit
def power(exponent, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return e^x, or 2^x for the sums, which are logarithms to base 2."""
    return tl.exp(exponent) if EXACT else tl.exp2(exponent)


@triton.jit
def from_start(first, second, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return e^P."""
    return power(tl.cumsum(first, axis=0) if EXACT else first, EXACT)


@triton.jit
def to_end(first, second, DECAY: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return e^R."""
    if EXACT:
        exponent = tl.cumsum(second, axis=0, reverse=True)
    elif DECAY == CHANNEL:
        exponent = second[None, :] - first
    else:
        exponent = second - first
    return power(exponent, EXACT)


@triton.jit
def whole(first, second, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return e^{P_C}."""
    return power(tl.sum(first, axis=0) if EXACT else second, EXACT)


@triton.jit
def of_pairs(  # type: ignore[no-untyped-def]
    first, reading, REVERSE: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Return D (CHUNK, CHUNK) for a decay per head; its transpose if REVERSE.

    `reading` are the decays of queries: `first`, or `early` if EARLY.
    """
    n = tl.arange(0, CHUNK)
    row, column = (n[None, :], n[:, None]) if REVERSE else (n[:, None], n[None, :])
    if EXACT:
        # sums over the steps after the column's step, up to the row's step, or before it if EARLY
        step = reading[None, :] if REVERSE else reading[:, None]
        after = row - 1 > column if EARLY else row > column
        exponent = tl.cumsum(tl.where(after, step, 0.0), axis=1 if REVERSE else 0)
    else:
        exponent = (reading[None, :] - first[:, None]) if REVERSE else (reading[:, None] - first[None, :])
    seen = row > column if EARLY else row >= column
    return tl.where(seen, power(tl.minimum(exponent, 0.0), EXACT), 0.0)


@triton.jit
def right(level, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a mask of the chunk's steps in right blocks, where blocks of L = 2^level steps alternate."""
    return ((tl.arange(0, CHUNK) >> level) & 1) == 1


@triton.jit
def neighbours(level, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a mask of the pairs of steps in neighbouring left and right blocks of L = 2^level steps."""
    block = tl.arange(0, CHUNK) >> level
    return (block[:, None] ^ 1) == block[None, :]


@triton.jit
def segments(level, TURNED: tl.constexpr, EARLY: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a mask of the steps (n, j) of a chunk in the same block of L = 2^level steps.

    Right blocks include j <= n, or j < n if EARLY; left blocks j > n. With TURNED, the mask is transposed to
    (j, n).
    """
    n = tl.arange(0, CHUNK)
    row, column = (n[None, :], n[:, None]) if TURNED else (n[:, None], n[None, :])
    block = row >> level
    which = (block == (column >> level)) & ((column <= row) == ((block & 1) == 1))
    return which & (column != row) if EARLY else which


@triton.jit
def summed(which, x):  # type: ignore[no-untyped-def]
    """Return the matrix product of a mask with x (CHUNK, columns): sums of selected rows."""
    precision: tl.constexpr = "ieee" if x.dtype == tl.float64 else "tf32x3"
    return tl.dot(which.to(x.dtype), x, input_precision=precision, out_dtype=x.dtype)


@triton.jit
def of_level(  # type: ignore[no-untyped-def]
    first, reading, decays, b, h, chunk, TIME, columns, level,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return factors (CHUNK, columns) of pairs that are separated at a multiple of L = 2^level.

    In right blocks, the factor is the decay from the end of the left block up to the step, or before it if
    EARLY. In left blocks, it is the decay after the step, up to that end.
    """
    if EXACT:
        exponent = summed(segments(level, False, EARLY, CHUNK), first)
    else:
        middle = chunk * CHUNK + (((tl.arange(0, CHUNK) >> level) | 1) << level) - 1
        here = tl.where(right(level, CHUNK)[:, None], reading, first) if EARLY else first
        exponent = -tl.abs(here - _sums(decays, b, h, middle, TIME, HEADS, WIDTH, columns, CHANNEL))
    return power(exponent, EXACT)


@triton.jit
def gate_gradients(  # type: ignore[no-untyped-def]
    q, k, v, dy, decays, reset, states, gradients, beta, dq, dk, passing, dbeta, TIME, CHUNKS, strides,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    EXACT: tl.constexpr, LEVELS: tl.constexpr, CORRECTION: tl.constexpr, EARLY: tl.constexpr,
    READS: tl.constexpr, WRITES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Fill dQ and dK for a chunk and some channels, and `passing`, the gradient of log decays.

    `states` are the states before the chunks, and `gradients` the gradients of the states after them.
    `passing` is (b, t, h, dk) if CHANNEL; if HEAD, it is (b, t, h, blocks of channels) and must be summed.

    Further queries and keys have launches of their own, which add to these gradients. READS tells whether the
    queries have not been launched before, and so read the state, and WRITES whether the keys have not.

    EARLY queries read outputs -y before the decay and the writes of their step. CORRECTION selects the delta
    rule's corrections: keys, as `q`, with strengths beta read outputs -y before their step writes. The kernel
    then fills the gradient of beta (b, t, h, blocks of channels), which must be summed, in place of `dq`.
    """
    # pairs n > m only
    STRICT: tl.constexpr = CORRECTION or EARLY
    FIRST: tl.constexpr = READS and WRITES
    BLOCKS: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    block, chunk, matrix = program(BLOCKS, CHUNKS)
    b, h = matrix // HEADS, matrix % HEADS
    steps = chunk * CHUNK + tl.arange(0, CHUNK)
    n = tl.arange(0, CHUNK)
    rows = block * BLOCK_K + tl.arange(0, BLOCK_K)
    place = (matrix.to(tl.int64) * CHUNKS + chunk) * (DK * DV)
    # B on and below the diagonal, and B^T: transposing a single copy would suffice, but Triton 3.4 to 3.7
    # miscompiles it
    lower, upper = tl.zeros((CHUNK, CHUNK), WIDE), tl.zeros((CHUNK, CHUNK), WIDE)
    read, written = tl.zeros((CHUNK, BLOCK_K), WIDE), tl.zeros((CHUNK, BLOCK_K), WIDE)
    crossing = tl.zeros((BLOCK_K,), WIDE)
    for i in range(tl.cdiv(DV, BLOCK_V)):
        columns = i * BLOCK_V + tl.arange(0, BLOCK_V)
        given = strided(dy, LAYOUTS, 3, b, h, steps, TIME, DV, columns)
        if STRICT:
            given = -given
        values = strided(v, LAYOUTS, 2, b, h, steps, TIME, DV, columns)
        lower = tl.dot(given, tl.trans(values), lower, input_precision=PRECISION, out_dtype=WIDE)
        upper = tl.dot(values, tl.trans(given), upper, input_precision=PRECISION, out_dtype=WIDE)
        inside = (columns < DV)[:, None] & (rows < DK)[None, :]
        at = place + columns[:, None] + rows[None, :] * DV
        if READS:
            state = tl.load(states + at, mask=inside, other=0.0)
            read = tl.dot(given, state.to(given.dtype), read, input_precision=PRECISION, out_dtype=WIDE)
        if WRITES:
            gradient = tl.load(gradients + at, mask=inside, other=0.0)
            written = tl.dot(
                values, gradient.to(values.dtype), written, input_precision=PRECISION, out_dtype=WIDE
            )
        if FIRST and DECAY != NONE:
            crossing += tl.sum(state.to(WIDE) * gradient.to(WIDE), axis=0)
    queries = strided(q, LAYOUTS, 0, b, h, steps, TIME, DK, rows)
    keys = strided(k, LAYOUTS, 1, b, h, steps, TIME, DK, rows)
    strength = tl.full((CHUNK,), 1.0, WIDE)
    if CORRECTION:
        strength = tl.load(beta + (b.to(tl.int64) * TIME + steps) * HEADS + h, mask=steps < TIME, other=0.0)
        strength = strength.to(WIDE)
        upper *= strength[None, :]
    if STRICT:
        lower = tl.where(n[:, None] > n[None, :], lower, 0.0)
        upper = tl.where(n[:, None] < n[None, :], upper, 0.0)
    if DECAY == NONE:
        lower = tl.where(n[:, None] >= n[None, :], lower, 0.0).to(keys.dtype)
        upper = tl.where(n[:, None] <= n[None, :], upper, 0.0).to(keys.dtype)
        read = tl.dot(lower, keys, read, input_precision=PRECISION, out_dtype=WIDE)
        written = tl.dot(upper, queries, written, input_precision=PRECISION, out_dtype=WIDE)
    else:
        first, second = of_chunk(
            decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
        )
        reading = first
        if EARLY:
            reading = early(
                decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
            )
        read *= factor(from_start(reading, second, EXACT), DECAY)
        through = crossing * whole(first, second, EXACT)
        passed = tl.zeros((CHUNK, BLOCK_K), WIDE)
        if EXACT and READS:
            # states that are read from this step on; by EARLY queries, after it
            reads = read * queries * strength[:, None]
            passed += tl.cumsum(reads, axis=0, reverse=True)
            if EARLY:
                passed -= reads
        if WRITES:
            written *= factor(to_end(first, second, DECAY, EXACT), DECAY)
            reaching = written * keys
            if EXACT:
                # keys before this step whose values reach the end of the chunk
                passed += tl.cumsum(reaching, axis=0) - reaching
            else:
                through += tl.sum(reaching, axis=0)
        if DECAY == HEAD:
            lower *= of_pairs(first, reading, False, EXACT, EARLY, CHUNK)
            upper *= of_pairs(first, reading, True, EXACT, EARLY, CHUNK)
            read = tl.dot(lower.to(keys.dtype), keys, read, input_precision=PRECISION, out_dtype=WIDE)
            written = tl.dot(
                upper.to(keys.dtype), queries, written, input_precision=PRECISION, out_dtype=WIDE
            )
            if EXACT:
                # pairs n >= j > m, or n > j > m: sums over m < j, then over n
                pairs = tl.dot(queries, tl.trans(keys), input_precision=PRECISION, out_dtype=WIDE)
                pairs *= lower * strength[:, None]
                before = tl.cumsum(pairs, axis=1) - pairs
                later = n[:, None] > n[None, :] if EARLY else n[:, None] >= n[None, :]
                of_head = tl.sum(tl.where(later, before, 0.0), axis=0)
                of_head += tl.sum(passed, axis=1)
            else:
                of_read = strength * tl.sum(read * queries, axis=1)
                of_head = tl.cumsum(of_read - tl.sum(written * keys, axis=1), axis=0, reverse=True)
                if EARLY:
                    of_head -= of_read
            of_head += tl.sum(through)
            at = ((b.to(tl.int64) * TIME + steps) * HEADS + h) * BLOCKS + block
            if not FIRST:
                of_head += tl.load(passing + at, mask=steps < TIME, other=0.0)
            tl.store(passing + at, of_head, mask=steps < TIME)
        else:
            both = tl.where(n[:, None] >= n[None, :], lower, upper)
            if not STRICT:
                own = tl.sum(tl.where(n[:, None] == n[None, :], both, 0.0), axis=1)[:, None]
                read += own * keys
                written += own * queries
            for level in range(LEVELS):
                weight = of_level(
                    first, reading, decays, b, h, chunk, TIME, rows, level, HEADS, DK, EXACT, EARLY, CHUNK
                )
                # right blocks read and left blocks write, and the gradient of a step combines with the steps
                # of the other block
                is_read = right(level, CHUNK)[:, None]
                x = tl.where(is_read, queries, keys)
                of_pair = tl.where(neighbours(level, CHUNK), both, 0.0).to(x.dtype)
                found = weight * tl.dot(
                    of_pair, (x * weight).to(x.dtype), input_precision=PRECISION, out_dtype=WIDE
                )
                read += tl.where(is_read, found, 0.0)
                written += tl.where(is_read, 0.0, found)
                if EXACT:
                    x_read = tl.where(is_read, strength[:, None], 1.0)
                    passed += summed(segments(level, True, EARLY, CHUNK), found * x * x_read)
            if not EXACT:
                of_read = read * queries * strength[:, None]
                passed = tl.cumsum(of_read - written * keys, axis=0, reverse=True)
                if EARLY:
                    passed -= of_read
            passed += through[None, :]
            if not FIRST:
                passed += tile(passing, b, h, steps, TIME, HEADS, DK, rows)
            put(passing, passed, b, h, steps, TIME, HEADS, DK, rows)
    if CORRECTION:
        at = ((b.to(tl.int64) * TIME + steps) * HEADS + h) * BLOCKS + block
        tl.store(dbeta + at, tl.sum(read * keys, axis=1), mask=steps < TIME)
        written += strength[:, None] * read
    else:
        if not READS:
            read += tile(dq, b, h, steps, TIME, HEADS, DK, rows)
        put(dq, read, b, h, steps, TIME, HEADS, DK, rows)
    if not WRITES:
        written += tile(dk, b, h, steps, TIME, HEADS, DK, rows)
    put(dk, written, b, h, steps, TIME, HEADS, DK, rows)
