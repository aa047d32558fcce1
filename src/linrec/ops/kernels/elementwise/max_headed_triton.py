"""GPU kernels of the max-headed GateLoop; imported at the first use, because importing Triton is slow.

Gates are computed in registers: a = exp(log_decay + i phase), k v and the states are never written to memory.
The forward kernel saves the value before every segment of a tile, from which the backward kernel recomputes
the states. See `tiles` for the division of time. Steps past the end are the identity. A thread holds its rows
in tuples, so that both directions of time use the same registers.
"""

# tuples grow row by row, because the loops are unrolled
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from linrec.ops.kernels.elementwise.tiles import carried, loaded, program, stored, stored_last, times

# kinds of a gate: missing, (b, t, h), or (h)
NONE = tl.constexpr(0)
STEP = tl.constexpr(1)
CONSTANT = tl.constexpr(2)


@triton.jit
def turned(a, angle, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a cos(angle) and a sin(angle), to a digit or two of float32, for |angle| up to 1e9.

    Multiples of pi are subtracted in float64; an odd multiple flips the sign of a. The polynomials are
    minimax fits on [-pi / 2, pi / 2], with errors of 2e-10 and 5e-9.
    """
    if tl.float64 == WIDE:
        return a * tl.cos(angle), a * tl.sin(angle)
    else:
        # adding 1.5 * 2^52 rounds to an integer, which is then in the lowest bits
        wide = angle.to(tl.float64)
        shifted = wide * 0.3183098861837907 + 6755399441055744.0
        r = (wide - (shifted - 6755399441055744.0) * 3.141592653589793).to(tl.float32)
        odd = shifted.to(tl.int64, bitcast=True).to(tl.int32) << 31
        a = (a.to(tl.int32, bitcast=True) ^ odd).to(tl.float32, bitcast=True)
        s = r * r
        sine = -1.9806601571395293e-4 + s * 2.600024425320445e-6
        sine = r + r * s * (-1.6666657088920372e-1 + s * (8.333017104229325e-3 + s * sine))
        cosine = -1.3888403220346868e-3 + s * (2.476187061867599e-5 - s * 2.607681647767701e-7)
        cosine = 1.0 + s * (-4.99999995491101e-1 + s * (4.166664070749516e-2 + s * cosine))
        return a * cosine, a * sine


@triton.jit
def _within(step, time, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mask of a row; if tiles fill time and channels exactly, a constant that costs nothing."""
    if EVEN:
        return inside
    else:
        return (step < time) & inside


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    ptr, at, begin, time, inside,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows of all segments, whose first steps are `begin` (PIECES, 1, 1); 0 past the end."""
    rows = ()
    for r in tl.static_range(ROWS):
        mask = _within(begin + r, time, inside, EVEN)
        rows = rows + (tl.load(ptr + at + r * CHANNELS, mask=mask, other=0.0).to(WIDE),)  # noqa: RUF005
    return rows


@triton.jit
def _gates(  # type: ignore[no-untyped-def]
    ptr, at, column, begin, time, inside,
    KIND: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load the gates of the rows and of the row after them; 0, which means identity, for missing gates."""
    rows = ()
    for r in tl.static_range(ROWS + 1):
        # the row after the last may be past the end of time, even if tiles fill it exactly
        mask = _within(begin + r, time, inside, EVEN and r < ROWS)
        if KIND == STEP:
            gate = tl.load(ptr + at + r * CHANNELS, mask=mask, other=0.0).to(WIDE)
        elif KIND == CONSTANT:
            gate = tl.load(ptr + column + 0 * at, mask=mask, other=0.0).to(WIDE)
        else:
            gate = tl.zeros_like(at).to(WIDE)
        rows = rows + (gate,)  # noqa: RUF005
    return rows


@triton.jit
def _links(  # type: ignore[no-untyped-def]
    decays, phases, cut_ptr, begin, time,
    N: tl.constexpr, PHASE: tl.constexpr, HAS_CUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return a = exp(log_decay + i phase) of the first N rows, 0 at resets."""
    links = ()
    links_i = ()
    for r in tl.static_range(N):
        # exp2 flushes subnormal results to zero; exp needs three more instructions for them
        a = tl.exp2(decays[r] * 1.4426950408889634)
        a_i = a
        if PHASE != NONE:
            a, a_i = turned(a, phases[r], WIDE)
        if HAS_CUT:
            linked = tl.load(cut_ptr + begin + r, mask=begin + r < time, other=0) == 0
            a, a_i = tl.where(linked, a, 0.0), tl.where(linked, a_i, 0.0)
        links = links + (a,)  # noqa: RUF005
        links_i = links_i + (a_i,)  # noqa: RUF005
    return links, links_i


@triton.jit
def _stepped(a, a_i, x, y, y_i, CUT: tl.constexpr, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a y + x for real x. With CUT, some links may be cut: a link of 0 gives x even if y is NaN."""
    if COMPLEX:
        result, result_i = x - a_i * y_i + a * y, a * y_i + a_i * y
        if CUT:
            cut = (a == 0.0) & (a_i == 0.0)
            result, result_i = tl.where(cut, x, result), tl.where(cut, 0.0, result_i)
    else:
        result, result_i = a * y + x, y_i
        if CUT:
            result = tl.where(a == 0.0, x, result)
    return result, result_i


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    place, row, channel, columns, time,
    CHANNELS: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile's coordinates: segments, columns, mask of valid columns, first steps of the segments.

    `place` is the tile's position in time. The tile's offset into a contiguous (b, t, h), and the offsets of
    its segments within the tile, follow.
    """
    piece = tl.arange(0, PIECES)[:, None, None]
    column = channel + columns
    begin = (place * PIECES + piece) * ROWS
    inside = tl.full([PIECES, 1, COLUMNS], True, tl.int1) if EVEN else column < CHANNELS
    out = (row * time + tl.cast(place, tl.int64) * (PIECES * ROWS)) * CHANNELS + channel
    return piece, column, inside, begin, out, piece * (ROWS * CHANNELS) + columns


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, decay_ptr, phase_ptr, cut_ptr, state_ptr, y_ptr, starts_ptr, last_ptr, words_ptr,
    time, chains, tiles,
    DECAY: tl.constexpr, PHASE: tl.constexpr, HAS_CUT: tl.constexpr, CHANNELS: tl.constexpr,
    COMPLEX: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr, WIDE: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Fill y (b, t, h), last (b, h) and starts (b, segments of all tiles, h); all tensors are contiguous."""
    chain, tile, row, channel, columns = program(chains, CHANNELS, COLUMNS, VECTOR)
    piece, column, inside, begin, out, at = _places(
        tile, row, channel, columns, time, CHANNELS, EVEN, PIECES, ROWS, COLUMNS
    )

    k = _rows(k_ptr + out, at, begin, time, inside, ROWS, CHANNELS, EVEN, WIDE)
    v = _rows(v_ptr + out, at, begin, time, inside, ROWS, CHANNELS, EVEN, WIDE)
    decays = _gates(
        decay_ptr + out * (DECAY == STEP), at, column, begin, time, inside, DECAY, ROWS, CHANNELS, EVEN, WIDE
    )
    phases = _gates(
        phase_ptr + out * (PHASE == STEP), at, column, begin, time, inside, PHASE, ROWS, CHANNELS, EVEN, WIDE
    )
    q = _rows(q_ptr + out, at, begin, time, inside, ROWS, CHANNELS, EVEN, WIDE)
    a, a_i = _links(decays, phases, cut_ptr + row * time, begin, time, ROWS, PHASE, HAS_CUT, WIDE)

    link, link_i, h = a[0], a_i[0], k[0] * v[0]
    h_i = tl.zeros_like(h)
    for r in tl.static_range(1, ROWS):
        h, h_i = _stepped(a[r], a_i[r], k[r] * v[r], h, h_i, HAS_CUT, COMPLEX)
        link, link_i = times(a[r], a_i[r], link, link_i, HAS_CUT, COMPLEX)
    vector = row * CHANNELS + channel + columns
    start, start_i = loaded(state_ptr, vector, channel + columns < CHANNELS, 0.0, COMPLEX, WIDE)
    start, start_i, after, after_i = carried(
        link, link_i, h, h_i, start, start_i, words_ptr, chain, chains, tile, tiles,
        HAS_CUT, COMPLEX, CHAINED, WIDE, PIECES, COLUMNS, VECTOR, GROUP, GROUPS,
    )  # fmt: skip
    before = ((row * tiles + tile) * PIECES + piece) * CHANNELS + column
    stored(starts_ptr, before, start, start_i, inside & (piece >= 0), COMPLEX, WIDE)
    h, h_i = start, start_i
    for r in tl.static_range(ROWS):
        h, h_i = _stepped(a[r], a_i[r], k[r] * v[r], h, h_i, HAS_CUT, COMPLEX)
        tl.store(y_ptr + out + at + r * CHANNELS, q[r] * h, mask=_within(begin + r, time, inside, EVEN))
    if tile == tiles - 1:
        stored_last(last_ptr, vector, after, after_i, channel + columns < CHANNELS, COMPLEX, WIDE, PIECES)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, decay_ptr, phase_ptr, cut_ptr, starts_ptr, dy_ptr, dlast_ptr, dq_ptr, dk_ptr, dv_ptr,
    ddecay_ptr, dphase_ptr, dstate_ptr, words_ptr, time, chains, tiles,
    DECAY: tl.constexpr, PHASE: tl.constexpr, HAS_CUT: tl.constexpr, CHANNELS: tl.constexpr,
    COMPLEX: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr, WIDE: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Fill the gradients; gradients of constant gates are (b, tiles, h) and must still be summed.

    With g_t = q_t dy_t + conj(a_{t+1}) g_{t+1} and w_t = a_t h_{t-1} = h_t - k_t v_t:
    dq = dy Re h, dk = v Re g, dv = k Re g, dlog_decay = Re(g conj w), dphase = Im(g conj w).
    """
    chain, tile, row, channel, columns = program(chains, CHANNELS, COLUMNS, VECTOR)
    # tiles in the adjoint's order, from the last to the first
    place = tiles - 1 - tile
    piece, column, inside, begin, out, at = _places(
        place, row, channel, columns, time, CHANNELS, EVEN, PIECES, ROWS, COLUMNS
    )
    decay_ptr += out * (DECAY == STEP)
    phase_ptr += out * (PHASE == STEP)

    decays = _gates(decay_ptr, at, column, begin, time, inside, DECAY, ROWS, CHANNELS, EVEN, WIDE)
    phases = _gates(phase_ptr, at, column, begin, time, inside, PHASE, ROWS, CHANNELS, EVEN, WIDE)
    k = _rows(k_ptr + out, at, begin, time, inside, ROWS, CHANNELS, EVEN, WIDE)
    v = _rows(v_ptr + out, at, begin, time, inside, ROWS, CHANNELS, EVEN, WIDE)
    q = _rows(q_ptr + out, at, begin, time, inside, ROWS, CHANNELS, EVEN, WIDE)
    dy = _rows(dy_ptr + out, at, begin, time, inside, ROWS, CHANNELS, EVEN, WIDE)
    # the adjoint enters a step over the next step's link; after the last step that link is 1
    a, a_i = _links(decays, phases, cut_ptr + row * time, begin, time, ROWS + 1, PHASE, HAS_CUT, WIDE)

    before = ((row * tiles + place) * PIECES + piece) * CHANNELS + column
    h, h_i = loaded(starts_ptr, before, inside & (piece >= 0), 0.0, COMPLEX, WIDE)
    states = ()
    states_i = ()
    for r in tl.static_range(ROWS):
        h, h_i = _stepped(a[r], a_i[r], k[r] * v[r], h, h_i, HAS_CUT, COMPLEX)
        tl.store(dq_ptr + out + at + r * CHANNELS, dy[r] * h, mask=_within(begin + r, time, inside, EVEN))
        states = states + (h,)  # noqa: RUF005
        states_i = states_i + (h_i,)  # noqa: RUF005

    link, link_i, g = a[ROWS], -a_i[ROWS], q[ROWS - 1] * dy[ROWS - 1]
    g_i = tl.zeros_like(g)
    for r in tl.static_range(ROWS - 2, -1, -1):
        g, g_i = _stepped(a[r + 1], -a_i[r + 1], q[r] * dy[r], g, g_i, HAS_CUT, COMPLEX)
        link, link_i = times(a[r + 1], -a_i[r + 1], link, link_i, HAS_CUT, COMPLEX)
    vector = row * CHANNELS + channel + columns
    start, start_i = loaded(dlast_ptr, vector, channel + columns < CHANNELS, 0.0, COMPLEX, WIDE)
    g, g_i, _, _ = carried(
        link, link_i, g, g_i, start, start_i, words_ptr, chain, chains, tile, tiles,
        HAS_CUT, COMPLEX, CHAINED, WIDE, PIECES, COLUMNS, VECTOR, GROUP, GROUPS, True,
    )  # fmt: skip
    total = tl.zeros_like(g)
    total_i = tl.zeros_like(g)
    for r in tl.static_range(ROWS - 1, -1, -1):
        g, g_i = _stepped(a[r + 1], -a_i[r + 1], q[r] * dy[r], g, g_i, HAS_CUT, COMPLEX)
        mask = _within(begin + r, time, inside, EVEN)
        tl.store(dk_ptr + out + at + r * CHANNELS, g * v[r], mask=mask)
        tl.store(dv_ptr + out + at + r * CHANNELS, g * k[r], mask=mask)
        w = states[r] - k[r] * v[r]
        ddecay = g * w
        if COMPLEX:
            ddecay += g_i * states_i[r]
            dphase = g_i * w - g * states_i[r]
            if PHASE == STEP:
                tl.store(dphase_ptr + out + at + r * CHANNELS, dphase, mask=mask)
            else:
                total_i += tl.where(mask, dphase, 0.0)
        if DECAY == STEP:
            tl.store(ddecay_ptr + out + at + r * CHANNELS, ddecay, mask=mask)
        elif DECAY == CONSTANT:
            total += tl.where(mask, ddecay, 0.0)
    per_tile = (row * tiles + place) * CHANNELS + channel + columns
    if DECAY == CONSTANT:
        tl.store(
            ddecay_ptr + per_tile, tl.sum(total, axis=0, keep_dims=True), mask=channel + columns < CHANNELS
        )
    if PHASE == CONSTANT:
        tl.store(
            dphase_ptr + per_tile, tl.sum(total_i, axis=0, keep_dims=True), mask=channel + columns < CHANNELS
        )
    if tile == tiles - 1:
        # over the first step's link into the initial state
        dstate, dstate_i = times(a[0], -a_i[0], g, g_i, HAS_CUT, COMPLEX)
        stored(dstate_ptr, vector + 0 * piece, dstate, dstate_i, inside & (piece == 0), COMPLEX, WIDE)
