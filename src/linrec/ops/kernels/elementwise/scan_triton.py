"""GPU kernels of the elementwise recurrence; imported at the first use, because importing Triton is slow.

See `tiles` for the division of time and the memory layout. Steps past the end of time are the identity (link
1, input 0). Strides are compile-time constants, so that the addresses of a tile need only a register and
constants.
"""

import triton
import triton.language as tl

from linrec.ops.kernels.elementwise.tiles import (
    applied,
    carried,
    entries,
    loaded,
    program,
    scanned,
    stored,
    stored_last,
    times,
)


@triton.jit
def _steps(  # type: ignore[no-untyped-def]
    a_ptr, a_at, a_mask, x_ptr, x_at, x_mask, cut_ptr, cut_mask,
    HAS_CUT: tl.constexpr, COMPLEX: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load links and inputs: 1 and 0 where the masks are false, and links of 0 at resets."""
    a, a_i = loaded(a_ptr, a_at, a_mask, 1.0, COMPLEX, WIDE)
    x, x_i = loaded(x_ptr, x_at, x_mask, 0.0, COMPLEX, WIDE)
    if HAS_CUT:
        cut = tl.load(cut_ptr, mask=cut_mask, other=0) != 0
        a = tl.where(cut, 0.0, a)
        a_i = tl.where(cut, 0.0, a_i)
    return a, a_i, x, x_i


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    tile, time, inside,
    FALLING: tl.constexpr, STEPS_TOUCH: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the coordinates of a tile's steps: index, index < time, the same and `inside`, t, origin.

    The index counts in the direction of travel, and origin + t in the direction of the tensors; they differ
    if FALLING. STEPS_TOUCH means that consecutive steps of some tensor are adjacent in memory.
    """
    LENGTH: tl.constexpr = PIECES * ROWS
    step = ROWS * tl.arange(0, PIECES)[:, None, None] + tl.arange(0, ROWS)[None, :, None]
    index = tile * LENGTH + step
    valid = index < time
    mask = tl.full([PIECES, ROWS, COLUMNS], True, tl.int1) if EVEN else valid & inside
    if FALLING:
        t = LENGTH - 1 - step
        origin = (time - (tile + 1) * LENGTH).to(tl.int64)
    else:
        # if adjacent elements are steps, Triton would distribute a segment's rows over threads, which it
        # scans wrongly or not at all; a factor that is 1 only at run time hides the adjacency
        t = step
        if STEPS_TOUCH:
            t = step * tl.where(time > 0, 1, 0)
        origin = tl.cast(tile, tl.int64) * LENGTH
    return index, valid, mask, t, origin


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    a_ptr, x_ptr, state_ptr, cut_ptr, y_ptr, last_ptr, words_ptr, time, chains, tiles, a_row, x_row,
    A_STEP: tl.constexpr, A_CHANNEL: tl.constexpr, X_STEP: tl.constexpr, X_CHANNEL: tl.constexpr,
    CHANNELS: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr, COMPLEX: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_CUT: tl.constexpr, AGAIN: tl.constexpr, EVEN: tl.constexpr,
    CHAINED: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Fill y (b, t, c) and last (b, c), both contiguous. UNIT is the number of array elements per number."""
    chain, tile, row, channel, columns = program(chains, CHANNELS, COLUMNS, VECTOR)
    inside = channel + columns < CHANNELS
    TOUCH: tl.constexpr = CHANNELS == 1 or A_STEP == 1 or X_STEP == 1
    _, valid, mask, t, origin = _places(tile, time, inside, REVERSE, TOUCH, EVEN, PIECES, ROWS, COLUMNS)

    a_ptr += (row * a_row + origin * A_STEP + channel * A_CHANNEL) * UNIT
    x_ptr += (row * x_row + origin * X_STEP + channel * X_CHANNEL) * UNIT
    y_ptr += ((row * time + origin) * CHANNELS + channel) * UNIT
    vector = row * CHANNELS + channel + columns
    a_at = t * A_STEP + columns * A_CHANNEL
    x_at = t * X_STEP + columns * X_CHANNEL
    cut_ptr += row * time + origin
    a, a_i, x, x_i = _steps(a_ptr, a_at, mask, x_ptr, x_at, mask, cut_ptr + t, valid, HAS_CUT, COMPLEX, WIDE)
    start = tl.zeros([1, 1, COLUMNS], WIDE)
    start_i = start
    if HAS_STATE:
        start, start_i = loaded(state_ptr, vector, inside, 0.0, COMPLEX, WIDE)

    b, b_i, y, y_i = scanned(a, a_i, x, x_i, HAS_CUT, COMPLEX)
    whole, whole_i, end, end_i = entries(b, b_i, y, y_i, ROWS - 1, COMPLEX)
    start, start_i, after, after_i = carried(
        whole, whole_i, end, end_i, start, start_i, words_ptr, chain, chains, tile, tiles,
        HAS_CUT, COMPLEX, CHAINED, WIDE, PIECES, COLUMNS, VECTOR, GROUP, GROUPS,
    )  # fmt: skip
    if AGAIN:
        a, a_i, x, x_i = _steps(
            a_ptr, a_at, mask, x_ptr, x_at, mask, cut_ptr + t, valid, HAS_CUT, COMPLEX, WIDE
        )
        y, y_i = applied(a, a_i, x, x_i, start, start_i, HAS_CUT, COMPLEX)
        first = tl.arange(0, ROWS)[None, :, None] == 0
        _, _, y, y_i = scanned(a, a_i, tl.where(first, y, x), tl.where(first, y_i, x_i), HAS_CUT, COMPLEX)
    else:
        y, y_i = applied(b, b_i, y, y_i, start, start_i, HAS_CUT, COMPLEX)
    stored(y_ptr, t * CHANNELS + columns, y, y_i, mask, COMPLEX, WIDE)
    if tile == tiles - 1:
        stored_last(last_ptr, vector, after, after_i, inside, COMPLEX, WIDE, PIECES)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    a_ptr, y_ptr, state_ptr, cut_ptr, dy_ptr, dlast_ptr, da_ptr, dx_ptr, dstate_ptr, words_ptr, time, chains,
    tiles, a_row, dy_row,
    A_STEP: tl.constexpr, A_CHANNEL: tl.constexpr, DY_STEP: tl.constexpr, DY_CHANNEL: tl.constexpr,
    CHANNELS: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr, COMPLEX: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_CUT: tl.constexpr, NEEDS_A: tl.constexpr, SUMMED: tl.constexpr,
    AGAIN: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Fill dx (b, t, c), dstate (b, c) and da (b, t or tiles, c), all contiguous; y is contiguous.

    The adjoint g_t = dy_t + conj(a_{t+1}) g_{t+1} runs opposite to the recurrence, whose direction is
    `REVERSE`. Then dx_t = g_t, da_t = g_t conj(y_{t-1}), dstate = conj(a_1) g_1.
    """
    chain, tile, row, channel, columns = program(chains, CHANNELS, COLUMNS, VECTOR)
    inside = channel + columns < CHANNELS
    TOUCH: tl.constexpr = CHANNELS == 1 or A_STEP == 1 or DY_STEP == 1
    index, valid, mask, t, origin = _places(
        tile, time, inside, not REVERSE, TOUCH, EVEN, PIECES, ROWS, COLUMNS
    )
    # offset from t to the next step of the recurrence
    NEXT: tl.constexpr = -1 if REVERSE else 1

    a_ptr += (row * a_row + origin * A_STEP + channel * A_CHANNEL) * UNIT
    dy_ptr += (row * dy_row + origin * DY_STEP + channel * DY_CHANNEL) * UNIT
    out = ((row * time + origin) * CHANNELS + channel) * UNIT
    cut_ptr += row * time + origin
    vector = row * CHANNELS + channel + columns
    at = t * CHANNELS + columns
    # the adjoint enters step t over the next step's link; the last step has no next step
    linked = mask & (index > 0)
    next_ptr = a_ptr + NEXT * A_STEP * UNIT
    a_at = t * A_STEP + columns * A_CHANNEL
    dy_at = t * DY_STEP + columns * DY_CHANNEL
    next_cut, next_valid = cut_ptr + t + NEXT, valid & (index > 0)
    a, a_i, g, g_i = _steps(
        next_ptr, a_at, linked, dy_ptr, dy_at, mask, next_cut, next_valid, HAS_CUT, COMPLEX, WIDE
    )
    inner = mask & (index < time - 1)
    if NEEDS_A and not AGAIN:
        y, y_i = loaded(y_ptr + out - NEXT * CHANNELS * UNIT, at, inner, 0.0, COMPLEX, WIDE)
    start, start_i = loaded(dlast_ptr, vector, inside, 0.0, COMPLEX, WIDE)

    b, b_i, z, z_i = scanned(a, -a_i, g, g_i, HAS_CUT, COMPLEX)
    whole, whole_i, end, end_i = entries(b, b_i, z, z_i, ROWS - 1, COMPLEX)
    start, start_i, after, after_i = carried(
        whole, whole_i, end, end_i, start, start_i, words_ptr, chain, chains, tile, tiles,
        HAS_CUT, COMPLEX, CHAINED, WIDE, PIECES, COLUMNS, VECTOR, GROUP, GROUPS,
    )  # fmt: skip
    if AGAIN:
        a, a_i, g, g_i = _steps(
            next_ptr, a_at, linked, dy_ptr, dy_at, mask, next_cut, next_valid, HAS_CUT, COMPLEX, WIDE
        )
        if NEEDS_A:
            y, y_i = loaded(y_ptr + out - NEXT * CHANNELS * UNIT, at, inner, 0.0, COMPLEX, WIDE)
        z, z_i = applied(a, -a_i, g, g_i, start, start_i, HAS_CUT, COMPLEX)
        first = tl.arange(0, ROWS)[None, :, None] == 0
        _, _, g, g_i = scanned(a, -a_i, tl.where(first, z, g), tl.where(first, z_i, g_i), HAS_CUT, COMPLEX)
    else:
        g, g_i = applied(b, b_i, z, z_i, start, start_i, HAS_CUT, COMPLEX)
    stored(dx_ptr + out, at, g, g_i, mask, COMPLEX, WIDE)
    if NEEDS_A:
        if HAS_STATE:
            state, state_i = loaded(state_ptr, vector, inside, 0.0, COMPLEX, WIDE)
            y = tl.where(index == time - 1, state, y)
            y_i = tl.where(index == time - 1, state_i, y_i)
        if COMPLEX:
            da = g * y + g_i * y_i
            da_i = g_i * y - g * y_i
        else:
            da = g * y
            da_i = da
        if HAS_CUT:
            cut = tl.load(cut_ptr + t, mask=valid, other=0) != 0
            da = tl.where(cut, 0.0, da)
            da_i = tl.where(cut, 0.0, da_i)
        if SUMMED:
            da = tl.sum(tl.sum(tl.where(mask, da, 0.0), axis=1, keep_dims=True), axis=0, keep_dims=True)
            da_i = tl.sum(tl.sum(tl.where(mask, da_i, 0.0), axis=1, keep_dims=True), axis=0, keep_dims=True)
            per_tile = (row * tiles + tile) * CHANNELS + vector - row * CHANNELS
            stored(da_ptr, per_tile, da, da_i, inside, COMPLEX, WIDE)
        else:
            stored(da_ptr + out, at, da, da_i, mask, COMPLEX, WIDE)
    if tile == tiles - 1:
        # over the first step's link into the initial state
        at_first = (time - 1 if REVERSE else 0) - origin
        into = a_ptr + at_first * A_STEP * UNIT
        link, link_i = loaded(into, columns * A_CHANNEL, inside, 0.0, COMPLEX, WIDE)
        if HAS_CUT:
            is_cut = tl.load(cut_ptr + at_first) != 0
            link = tl.where(is_cut, 0.0, link)
            link_i = tl.where(is_cut, 0.0, link_i)
        dstate, dstate_i = times(link, -link_i, after, after_i, HAS_CUT, COMPLEX)
        stored_last(dstate_ptr, vector, dstate, dstate_i, inside, COMPLEX, WIDE, PIECES)
