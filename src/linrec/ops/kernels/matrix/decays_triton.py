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
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def program(FIRST, SECOND):  # type: ignore[no-untyped-def]
    """Which of (FIRST, SECOND, any number) this program is; neighbours differ in the first.

    All programs are along one axis: the others hold 65,535.
    """
    n = tl.program_id(0)
    return n % FIRST, (n // FIRST) % SECOND, n // FIRST // SECOND


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
def power(exponent, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """e^x; of the sums, which are logarithms to base 2, 2^x."""
    return tl.exp(exponent) if EXACT else tl.exp2(exponent)


@triton.jit
def from_start(first, second, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """e^P."""
    return power(tl.cumsum(first, axis=0) if EXACT else first, EXACT)


@triton.jit
def to_end(first, second, DECAY: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """e^R."""
    if EXACT:
        exponent = tl.cumsum(second, axis=0, reverse=True)
    elif DECAY == CHANNEL:
        exponent = second[None, :] - first
    else:
        exponent = second - first
    return power(exponent, EXACT)


@triton.jit
def whole(first, second, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """e^{P_C}."""
    return power(tl.sum(first, axis=0) if EXACT else second, EXACT)


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
    return tl.where(row >= column, power(tl.minimum(exponent, 0.0), EXACT), 0.0)


@triton.jit
def right(level, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which steps of a chunk are in the right one of two blocks of L = 2^level steps."""
    return ((tl.arange(0, CHUNK) >> level) & 1) == 1


@triton.jit
def neighbours(level, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which two steps of a chunk are in a right and in a left block of L = 2^level steps, in any order."""
    block = tl.arange(0, CHUNK) >> level
    return (block[:, None] ^ 1) == block[None, :]


@triton.jit
def segments(level, TURNED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which steps (n, j) of a chunk are in one block of L = 2^level steps, j <= n in right blocks and
    j > n in left ones; (j, n) with TURNED."""
    n = tl.arange(0, CHUNK)
    row, column = (n[None, :], n[:, None]) if TURNED else (n[:, None], n[None, :])
    block = row >> level
    return (block == (column >> level)) & ((column <= row) == ((block & 1) == 1))


@triton.jit
def summed(which, x):  # type: ignore[no-untyped-def]
    """Sums of rows of x (CHUNK, columns), as a product with ones."""
    precision: tl.constexpr = "ieee" if x.dtype == tl.float64 else "tf32x3"
    return tl.dot(which.to(x.dtype), x, input_precision=precision, out_dtype=x.dtype)


@triton.jit
def of_level(  # type: ignore[no-untyped-def]
    first,
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
    """Factors (CHUNK, columns) of pairs that part at a multiple of L = 2^level.

    In right blocks, what decays from the end of the left block up to a step; in left ones, what decays after
    it, up to that end.
    """
    if EXACT:
        exponent = summed(segments(level, False, CHUNK), first)
    else:
        middle = chunk * CHUNK + (((tl.arange(0, CHUNK) >> level) | 1) << level) - 1
        exponent = -tl.abs(first - _sums(decays, b, h, middle, TIME, HEADS, WIDTH, columns, CHANNEL))
    return power(exponent, EXACT)
