"""What the GPU kernels of elementwise recurrences share: tiles over time, and the value carried between them.

A tile is (PIECES, ROWS, COLUMNS): each thread holds ROWS consecutive steps of a few channels and scans them
in registers; the PIECES of a tile follow each other in time, on different warps. Tiles follow each other in
different programs, so that one long sequence keeps the whole device busy while every input is read once:

- each tile publishes its own link and input (A, X), that is y_end = A y_start + X;
- tiles come in groups of GROUP, and groups in supergroups of GROUPS. The last tile of a group publishes the
  link and the input of the whole group, and the last tile of a supergroup the value after it. A tile waits
  for the tiles before it in its group, for the groups before it in its supergroup, and for the value before
  that. Only the last of these is handed on from one to the next, one trip to memory per supergroup;
- all of it is combined in one fixed order, so the result is the same to the bit in every run.

A tile waits only for tiles of programs with lower numbers, which the device starts first.

What is published is a 64-bit word: 32 bits of the number and a flag that says that it is there. One atomic
word needs no fence, and reading it takes one trip to memory. Memory for words comes zeroed.

Complex numbers are pairs (real part, imaginary part). Where a kernel is real, imaginary parts are repetitions
of the real ones that are never used, and cost nothing. In memory, a complex64 number is one 64-bit word, so
that one instruction loads it; a complex128 number is two float64 numbers.
"""

import triton
import triton.language as tl

# the flag of a word, above its 32 bits of data
THERE = tl.constexpr(1 << 32)


