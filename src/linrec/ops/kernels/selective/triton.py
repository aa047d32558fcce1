"""GPU kernels of the selective scan; imported at the first use, because importing Triton is slow.

A program processes a batch row, a block of channels and a segment of time, in chunks of STEPS steps. Its
states are a tile (STATES, COLUMNS) in registers: a thread holds some states of a few consecutive channels.
So sums over states and sums over channels, of which the backward kernel has two each, are both partly done
within a thread. There are few warps, so the rows of a chunk are loaded while the previous chunk is computed.
Sums over states are combined for all steps of a chunk at once, because the warps synchronise there. B and C
of a step and state are adjacent, as the two parts of a complex number.

The forward kernel saves the states before every chunk; the backward kernel recomputes the links and states of
a chunk from them, in registers. Steps past the end of time are the identity. Strides along time are
compile-time constants, so that the addresses of a chunk need only a register and constants.
"""

# tuples grow row by row, because the loops are unrolled
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from linrec.ops.kernels.elementwise.tiles import loaded


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    segments, CHANNELS: tl.constexpr, STATES: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr
):
    """Return row, segment and block of a program, its channels (1, COLUMNS) and its states (STATES, 1)."""
    blocks = tl.cdiv(CHANNELS, COLUMNS)
    block = tl.program_id(0) % blocks
    segment = tl.program_id(0) // blocks % segments
    row = (tl.program_id(0) // blocks // segments).to(tl.int64)
    # declared alignment: a vector load takes at most VECTOR channels, which then belong to a thread
    channel = tl.multiple_of(block * COLUMNS + tl.arange(0, COLUMNS)[None, :], [1, VECTOR])
    return row, segment, block, channel, tl.arange(0, STATES)[:, None]


@triton.jit
def _before(step, time, like):  # type: ignore[no-untyped-def]
    """Return whether a step is before the end of time, as a mask of the shape of `like`."""
    # Triton's interpreter broadcasts numbers, but not booleans
    return step + 0 * like.to(tl.int32) < time


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    ptr, step, time, inside, STEPS: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr
):
    """Load the rows from `step` on, 0 past the end; `ptr` (1, COLUMNS) points to row 0.

    Rows are not converted here, because a conversion would wait for the memory.
    """
    rows = ()
    ptr += step.to(tl.int64) * CHANNELS
    for r in tl.static_range(STEPS):
        mask = inside if EVEN else inside & _before(step + r, time, inside)
        rows = rows + (tl.load(ptr + r * CHANNELS, mask=mask, other=0.0),)  # noqa: RUF005
    return rows


