"""The gradients of queries, keys and decays in chunks; `chunkwise_triton_kernels` has the equations."""

import triton
import triton.language as tl

from linrec.ops.kernels.matrix.decays_triton import (
    HEAD,
    NONE,
    factor,
    from_start,
    neighbours,
    of_chunk,
    of_level,
    of_pairs,
    program,
    put,
    right,
    segments,
    summed,
    tile,
    to_end,
    whole,
)


@triton.jit
def gate_gradients(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    dy,
    decays,
    reset,
    states,
    gradients,
    beta,
    dq,
    dk,
    passing,
    dbeta,
    TIME,
    CHUNKS,
    strides,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DECAY: tl.constexpr,
    RESET: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    CORRECTION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dQ and dK of one chunk and some channels, and what passes its steps.

    `states` are those before the chunks, and `gradients` those of the states after them. What passes is
    (b, t, h, dk) of CHANNEL, and (b, t, h, blocks of channels) of HEAD, to be summed.

    CORRECTION is what the delta rule reads in order to write: outputs -y are read by keys, `q`, of strengths
    beta, before a step writes, and nothing passes the end of the chunk. It adds its gradients to `dk` and
    `passing`, and makes those of beta (b, t, h, blocks of channels), to be summed.
    """
    BLOCKS: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    block, chunk, matrix = program(BLOCKS, CHUNKS)
    b, h = matrix // HEADS, matrix % HEADS
    steps = chunk * CHUNK + tl.arange(0, CHUNK)
    n = tl.arange(0, CHUNK)
    rows = block * BLOCK_K + tl.arange(0, BLOCK_K)
    place = (matrix.to(tl.int64) * CHUNKS + chunk) * (DK * DV)
    # B below the diagonal and on it, and B^T: of one, a turned copy would do, which Triton 3.4 to 3.7
    # compile wrongly
    lower, upper = tl.zeros((CHUNK, CHUNK), WIDE), tl.zeros((CHUNK, CHUNK), WIDE)
    read, written = tl.zeros((CHUNK, BLOCK_K), WIDE), tl.zeros((CHUNK, BLOCK_K), WIDE)
    crossing = tl.zeros((BLOCK_K,), WIDE)
    for i in range(tl.cdiv(DV, BLOCK_V)):
        columns = i * BLOCK_V + tl.arange(0, BLOCK_V)
        given = tile(dy, b, h, steps, TIME, HEADS, DV, columns)
        if CORRECTION:
            given = -given
        values = tile(v, b, h, steps, TIME, HEADS, DV, columns)
        lower = tl.dot(given, tl.trans(values), lower, input_precision=PRECISION, out_dtype=WIDE)
        upper = tl.dot(values, tl.trans(given), upper, input_precision=PRECISION, out_dtype=WIDE)
        inside = (columns < DV)[:, None] & (rows < DK)[None, :]
        at = place + columns[:, None] + rows[None, :] * DV
        state = tl.load(states + at, mask=inside, other=0.0)
        read = tl.dot(given, state.to(given.dtype), read, input_precision=PRECISION, out_dtype=WIDE)
        if not CORRECTION:
            gradient = tl.load(gradients + at, mask=inside, other=0.0)
            written = tl.dot(
                values, gradient.to(values.dtype), written, input_precision=PRECISION, out_dtype=WIDE
            )
            if DECAY != NONE:
                crossing += tl.sum(state.to(WIDE) * gradient.to(WIDE), axis=0)
    queries = tile(q, b, h, steps, TIME, HEADS, DK, rows)
    keys = tile(k, b, h, steps, TIME, HEADS, DK, rows)
    strength = tl.full((CHUNK,), 1.0, WIDE)
    if CORRECTION:
        strength = tl.load(beta + (b.to(tl.int64) * TIME + steps) * HEADS + h, mask=steps < TIME, other=0.0)
        strength = strength.to(WIDE)
        lower = tl.where(n[:, None] > n[None, :], lower, 0.0)
        upper = tl.where(n[:, None] < n[None, :], upper * strength[None, :], 0.0)
    if DECAY == NONE:
        lower = tl.where(n[:, None] >= n[None, :], lower, 0.0).to(keys.dtype)
        upper = tl.where(n[:, None] <= n[None, :], upper, 0.0).to(keys.dtype)
        read = tl.dot(lower, keys, read, input_precision=PRECISION, out_dtype=WIDE)
        written = tl.dot(upper, queries, written, input_precision=PRECISION, out_dtype=WIDE)
    else:
        first, second = of_chunk(
            decays, reset, b, h, chunk, TIME, strides, rows, HEADS, DK, DECAY, RESET, EXACT, CHUNK, WIDE
        )
        read *= factor(from_start(first, second, EXACT), DECAY)
        through = crossing * whole(first, second, EXACT)
        passed = tl.zeros((CHUNK, BLOCK_K), WIDE)
        if EXACT:
            # states that are read from here on
            passed += tl.cumsum(read * queries * strength[:, None], axis=0, reverse=True)
        if not CORRECTION:
            written *= factor(to_end(first, second, DECAY, EXACT), DECAY)
            reaching = written * keys
            if EXACT:
                # keys before this step that reach the end
                passed += tl.cumsum(reaching, axis=0) - reaching
            else:
                through += tl.sum(reaching, axis=0)
        if DECAY == HEAD:
            lower *= of_pairs(first, False, EXACT, CHUNK)
            upper *= of_pairs(first, True, EXACT, CHUNK)
            read = tl.dot(lower.to(keys.dtype), keys, read, input_precision=PRECISION, out_dtype=WIDE)
            written = tl.dot(
                upper.to(keys.dtype), queries, written, input_precision=PRECISION, out_dtype=WIDE
            )
            if EXACT:
                # pairs that pass j: sums over m < j, then over n >= j
                pairs = tl.dot(queries, tl.trans(keys), input_precision=PRECISION, out_dtype=WIDE)
                pairs *= lower * strength[:, None]
                before = tl.cumsum(pairs, axis=1) - pairs
                of_head = tl.sum(tl.where(n[:, None] >= n[None, :], before, 0.0), axis=0)
                of_head += tl.sum(passed, axis=1)
            else:
                of_step = strength * tl.sum(read * queries, axis=1) - tl.sum(written * keys, axis=1)
                of_head = tl.cumsum(of_step, axis=0, reverse=True)
            of_head += tl.sum(through)
            at = ((b.to(tl.int64) * TIME + steps) * HEADS + h) * BLOCKS + block
            if CORRECTION:
                of_head += tl.load(passing + at, mask=steps < TIME, other=0.0)
            tl.store(passing + at, of_head, mask=steps < TIME)
        else:
            both = tl.where(n[:, None] >= n[None, :], lower, upper)
            if not CORRECTION:
                own = tl.sum(tl.where(n[:, None] == n[None, :], both, 0.0), axis=1)[:, None]
                read += own * keys
                written += own * queries
            for level in range(LEVELS):
                weight = of_level(first, decays, b, h, chunk, TIME, rows, level, HEADS, DK, EXACT, CHUNK)
                # a step is read or written, by which block it is in, and its gradient is of what the other
                # block writes or reads
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
                    passed += summed(segments(level, True, CHUNK), found * x * x_read)
            if not EXACT:
                of_step = read * queries * strength[:, None] - written * keys
                passed = tl.cumsum(of_step, axis=0, reverse=True)
            passed += through[None, :]
            if CORRECTION:
                passed += tile(passing, b, h, steps, TIME, HEADS, DK, rows)
            put(passing, passed, b, h, steps, TIME, HEADS, DK, rows)
    if CORRECTION:
        at = ((b.to(tl.int64) * TIME + steps) * HEADS + h) * BLOCKS + block
        tl.store(dbeta + at, tl.sum(read * keys, axis=1), mask=steps < TIME)
        written += strength[:, None] * read + tile(dk, b, h, steps, TIME, HEADS, DK, rows)
    else:
        put(dq, read, b, h, steps, TIME, HEADS, DK, rows)
    put(dk, written, b, h, steps, TIME, HEADS, DK, rows)