@triton.jit
def loaded(ptr, offsets, mask, other, COMPLEX: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load numbers in the precision WIDE; `other` and 0 where the mask is false."""
    if COMPLEX:
        if tl.float64 == WIDE:
            x = tl.load(ptr + 2 * offsets, mask=mask, other=other)
            x_i = tl.load(ptr + 2 * offsets + 1, mask=mask, other=0.0)
        else:
            word = tl.load(ptr + offsets, mask=mask, other=0)
            x = tl.where(mask, word.to(tl.int32).to(tl.float32, bitcast=True), other)
            x_i = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return x, x_i
    else:
        x = tl.load(ptr + offsets, mask=mask, other=other).to(WIDE)
        return x, x


@triton.jit
def stored(ptr, offsets, x, x_i, mask, COMPLEX: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store numbers in the tensor's own precision."""
    if COMPLEX:
        if tl.float64 == WIDE:
            tl.store(ptr + 2 * offsets, x, mask=mask)
            tl.store(ptr + 2 * offsets + 1, x_i, mask=mask)
        else:
            low = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            tl.store(ptr + offsets, low | (x_i.to(tl.int32, bitcast=True).to(tl.int64) << 32), mask=mask)
    else:
        tl.store(ptr + offsets, x, mask=mask)


@triton.jit
def compose(a1, x1, a2, x2):  # type: ignore[no-untyped-def]
    """Apply y -> a1 y + x1, then y -> a2 y + x2."""
    return a2 * a1, a2 * x1 + x2


@triton.jit
def compose_complex(a1, b1, x1, z1, a2, b2, x2, z2):  # type: ignore[no-untyped-def]
    """Do the same with links a + ib and inputs x + iz."""
    return a2 * a1 - b2 * b1, a2 * b1 + b2 * a1, x2 - b2 * z1 + a2 * x1, z2 + b2 * x1 + a2 * z1


@triton.jit
def composed(  # type: ignore[no-untyped-def]
    a1, b1, x1, z1, a2, b2, x2, z2, COMPLEX: tl.constexpr
):
    """Return the link and the input of the first pair and then the second."""
    if COMPLEX:
        a, a_i, x, x_i = compose_complex(a1, b1, x1, z1, a2, b2, x2, z2)
    else:
        a, x = compose(a1, x1, a2, x2)
        a_i, x_i = a, x
    return a, a_i, x, x_i


@triton.jit
def scanned(a, a_i, x, x_i, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compose all steps up to each one along the last axis but one."""
    AXIS: tl.constexpr = len(a.shape) - 2
    if COMPLEX:
        a, a_i, x, x_i = tl.associative_scan((a, a_i, x, x_i), AXIS, compose_complex)
    else:
        a, x = tl.associative_scan((a, x), AXIS, compose)
    return a, a_i, x, x_i


@triton.jit
def applied(a, a_i, x, x_i, y, y_i, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a y + x."""
    if COMPLEX:
        return x - a_i * y_i + a * y, x_i + a_i * y + a * y_i
    else:
        return a * y + x, y_i


@triton.jit
def times(a, a_i, y, y_i, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a y; `applied` to an input of zero would add the zero."""
    if COMPLEX:
        return a * y - a_i * y_i, a * y_i + a_i * y
    else:
        return a * y, y_i


@triton.jit
def _compose_twice(b1, z1, a1, x1, b2, z2, a2, x2):  # type: ignore[no-untyped-def]
    """Compose the steps without the last one and with it."""
    b, z = compose(a1, x1, b2, z2)
    a, x = compose(a1, x1, a2, x2)
    return b, z, a, x


@triton.jit
def _compose_twice_complex(  # type: ignore[no-untyped-def]
    b1, d1, z1, w1, a1, c1, x1, u1, b2, d2, z2, w2, a2, c2, x2, u2
):
    """Do the same with complex numbers."""
    b, d, z, w = compose_complex(a1, c1, x1, u1, b2, d2, z2, w2)
    a, c, x, u = compose_complex(a1, c1, x1, u1, a2, c2, x2, u2)
    return b, d, z, w, a, c, x, u


@triton.jit
def _up_to(a, a_i, x, x_i, COMPLEX: tl.constexpr, BACKWARDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compose the rows of (PIECES, COLUMNS) up to each one, without it and with it."""
    one = tl.zeros_like(a) + 1.0
    zero = tl.zeros_like(a)
    if COMPLEX:
        b, b_i, z, z_i, a, a_i, x, x_i = tl.associative_scan(
            (one, zero, zero, zero, a, a_i, x, x_i), 0, _compose_twice_complex, reverse=BACKWARDS
        )
    else:
        b, z, a, x = tl.associative_scan((one, zero, a, x), 0, _compose_twice, reverse=BACKWARDS)
        b_i, z_i, a_i, x_i = b, z, a, x
    return b, b_i, z, z_i, a, a_i, x, x_i


@triton.jit
def _add(a1, x1, a2, x2):  # type: ignore[no-untyped-def]
    return a1 + a2, x1 + x2


@triton.jit
def _add_complex(a1, b1, x1, z1, a2, b2, x2, z2):  # type: ignore[no-untyped-def]
    return a1 + a2, b1 + b2, x1 + x2, z1 + z2


@triton.jit
def entries(a, a_i, x, x_i, i, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return entry `i` of each along the last axis but one; all in one reduction, so with its barriers once."""
    AXIS: tl.constexpr = len(a.shape) - 2
    if AXIS == 1:
        chosen = tl.arange(0, a.shape[1])[None, :, None] == i
    else:
        chosen = tl.arange(0, a.shape[0])[:, None] == i
    a, x = tl.where(chosen, a, 0.0), tl.where(chosen, x, 0.0)
    if COMPLEX:
        a_i, x_i = tl.where(chosen, a_i, 0.0), tl.where(chosen, x_i, 0.0)
        a, a_i, x, x_i = tl.reduce((a, a_i, x, x_i), AXIS, _add_complex)
    else:
        a, x = tl.reduce((a, x), AXIS, _add)
        a_i, x_i = a, x
    return a, a_i, x, x_i


@triton.jit
def _publish(ptr, plane, x):  # type: ignore[no-untyped-def]
    """Write float32 numbers as one word each, or float64 numbers as two, `plane` words apart."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        tl.atomic_xchg(ptr, (bits & 0xFFFFFFFF) | THERE, sem="relaxed")
        tl.atomic_xchg(ptr + plane, ((bits >> 32) & 0xFFFFFFFF) | THERE, sem="relaxed")
    else:
        tl.atomic_xchg(ptr, (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | THERE, sem="relaxed")


@triton.jit
def _words(ptr, other_ptr, mask):  # type: ignore[no-untyped-def]
    """Wait until all words under `mask` are there in both places; ask again only for those that are not."""
    word = tl.load(ptr, mask=mask, other=THERE, volatile=True)
    other = tl.load(other_ptr, mask=mask, other=THERE, volatile=True)
    missing = (word == 0) | (other == 0)
    while tl.max(missing.to(tl.int32)) > 0:
        word |= tl.load(ptr, mask=missing, other=0, volatile=True)
        other |= tl.load(other_ptr, mask=missing, other=0, volatile=True)
        missing = (word == 0) | (other == 0)
    return word, other


@triton.jit
def _awaited(ptr, other_ptr, plane, mask, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the pairs of numbers under `mask` have been published, and return them; others are 0.

    There must be at least as many pairs as threads. Of fewer, several threads would each read a copy, at
    different times, and the check of one copy would let all of them go on.
    """
    word, other = _words(ptr, other_ptr, mask)
    if tl.float64 == WIDE:
        high, other_high = _words(ptr + plane, other_ptr + plane, mask)
        x = ((word & 0xFFFFFFFF) | (high << 32)).to(tl.float64, bitcast=True)
        y = ((other & 0xFFFFFFFF) | (other_high << 32)).to(tl.float64, bitcast=True)
        return x, y
    else:
        return word.to(tl.int32).to(tl.float32, bitcast=True), other.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _publish_link(  # type: ignore[no-untyped-def]
    links, inputs, own, plane, a, a_i, x, x_i, COMPLEX: tl.constexpr, WIDE: tl.constexpr
):
    _publish(links + own, plane, a)
    _publish(inputs + own, plane, x)
    if COMPLEX:
        own += plane * (2 if tl.float64 == WIDE else 1)
        _publish(links + own, plane, a_i)
        _publish(inputs + own, plane, x_i)


@triton.jit
def _before(  # type: ignore[no-untyped-def]
    links,
    inputs,
    plane,
    first,
    n,
    COMPLEX: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Await the `n` < N links and inputs from entry `first` on, and return their composition (COLUMNS)."""
    zero = tl.zeros([COLUMNS], WIDE)
    b, b_i, z, z_i = zero + 1.0, zero, zero, zero
    if N > 1:  # noqa: SIM102, for one is known when the kernel is compiled
        if n > 0:
            rows = tl.arange(0, SPREAD)[:, None]
            columns = tl.arange(0, COLUMNS)[None, :]
            needed = (rows < n) & (columns >= 0)
            at = (first + rows).to(tl.int64) * COLUMNS + columns
            c, w = _awaited(links + at, inputs + at, plane, needed, WIDE)
            c = tl.where(needed, c, 1.0)
            c_i = c
            w_i = w
            if COMPLEX:
                at += plane * (2 if tl.float64 == WIDE else 1)
                c_i, w_i = _awaited(links + at, inputs + at, plane, needed, WIDE)
            c, c_i, w, w_i = scanned(c, c_i, w, w_i, COMPLEX)
            b, b_i, z, z_i = entries(c, c_i, w, w_i, SPREAD - 1, COMPLEX)
    return b, b_i, z, z_i


@triton.jit
def carried(  # type: ignore[no-untyped-def]
    a,
    a_i,
    x,
    x_i,
    start,
    start_i,
    words_ptr,
    plane,
    chain,
    tile,
    tiles,
    COMPLEX: tl.constexpr,
    CHAINED: tl.constexpr,
    WIDE: tl.constexpr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    BACKWARDS: tl.constexpr = False,
):
    """Return the value before each piece (PIECES, COLUMNS) and after the tile (COLUMNS).

    a and x (PIECES, COLUMNS) are the links and inputs of the pieces of a tile, BACKWARDS where time runs from
    the last to the first; `start` (COLUMNS) is the value before the first tile. SPREAD is at least GROUP and
    GROUPS, and with COLUMNS at least the number of threads.
    """
    # of the tile up to each piece, without it and with it
    b, b_i, z, z_i, a, a_i, x, x_i = _up_to(a, a_i, x, x_i, COMPLEX, BACKWARDS)
    LAST: tl.constexpr = 0 if BACKWARDS else PIECES - 1
    whole, whole_i, end, end_i = entries(a, a_i, x, x_i, LAST, COMPLEX)

    if CHAINED:
        # words: links and inputs of tiles, then of groups, each with its imaginary part. The last tile of
        # a supergroup, whose link and input nobody asks for, leaves the value in the place of its input
        PLANES: tl.constexpr = (2 if COMPLEX else 1) * (2 if tl.float64 == WIDE else 1)
        links = words_ptr + chain.to(tl.int64) * tiles * COLUMNS
        inputs = links + plane * PLANES
        group_links = inputs + plane * PLANES
        group_inputs = group_links + plane * PLANES
        columns = tl.arange(0, COLUMNS)[None, :]
        in_group = tile % GROUP
        group = tile // GROUP % GROUPS
        # first say what others wait for, then wait
        if (in_group < GROUP - 1) & (tile < tiles - 1):
            own = (tile * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            _publish_link(links, inputs, own, plane, whole, whole_i, end, end_i, COMPLEX, WIDE)
        f, f_i, m, m_i = _before(
            links, inputs, plane, tile - in_group, in_group, COMPLEX, WIDE, COLUMNS, GROUP, SPREAD
        )
        if (in_group == GROUP - 1) & (group < GROUPS - 1) & (tile < tiles - 1):
            c, c_i, w, w_i = composed(f, f_i, m, m_i, whole, whole_i, end, end_i, COMPLEX)
            own = (tile // GROUP * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            _publish_link(group_links, group_inputs, own, plane, c, c_i, w, w_i, COMPLEX, WIDE)
        c, c_i, w, w_i = _before(
            group_links,
            group_inputs,
            plane,
            tile // GROUP - group,
            group,
            COMPLEX,
            WIDE,
            COLUMNS,
            GROUPS,
            SPREAD,
        )
        f, f_i, m, m_i = composed(c, c_i, w, w_i, f, f_i, m, m_i, COMPLEX)
        if tile >= GROUP * GROUPS:
            rows = tl.arange(0, SPREAD)[:, None]
            needed = (rows == 0) & (columns >= 0)
            left = tile // (GROUP * GROUPS) * (GROUP * GROUPS) - 1
            at = left.to(tl.int64) * COLUMNS + columns + 0 * rows
            imaginary = inputs + (plane * (2 if tl.float64 == WIDE else 1) if COMPLEX else 0)
            value, value_i = _awaited(inputs + at, imaginary + at, plane, needed, WIDE)
            start, start_i = tl.sum(value, axis=0), tl.sum(value_i, axis=0)
        start, start_i = applied(f, f_i, m, m_i, start, start_i, COMPLEX)
    after, after_i = applied(whole, whole_i, end, end_i, start, start_i, COMPLEX)
    if CHAINED:  # noqa: SIM102
        if (tile % (GROUP * GROUPS) == GROUP * GROUPS - 1) & (tile < tiles - 1):
            own = (tile * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            _publish(inputs + own, plane, after)
            if COMPLEX:
                _publish(inputs + plane * (2 if tl.float64 == WIDE else 1) + own, plane, after_i)
    start, start_i = applied(b, b_i, z, z_i, start[None, :], start_i[None, :], COMPLEX)
    return start, start_i, after, after_i
