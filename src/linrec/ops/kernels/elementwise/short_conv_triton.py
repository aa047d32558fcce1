"""GPU kernels of the short convolution; imported at the first use, because importing Triton is slow.

A program processes a tile of steps and channels of a batch row. The shifted inputs of a tile overlap, so all
loads but the first hit the cache.

The inputs before the first step are the state, which only the first tile reads. No branch stands between
loads, because each load would then wait for the one before.
"""

# tuples of sums keep their types
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def _place(tiles, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row, tile and channels of a program."""
    blocks = tl.cdiv(CHANNELS, COLUMNS)
    n = tl.program_id(0)
    channels = n % blocks * COLUMNS + tl.arange(0, COLUMNS)
    return (n // blocks // tiles).to(tl.int64), n // blocks % tiles, channels


@triton.jit
def _seen(reset, row, steps, seen, time):  # type: ignore[no-untyped-def]
    """Return `seen` without those of the steps that have a reset."""
    inside = seen & (steps >= 0) & (steps < time)
    return seen & (tl.load(reset + row * time + steps, mask=inside, other=0) == 0)


@triton.jit
def short_conv(  # type: ignore[no-untyped-def]
    x, weight, bias, state, reset, dy, y, time, tiles, x_strides, dy_strides, weight_row, bias_row,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESET: tl.constexpr,
    SILU: tl.constexpr, DERIVATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Fill y (b, t, c); with DERIVATIVE, the gradient of the argument of SiLU, from the gradient of y."""
    row, tile, channels = _place(tiles, CHANNELS, COLUMNS)
    inside = (channels < CHANNELS)[None, :]
    steps = tile * ROWS + tl.arange(0, ROWS)
    x += row * x_strides[0] + channels[None, :]
    weight += row * weight_row + channels
    state += row * (WIDTH - 1) * CHANNELS + channels[None, :]
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    seen = steps < time
    for j in tl.static_range(WIDTH):
        if HAS_RESET and j > 0:
            # a reset hides the inputs before it
            seen = _seen(reset, row, steps - j + 1, seen, time)
        source = steps - j
        tap = tl.load(weight + j * CHANNELS, mask=channels < CHANNELS, other=0.0).to(WIDE)
        at = x + source.to(tl.int64)[:, None] * x_strides[1]
        given = tl.load(at, mask=(seen & (source >= 0))[:, None] & inside, other=0.0)
        total += given.to(WIDE) * tap[None, :]
    if tile == 0:
        seen = steps < time
        for j in tl.static_range(1, WIDTH):
            if HAS_RESET:
                seen = _seen(reset, row, steps - j + 1, seen, time)
            tap = tl.load(weight + j * CHANNELS, mask=channels < CHANNELS, other=0.0).to(WIDE)
            place = state + (steps - j + WIDTH - 1)[:, None] * CHANNELS
            past = tl.load(place, mask=(seen & (steps < j))[:, None] & inside, other=0.0)
            total += past.to(WIDE) * tap[None, :]
    if HAS_BIAS:
        constant = tl.load(bias + row * bias_row + channels, mask=channels < CHANNELS, other=0.0)
        total += constant.to(WIDE)[None, :]
    filled = (steps < time)[:, None] & inside
    if SILU:
        share = 1 / (1 + tl.exp(-total))
        if DERIVATIVE:
            at = dy + row * dy_strides[0] + steps.to(tl.int64)[:, None] * dy_strides[1] + channels[None, :]
            d = tl.load(at, mask=filled, other=0.0).to(WIDE)
            total = d * share * (1 + total * (1 - share))
        else:
            total *= share
    at = y + (row * time + steps)[:, None] * CHANNELS + channels[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=filled)


@triton.jit
def short_conv_gradients(  # type: ignore[no-untyped-def]
    x, weight, state, reset, dy, dx, dweight, dbias, dstate, time, tiles, x_strides, dy_strides, weight_row,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_RESET: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Fill dx and dstate, and the terms of each tile of dweight (b, tiles, width, c) and dbias (b, tiles, c).

    Tiles have PARTS * ROWS steps, and begin at the oldest input of the state, which the first part holds.
    """
    row, tile, channels = _place(tiles, CHANNELS, COLUMNS)
    inside = (channels < CHANNELS)[None, :]
    place = row * tiles + tile
    x += row * x_strides[0] + channels[None, :]
    weight += row * weight_row + channels
    dy += row * dy_strides[0] + channels[None, :]
    dx += row * time * CHANNELS + channels[None, :]
    past = row * (WIDTH - 1) * CHANNELS + channels[None, :]
    sums = ()
    for _ in tl.static_range(WIDTH + 1):
        sums = sums + (tl.zeros((ROWS, COLUMNS), WIDE),)  # noqa: RUF005
    for part in range(PARTS):
        steps = (tile * PARTS + part) * ROWS + tl.arange(0, ROWS) - (WIDTH - 1)
        seen = steps < time
        is_new, is_old = (seen & (steps >= 0))[:, None] & inside, (seen & (steps < 0))[:, None] & inside
        at = past + (steps + WIDTH - 1)[:, None] * CHANNELS
        old = tl.load(state + at, mask=is_old, other=0.0)
        given = tl.load(x + steps.to(tl.int64)[:, None] * x_strides[1], mask=is_new, other=0.0)
        given = given.to(WIDE) + old.to(WIDE)
        total = tl.zeros((ROWS, COLUMNS), WIDE)
        added = ()
        for j in tl.static_range(WIDTH):
            reader = steps + j
            if HAS_RESET and j > 0:
                seen = _seen(reset, row, reader, seen, time)
            tap = tl.load(weight + j * CHANNELS, mask=channels < CHANNELS, other=0.0).to(WIDE)
            reads = (seen & (reader >= 0) & (reader < time))[:, None]
            d = tl.load(dy + reader.to(tl.int64)[:, None] * dy_strides[1], mask=reads & inside, other=0.0)
            d = d.to(WIDE)
            total += d * tap[None, :]
            # a hidden input may be NaN
            added = added + (sums[j] + tl.where(reads, d * given, 0.0),)  # noqa: RUF005
            if j == 0:
                bias = sums[WIDTH] + d
        sums = added + (bias,)  # noqa: RUF005
        tl.store(dx + steps.to(tl.int64)[:, None] * CHANNELS, total.to(dx.dtype.element_ty), mask=is_new)
        tl.store(dstate + at, total.to(dstate.dtype.element_ty), mask=is_old)
    for j in tl.static_range(WIDTH):
        at = dweight + (place * WIDTH + j) * CHANNELS + channels
        tl.store(at, tl.sum(sums[j], axis=0), mask=channels < CHANNELS)
    tl.store(dbias + place * CHANNELS + channels, tl.sum(sums[WIDTH], axis=0), mask=channels < CHANNELS)
