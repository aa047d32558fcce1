"""GPU kernels of the elementwise recurrence; imported at the first use, because importing Triton is slow.

One program owns one batch row and a run of channels. It walks time in tiles: an associative scan inside the
tile, then the value carried from the tile before. Complex tensors come as real ones whose imaginary parts lie
one element after the real parts. Rows past the end of time are the identity (link 1, input 0), so that the
last row of a tile always holds the carry. No atomics: the result is the same in every run.
"""

import triton
import triton.language as tl


@triton.jit
def compose(a1, x1, a2, x2):  # type: ignore[no-untyped-def]
    """Apply y -> a1 y + x1, then y -> a2 y + x2."""
    return a2 * a1, a2 * x1 + x2


@triton.jit
def compose_complex(a1, b1, x1, z1, a2, b2, x2, z2):  # type: ignore[no-untyped-def]
    """Do the same with links a + ib and inputs x + iz."""
    return a2 * a1 - b2 * b1, a2 * b1 + b2 * a1, a2 * x1 - b2 * z1 + x2, a2 * z1 + b2 * x1 + z2


@triton.jit
def last_row(tile, rows, n_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the last of the `n_rows` rows of a tile."""
    return tl.sum(tl.where(rows == n_rows - 1, tile, 0.0), axis=0)


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    a_ptr,
    x_ptr,
    state_ptr,
    cut_ptr,
    y_ptr,
    last_ptr,
    time,
    channels,
    a_row,
    a_step,
    a_channel,
    x_row,
    x_step,
    x_channel,
    REVERSE: tl.constexpr,
    COMPLEX: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill y (b, t, c) and last (b, c), both contiguous."""
    # elements from one number to the next in contiguous tensors
    unit: tl.constexpr = 2 if COMPLEX else 1
    blocks = tl.cdiv(channels, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    rows = tl.arange(0, ROWS)[:, None]
    a_ptr += row * a_row + column[None, :] * a_channel
    x_ptr += row * x_row + column[None, :] * x_channel
    y_ptr += (row * time * channels + column[None, :]) * unit
    vector = (row * channels + column) * unit

    carry = tl.zeros([COLUMNS], WIDE)
    carry_i = tl.zeros([COLUMNS], WIDE)
    if HAS_STATE:
        carry = tl.load(state_ptr + vector, mask=inside, other=0.0)
        if COMPLEX:
            carry_i = tl.load(state_ptr + vector + 1, mask=inside, other=0.0)
    for tile in range(0, tl.cdiv(time, ROWS)):
        index = tile * ROWS + rows
        t = (time - 1 - index if REVERSE else index).to(tl.int64)
        valid = index < time
        mask = valid & inside[None, :]
        a = tl.load(a_ptr + t * a_step, mask=mask, other=1.0).to(WIDE)
        x = tl.load(x_ptr + t * x_step, mask=mask, other=0.0).to(WIDE)
        if HAS_CUT:
            cut = tl.load(cut_ptr + row * time + t, mask=valid, other=0) != 0
            a = tl.where(cut, 0.0, a)
        y_at = y_ptr + t * channels * unit
        if COMPLEX:
            a_i = tl.load(a_ptr + t * a_step + 1, mask=mask, other=0.0).to(WIDE)
            x_i = tl.load(x_ptr + t * x_step + 1, mask=mask, other=0.0).to(WIDE)
            if HAS_CUT:
                a_i = tl.where(cut, 0.0, a_i)
            a, a_i, x, x_i = tl.associative_scan((a, a_i, x, x_i), 0, compose_complex)
            y = a * carry[None, :] - a_i * carry_i[None, :] + x
            y_i = a * carry_i[None, :] + a_i * carry[None, :] + x_i
            tl.store(y_at + 1, y_i, mask=mask)
            carry_i = last_row(y_i, rows, ROWS)
        else:
            a, x = tl.associative_scan((a, x), 0, compose)
            y = a * carry[None, :] + x
        tl.store(y_at, y, mask=mask)
        carry = last_row(y, rows, ROWS)
    tl.store(last_ptr + vector, carry, mask=inside)
    if COMPLEX:
        tl.store(last_ptr + vector + 1, carry_i, mask=inside)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    a_ptr,
    y_ptr,
    state_ptr,
    cut_ptr,
    dy_ptr,
    dlast_ptr,
    da_ptr,
    dx_ptr,
    dstate_ptr,
    time,
    channels,
    a_row,
    a_step,
    a_channel,
    y_row,
    y_step,
    y_channel,
    dy_row,
    dy_step,
    dy_channel,
    REVERSE: tl.constexpr,
    COMPLEX: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    NEEDS_A: tl.constexpr,
    # `a` is constant in time: da is (b, 1, c), summed here
    SUMMED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill dx (b, t, c), dstate (b, c) and da (b, t or 1, c), all contiguous.

    The adjoint runs against the recurrence: `REVERSE` is the direction of the recurrence.
    """
    unit: tl.constexpr = 2 if COMPLEX else 1
    blocks = tl.cdiv(channels, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    rows = tl.arange(0, ROWS)[:, None]
    a_ptr += row * a_row + column[None, :] * a_channel
    y_ptr += row * y_row + column[None, :] * y_channel
    dy_ptr += row * dy_row + column[None, :] * dy_channel
    da_ptr += (row * (1 if SUMMED else time) * channels + column[None, :]) * unit
    dx_ptr += (row * time * channels + column[None, :]) * unit
    vector = (row * channels + column) * unit

    state = tl.zeros([COLUMNS], WIDE)
    state_i = tl.zeros([COLUMNS], WIDE)
    total = tl.zeros([COLUMNS], WIDE)
    total_i = tl.zeros([COLUMNS], WIDE)
    carry = tl.load(dlast_ptr + vector, mask=inside, other=0.0)
    carry_i = tl.zeros([COLUMNS], WIDE)
    if COMPLEX:
        carry_i = tl.load(dlast_ptr + vector + 1, mask=inside, other=0.0)
    if HAS_STATE:
        state = tl.load(state_ptr + vector, mask=inside, other=0.0)
        if COMPLEX:
            state_i = tl.load(state_ptr + vector + 1, mask=inside, other=0.0)
    for tile in range(0, tl.cdiv(time, ROWS)):
        index = tile * ROWS + rows
        t = (index if REVERSE else time - 1 - index).to(tl.int64)
        # the steps that the recurrence took after and before t; the adjoint comes from the one
        after = t - 1 if REVERSE else t + 1
        before = t + 1 if REVERSE else t - 1
        valid = index < time
        mask = valid & inside[None, :]
        linked = mask & (index > 0)
        a = tl.load(a_ptr + after * a_step, mask=linked, other=1.0).to(WIDE)
        g = tl.load(dy_ptr + t * dy_step, mask=mask, other=0.0).to(WIDE)
        if HAS_CUT:
            cut = tl.load(cut_ptr + row * time + after, mask=valid & (index > 0), other=0) != 0
            a = tl.where(cut, 0.0, a)
        dx_at = dx_ptr + t * channels * unit
        if COMPLEX:
            a_i = -tl.load(a_ptr + after * a_step + 1, mask=linked, other=0.0).to(WIDE)
            g_i = tl.load(dy_ptr + t * dy_step + 1, mask=mask, other=0.0).to(WIDE)
            if HAS_CUT:
                a_i = tl.where(cut, 0.0, a_i)
            a, a_i, g, g_i = tl.associative_scan((a, a_i, g, g_i), 0, compose_complex)
            g += a * carry[None, :] - a_i * carry_i[None, :]
            g_i += a * carry_i[None, :] + a_i * carry[None, :]
            tl.store(dx_at + 1, g_i, mask=mask)
            carry_i = last_row(g_i, rows, ROWS)
        else:
            a, g = tl.associative_scan((a, g), 0, compose)
            g += a * carry[None, :]
        tl.store(dx_at, g, mask=mask)
        carry = last_row(g, rows, ROWS)
        if NEEDS_A:
            inner = mask & (index < time - 1)
            y = tl.load(y_ptr + before * y_step, mask=inner, other=0.0).to(WIDE)
            y = tl.where(index == time - 1, state[None, :], y)
            keep = mask
            if HAS_CUT:
                keep = mask & (tl.load(cut_ptr + row * time + t, mask=valid, other=0) == 0)
            da_at = da_ptr + t * channels * unit
            if COMPLEX:
                y_i = tl.load(y_ptr + before * y_step + 1, mask=inner, other=0.0).to(WIDE)
                y_i = tl.where(index == time - 1, state_i[None, :], y_i)
                da = tl.where(keep, g * y + g_i * y_i, 0.0)
                da_i = tl.where(keep, g_i * y - g * y_i, 0.0)
                if SUMMED:
                    total_i += tl.sum(da_i, axis=0)
                else:
                    tl.store(da_at + 1, da_i, mask=mask)
            else:
                da = tl.where(keep, g * y, 0.0)
            if SUMMED:
                total += tl.sum(da, axis=0)
            else:
                tl.store(da_at, da, mask=mask)
    if NEEDS_A and SUMMED:
        tl.store(da_ptr, total[None, :], mask=inside[None, :])
        if COMPLEX:
            tl.store(da_ptr + 1, total_i[None, :], mask=inside[None, :])
    # from the first step of the recurrence back to the state
    first = (time - 1 if REVERSE else 0) + tl.zeros([1, 1], tl.int64)
    a = tl.load(a_ptr + first * a_step, mask=inside[None, :], other=0.0).to(WIDE)
    if HAS_CUT:
        cut = tl.load(cut_ptr + row * time + first) != 0
        a = tl.where(cut, 0.0, a)
    dstate_ptr += vector[None, :]
    if COMPLEX:
        a_i = -tl.load(a_ptr + first * a_step + 1, mask=inside[None, :], other=0.0).to(WIDE)
        if HAS_CUT:
            a_i = tl.where(cut, 0.0, a_i)
        tl.store(dstate_ptr, a * carry[None, :] - a_i * carry_i[None, :], mask=inside[None, :])
        tl.store(dstate_ptr + 1, a * carry_i[None, :] + a_i * carry[None, :], mask=inside[None, :])
    else:
        tl.store(dstate_ptr, a * carry[None, :], mask=inside[None, :])