@triton.jit
def _widened(rows, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    wide = ()
    for r in tl.static_range(len(rows)):
        wide = wide + (rows[r].to(WIDE),)  # noqa: RUF005
    return wide


@triton.jit
def _link(dt, rates, cut_ptr, step, time, HAS_CUT: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a = exp(dt A) of a step, where `rates` is A / log 2; 0 at a reset."""
    a = tl.exp2(dt * rates)
    if HAS_CUT:
        cut = tl.load(cut_ptr + step) if EVEN else tl.load(cut_ptr + step, mask=step < time, other=0)
        a = tl.where(cut != 0, 0.0, a)
    return a


@triton.jit
def _passed(a, h, HAS_CUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a h; a link of 0, as at a reset, gives zero even if h is NaN."""
    return tl.where(a == 0.0, 0.0, a * h) if HAS_CUT else a * h


@triton.jit
def _weights_from(ptr, offset, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a pointer to the chunk's B and C; a pair of float64 numbers takes two words."""
    if tl.float64 == WIDE:
        return ptr + 2 * offset
    else:
        return ptr + offset


@triton.jit
def _weights(ptr, n, r, step, time, STATES: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return B and C of step r of a chunk, (STATES, 1), 0 past the end."""
    mask = n >= 0 if EVEN else _before(step + r, time, n)
    return loaded(ptr, n + r * STATES, mask, 0.0, True, WIDE)


@triton.jit
def _stacked(rows, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tiles of all steps as a single tensor, with time as its last axis."""
    joined = rows
    # first join each step with the step half a chunk later, and so on, so that steps end up in order
    for level in tl.static_range(20):
        if 2**level < STEPS:
            pairs = ()
            for i in tl.static_range(STEPS // 2 ** (level + 1)):
                pairs = pairs + (tl.join(joined[i], joined[i + STEPS // 2 ** (level + 1)]),)  # noqa: RUF005
            joined = pairs
    return joined[0]


@triton.jit
def _summed(rows, STEPS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums over states of all steps' tiles, (COLUMNS, STEPS)."""
    return tl.reshape(tl.sum(_stacked(rows, STEPS), axis=0), [COLUMNS, STEPS])


@triton.jit
def _chunk(  # type: ignore[no-untyped-def]
    step, time, block, STEPS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr
):
    """Return the offsets of the rows from `step` on, and the mask of existing steps, (COLUMNS, STEPS)."""
    channel = block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    r = tl.arange(0, STEPS)[None, :]
    mask = channel + 0 * r < CHANNELS if EVEN else (channel < CHANNELS) & (step + r < time)
    return step.to(tl.int64) * CHANNELS + (r * CHANNELS + channel), mask


@triton.jit
def _store_sums(  # type: ignore[no-untyped-def]
    ptr, rows, step, time, STATES: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr
):
    """Store the sums over channels (STATES,) for the steps from `step` on."""
    total = tl.reshape(_stacked(rows, STEPS), [STATES, STEPS])
    n = tl.arange(0, STATES)[:, None]
    r = tl.arange(0, STEPS)[None, :]
    mask = n + r >= 0 if EVEN else step + r + 0 * n < time
    tl.store(ptr + step.to(tl.int64) * STATES + (r * STATES + n), total, mask=mask)


@triton.jit
def ends(  # type: ignore[no-untyped-def]
    u_ptr, dt_ptr, A_ptr, weights_ptr, cut_ptr, links_ptr, ends_ptr, time, chunks, segments, A_row,
    ADJOINT: tl.constexpr, HAS_CUT: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Fill links and ends (b, segments, n, c): a segment maps a state h to link h + end.

    With ADJOINT, u is dy, and a segment passes link r + end to the previous segment.
    """
    row, segment, _, channel, n = _place(segments, CHANNELS, STATES, COLUMNS, VECTOR)
    inside = channel < CHANNELS
    rates = tl.load(A_ptr + row * A_row + n * CHANNELS + channel, mask=inside, other=0.0) * 1.4426950408889634
    first = row * time * CHANNELS + channel
    cut_ptr += row * time
    each = tl.cdiv(chunks, segments)
    begin = segment * each
    end = tl.minimum(begin + each, chunks)
    value = tl.zeros([STATES, COLUMNS], WIDE)
    link = value + 1.0
    for index in range(begin, end):
        step = (begin + end - 1 - index if ADJOINT else index) * STEPS
        weights = _weights_from(weights_ptr, (row * time + step) * STATES, WIDE)
        dt = _widened(_rows(dt_ptr + first, step, time, inside, STEPS, CHANNELS, EVEN), WIDE)
        u = _widened(_rows(u_ptr + first, step, time, inside, STEPS, CHANNELS, EVEN), WIDE)
        if ADJOINT:
            for r in tl.static_range(STEPS - 1, -1, -1):
                b, c = _weights(weights, n, r, step, time, STATES, EVEN, WIDE)
                a = _link(dt[r], rates, cut_ptr, step + r, time, HAS_CUT, EVEN)
                value = _passed(a, value + c * u[r], HAS_CUT)
                link = _passed(a, link, HAS_CUT)
        else:
            for r in tl.static_range(STEPS):
                b, c = _weights(weights, n, r, step, time, STATES, EVEN, WIDE)
                a = _link(dt[r], rates, cut_ptr, step + r, time, HAS_CUT, EVEN)
                value = _passed(a, value, HAS_CUT) + b * (dt[r] * u[r])
                link = _passed(a, link, HAS_CUT)
    at = ((row * segments + segment) * STATES + n) * CHANNELS + channel
    tl.store(links_ptr + at, link, mask=inside)
    tl.store(ends_ptr + at, value, mask=inside)


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, A_ptr, weights_ptr, D_ptr, begins_ptr, cut_ptr, y_ptr, starts_ptr, last_ptr, time, chunks,
    segments, A_row, D_row,
    KEEP: tl.constexpr, HAS_CUT: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Fill y (b, t, c), starts (b, chunks, n, c) and last (b, n, c), given all segments' initial states."""
    row, segment, block, channel, n = _place(segments, CHANNELS, STATES, COLUMNS, VECTOR)
    inside = channel < CHANNELS
    rates = tl.load(A_ptr + row * A_row + n * CHANNELS + channel, mask=inside, other=0.0) * 1.4426950408889634
    column = block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    D = tl.load(D_ptr + row * D_row + column, mask=column < CHANNELS, other=0.0)
    first = row * time * CHANNELS + channel
    cut_ptr += row * time
    each = tl.cdiv(chunks, segments)
    begin = segment * each
    end = tl.minimum(begin + each, chunks)
    h = tl.load(
        begins_ptr + ((row * segments + segment) * STATES + n) * CHANNELS + channel, mask=inside, other=0.0
    )
    next_step = tl.minimum(begin, chunks - 1) * STEPS
    next_dt = _rows(dt_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
    next_x = _rows(x_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
    for chunk in range(begin, end):
        step = chunk * STEPS
        weights = _weights_from(weights_ptr, (row * time + step) * STATES, WIDE)
        dt = _widened(next_dt, WIDE)
        x = _widened(next_x, WIDE)
        next_step = tl.minimum(chunk + 1, chunks - 1) * STEPS
        next_dt = _rows(dt_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
        next_x = _rows(x_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
        if KEEP:
            tl.store(starts_ptr + ((row * chunks + chunk) * STATES + n) * CHANNELS + channel, h, mask=inside)
        rows = ()
        for r in tl.static_range(STEPS):
            b, c = _weights(weights, n, r, step, time, STATES, EVEN, WIDE)
            a = _link(dt[r], rates, cut_ptr, step + r, time, HAS_CUT, EVEN)
            h = _passed(a, h, HAS_CUT) + b * (dt[r] * x[r])
            rows = rows + (c * h,)  # noqa: RUF005
        # load x again, from the cache, in the layout of the store
        at, mask = _chunk(step, time, block, STEPS, CHANNELS, COLUMNS, EVEN)
        at += row * time * CHANNELS
        y = _summed(rows, STEPS, COLUMNS) + D * tl.load(x_ptr + at, mask=mask, other=0.0).to(WIDE)
        tl.store(y_ptr + at, y, mask=mask)
    if end == chunks:
        tl.store(last_ptr + (row * STATES + n) * CHANNELS + channel, h, mask=inside)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, A_ptr, weights_ptr, D_ptr, cut_ptr, starts_ptr, dy_ptr, carries_ptr, dx_ptr, ddt_ptr,
    dA_ptr, dB_ptr, dC_ptr, dD_ptr, dstate_ptr, time, chunks, segments, rows_of_batch, A_row, D_row,
    HAS_CUT: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Fill dx and ddt (b, t, c), dB and dC (blocks, b, t, n), and gradients that segments share.

    The latter are dA (b, segments, n, c) and dD (b, segments, c); the first segment fills dstate (b, n, c).
    With g_t = C_t dy_t + a_{t+1} g_{t+1} and w_t = a_t h_{t-1}: dC = sum_c dy h, dB = sum_c g dt x,
    dx = dt sum_n g B + D dy, ddt = x sum_n g B + sum_n g A w, dA = sum_t g dt w.
    """
    row, segment, block, channel, n = _place(segments, CHANNELS, STATES, COLUMNS, VECTOR)
    inside = channel < CHANNELS
    A = tl.load(A_ptr + row * A_row + n * CHANNELS + channel, mask=inside, other=0.0)
    rates = A * 1.4426950408889634
    column = block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    D = tl.load(D_ptr + row * D_row + column, mask=column < CHANNELS, other=0.0)
    first = row * time * CHANNELS + channel
    cut_ptr += row * time
    # offset of this block's partial sums of dB and dC
    sums = (block.to(tl.int64) * rows_of_batch + row) * time * STATES
    each = tl.cdiv(chunks, segments)
    begin = segment * each
    end = tl.minimum(begin + each, chunks)
    of_segment = (row * segments + segment) * STATES
    carry = tl.load(carries_ptr + (of_segment + n) * CHANNELS + channel, mask=inside, other=0.0)
    dA = tl.zeros([STATES, COLUMNS], WIDE)
    dD = tl.zeros([1, COLUMNS], WIDE)
    starts_ptr += (row * chunks * STATES + n) * CHANNELS + channel
    next_chunk = end - 1
    next_step = next_chunk * STEPS
    next_dt = _rows(dt_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
    next_x = _rows(x_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
    next_dy = _rows(dy_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
    next_h = tl.load(starts_ptr + next_chunk.to(tl.int64) * STATES * CHANNELS, mask=inside, other=0.0)
    for index in range(begin, end):
        step = (begin + end - 1 - index) * STEPS
        weights = _weights_from(weights_ptr, (row * time + step) * STATES, WIDE)
        dt = _widened(next_dt, WIDE)
        x = _widened(next_x, WIDE)
        dy = _widened(next_dy, WIDE)
        h = next_h
        links = ()
        passed = ()
        dCs = ()
        for r in tl.static_range(STEPS):
            b, c = _weights(weights, n, r, step, time, STATES, EVEN, WIDE)
            a = _link(dt[r], rates, cut_ptr, step + r, time, HAS_CUT, EVEN)
            w = _passed(a, h, HAS_CUT)
            h = w + b * (dt[r] * x[r])
            links = links + (a,)  # noqa: RUF005
            passed = passed + (w,)  # noqa: RUF005
            dCs = dCs + (tl.sum(dy[r] * h, axis=1),)  # noqa: RUF005
        _store_sums(dC_ptr + sums, dCs, step, time, STATES, STEPS, EVEN)
        next_chunk = tl.maximum(begin + end - 2 - index, 0)
        next_step = next_chunk * STEPS
        next_dt = _rows(dt_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
        next_x = _rows(x_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
        next_dy = _rows(dy_ptr + first, next_step, time, inside, STEPS, CHANNELS, EVEN)
        next_h = tl.load(starts_ptr + next_chunk.to(tl.int64) * STATES * CHANNELS, mask=inside, other=0.0)
        gBs = ()
        gAs = ()
        dBs = ()
        for r in tl.static_range(STEPS - 1, -1, -1):
            b, c = _weights(weights, n, r, step, time, STATES, EVEN, WIDE)
            g = carry + c * dy[r]
            gw = g * passed[r]
            carry = _passed(links[r], g, HAS_CUT)
            dA += dt[r] * gw
            dD += dy[r] * x[r]
            dBs = (tl.sum(g * (dt[r] * x[r]), axis=1),) + dBs  # noqa: RUF005
            # steps are visited in reverse, so prepend
            gBs = (g * b,) + gBs  # noqa: RUF005
            gAs = (gw * A,) + gAs  # noqa: RUF005
        # load inputs again, from the cache, in the layout of the stores
        at, mask = _chunk(step, time, block, STEPS, CHANNELS, COLUMNS, EVEN)
        at += row * time * CHANNELS
        gB = _summed(gBs, STEPS, COLUMNS)
        dx = gB * tl.load(dt_ptr + at, mask=mask, other=0.0).to(WIDE)
        dx += D * tl.load(dy_ptr + at, mask=mask, other=0.0).to(WIDE)
        ddt = gB * tl.load(x_ptr + at, mask=mask, other=0.0).to(WIDE) + _summed(gAs, STEPS, COLUMNS)
        tl.store(dx_ptr + at, dx, mask=mask)
        tl.store(ddt_ptr + at, ddt, mask=mask)
        _store_sums(dB_ptr + sums, dBs, step, time, STATES, STEPS, EVEN)
    tl.store(dA_ptr + (of_segment + n) * CHANNELS + channel, dA, mask=inside)
    tl.store(dD_ptr + (row * segments + segment) * CHANNELS + channel, dD, mask=inside)
    if segment == 0:
        tl.store(dstate_ptr + (row * STATES + n) * CHANNELS + channel, carry, mask=inside)
