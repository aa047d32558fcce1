"""Decays of one chunk in the chunkwise GPU kernels: what a step weighs for another, and for the states.

`chunkwise_triton_kernels` has the equations. A chunk's decays are a pair: EXACT, its log decays g and those
one step on, `later`; else the sums P and that of the last step.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
HEAD = tl.constexpr(1)
CHANNEL = tl.constexpr(2)
# a log decay whose exponential is zero in double precision too, and that can be multiplied by zero
NOTHING = tl.constexpr(-1e4)
# the least log decay that is a number above zero in float32, and more than one step's worth of it
LEAST = tl.constexpr(-100.0)


@triton.jit
def tile(x, b, h, steps, TIME, HEADS: tl.constexpr, WIDTH: tl.constexpr, columns):  # type: ignore[no-untyped-def]
    """Elements (steps, columns) of a tensor (b, t, h, d), zeros outside of it."""
    rows = (b.to(tl.int64) * TIME + steps) * HEADS + h
    inside = (steps < TIME)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)


@triton.jit
def put(x, value, b, h, steps, TIME, HEADS: tl.constexpr, WIDTH: tl.constexpr, columns):  # type: ignore[no-untyped-def]
    """Store what `tile` loads."""
    rows = (b.to(tl.int64) * TIME + steps) * HEADS + h
    inside = (steps < TIME)[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * WIDTH + columns[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def log_decays(  # type: ignore[no-untyped-def]
    decays,
    reset,
    b,
    h,
    steps,
    end,
    TIME,
    strides,
    columns,
    WIDTH: tl.constexpr,
    DECAY: tl.constexpr,
    RESET: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Log decays of these steps, zeros from step `end` on: (steps,), or (steps, columns) of CHANNEL."""
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
    """What is one for each step, as one for each step and channel where decays are that."""
    if DECAY == CHANNEL and len(x.shape) == 1:
        x = x[:, None]
    return x


@triton.jit
def factor(x, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """A weight of steps, or of steps and channels, as a factor of (steps, channels)."""
    return x if DECAY == CHANNEL else x[:, None]


@triton.jit
def _sums(decays, b, h, steps, TIME, HEADS: tl.constexpr, WIDTH: tl.constexpr, columns, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """P of these steps; behind the end of time it stays as it is."""
    rows = (b.to(tl.int64) * TIME + tl.minimum(steps, TIME - 1)) * HEADS + h
    if DECAY == CHANNEL:
        inside = (columns < WIDTH)[None, :]
        sums = tl.load(decays + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    else:
        sums = tl.load(decays + rows)
    return sums


@triton.jit
def of_chunk(  # type: ignore[no-untyped-def]
    decays,
    reset,
    b,
    h,
    chunk,
    TIME,
    strides,
    columns,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DECAY: tl.constexpr,
    RESET: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A chunk's decays, as the functions below take them."""
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
def from_start(first, second, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """e^P."""
    return tl.exp(tl.cumsum(first, axis=0) if EXACT else first)


@triton.jit
def to_end(first, second, DECAY: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """e^R."""
    if EXACT:
        exponent = tl.cumsum(second, axis=0, reverse=True)
    elif DECAY == CHANNEL:
        exponent = second[None, :] - first
    else:
        exponent = second - first
    return tl.exp(exponent)


@triton.jit
def whole(first, second, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """e^{P_C}."""
    return tl.exp(tl.sum(first, axis=0) if EXACT else second)


@triton.jit
def of_pairs(first, REVERSE: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """D (CHUNK, CHUNK) of one decay per head; its transpose with REVERSE."""
    n = tl.arange(0, CHUNK)
    row, column = (n[None, :], n[:, None]) if REVERSE else (n[:, None], n[None, :])
    if EXACT:
        # sums of the steps after the column's one, up to the row's one
        step = first[None, :] if REVERSE else first[:, None]
        exponent = tl.cumsum(tl.where(row > column, step, 0.0), axis=1 if REVERSE else 0)
    else:
        exponent = (first[None, :] - first[:, None]) if REVERSE else (first[:, None] - first[None, :])
    return tl.where(row >= column, tl.exp(tl.minimum(exponent, 0.0)), 0.0)


@triton.jit
def parting(level, REVERSE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which pairs of steps (n, m) of a chunk part at a multiple of L = 2^level; (m, n) with REVERSE."""
    n = tl.arange(0, CHUNK)
    row, column = (n[None, :], n[:, None]) if REVERSE else (n[:, None], n[None, :])
    block = row >> level
    return ((block ^ 1) == (column >> level)) & ((block & 1) == 1)


@triton.jit
def within(x, level, REVERSE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Running sums of (CHUNK, columns) within blocks of L = 2^level steps, as a product with ones."""
    n = tl.arange(0, CHUNK)
    row, column = (n[None, :], n[:, None]) if REVERSE else (n[:, None], n[None, :])
    ones = ((row >> level) == (column >> level)) & (row >= column)
    precision: tl.constexpr = "ieee" if x.dtype == tl.float64 else "tf32x3"
    return tl.dot(ones.to(x.dtype), x, input_precision=precision, out_dtype=x.dtype)


@triton.jit
def of_level(  # type: ignore[no-untyped-def]
    first,
    second,
    decays,
    b,
    h,
    chunk,
    TIME,
    columns,
    level,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Factors of what is read and of what is written by pairs that part at a multiple of L = 2^level.

    They matter in the right and left blocks of L steps, in this order, and are <= 1 elsewhere.
    """
    n = tl.arange(0, CHUNK)
    if EXACT:
        inner = ((n + 1) & ((1 << level) - 1)) != 0
        read = tl.exp(within(first, level, False, CHUNK))
        written = tl.exp(within(tl.where(inner[:, None], second, 0.0), level, True, CHUNK))
    else:
        # both are taken from where the pair parts, the last step of the left block
        middle = chunk * CHUNK + (((n >> level) | 1) << level) - 1
        read = tl.exp(-tl.abs(first - _sums(decays, b, h, middle, TIME, HEADS, WIDTH, columns, CHANNEL)))
        written = read
    return read, written
