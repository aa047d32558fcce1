"""Shared code of GPU kernels for elementwise recurrences: tiles over time, and the value passed between them.

A tile is (PIECES, ROWS, COLUMNS): each thread holds ROWS consecutive steps of a few channels and scans them
in registers. The PIECES segments of a tile are consecutive in time, on different warps. Tiles are consecutive
in time too, in different programs, so that a single long sequence occupies the whole device while every input
is read once:

- Each tile publishes its own link and input (A, X): y_end = A y_start + X.
- Tiles form groups of GROUP, and groups form supergroups of GROUPS. The last tile of a group publishes the
  link and the input of the whole group. The last tile of a supergroup publishes the value after it. A tile
  waits for the previous tiles of its group, for the previous groups of its supergroup, and for the value
  before its supergroup. Only this value is passed on sequentially, with a round trip to memory per
  supergroup.
- Everything is combined in a fixed order, so the result is bitwise reproducible.

A tile only waits for tiles of programs with lower numbers, which the device starts earlier.

Published data are 64-bit words, which hold two float32 numbers or one float64 number and are never 0. Atomic
words need no fence, and reading takes a single trip to memory. The memory for words must be zero at the
start.

Complex numbers are pairs (real part, imaginary part). In real kernels, imaginary parts are unused copies of
the real parts, which cost nothing. In memory, a complex64 number is a 64-bit word, so that a single
instruction loads it; a complex128 number is two float64 numbers.
"""

import triton
import triton.language as tl


@triton.jit
def program(chains, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return chain, tile, batch row and first channel of a program, and its columns (1, 1, COLUMNS)."""
    chain = tl.program_id(0) % chains
    tile = tl.program_id(0) // chains
    row = (chain // tl.cdiv(CHANNELS, COLUMNS)).to(tl.int64)
    channel = (chain % tl.cdiv(CHANNELS, COLUMNS)) * COLUMNS
    # columns are contiguous, so that Triton distributes columns and not rows over threads; the declared
    # alignment of VECTOR limits a vector load to VECTOR columns
    columns = tl.multiple_of(tl.arange(0, COLUMNS), VECTOR)[None, None, :]
    return chain, tile, row, channel, columns


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
    """Store numbers in the precision of the tensor."""
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
def stored_last(  # type: ignore[no-untyped-def]
    ptr, at, x, x_i, inside, COMPLEX: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr
):
    """Store the last segment's entry of (PIECES, 1, COLUMNS) at `at` (1, 1, COLUMNS), where `inside`."""
    piece = tl.arange(0, PIECES)[:, None, None]
    stored(ptr, at + 0 * piece, x, x_i, inside & (piece == PIECES - 1), COMPLEX, WIDE)


@triton.jit
def compose(a1, x1, a2, x2):  # type: ignore[no-untyped-def]
    """Apply y -> a1 y + x1, then y -> a2 y + x2."""
    return a2 * a1, a2 * x1 + x2


@triton.jit
def compose_complex(a1, b1, x1, z1, a2, b2, x2, z2):  # type: ignore[no-untyped-def]
    """Compose like `compose`, for links a + ib and inputs x + iz."""
    return a2 * a1 - b2 * b1, a2 * b1 + b2 * a1, x2 - b2 * z1 + a2 * x1, z2 + b2 * x1 + a2 * z1


@triton.jit
def _compose_cut(a1, x1, a2, x2):  # type: ignore[no-untyped-def]
    """Compose like `compose`, but with a2 = 0 the first pair has no effect, even if it is NaN."""
    a, x = compose(a1, x1, a2, x2)
    return tl.where(a2 == 0.0, 0.0, a), tl.where(a2 == 0.0, x2, x)


@triton.jit
def _compose_complex_cut(a1, b1, x1, z1, a2, b2, x2, z2):  # type: ignore[no-untyped-def]
    """Compose like `_compose_cut`, for complex numbers."""
    a, b, x, z = compose_complex(a1, b1, x1, z1, a2, b2, x2, z2)
    cut = (a2 == 0.0) & (b2 == 0.0)
    return tl.where(cut, 0.0, a), tl.where(cut, 0.0, b), tl.where(cut, x2, x), tl.where(cut, z2, z)


@triton.jit
def composed(  # type: ignore[no-untyped-def]
    a1, b1, x1, z1, a2, b2, x2, z2, CUT: tl.constexpr, COMPLEX: tl.constexpr
):
    """Return the composition of the first pair and then the second. With CUT, some links may be cut."""
    if COMPLEX:
        if CUT:
            a, a_i, x, x_i = _compose_complex_cut(a1, b1, x1, z1, a2, b2, x2, z2)
        else:
            a, a_i, x, x_i = compose_complex(a1, b1, x1, z1, a2, b2, x2, z2)
    else:
        if CUT:
            a, x = _compose_cut(a1, x1, a2, x2)
        else:
            a, x = compose(a1, x1, a2, x2)
        a_i, x_i = a, x
    return a, a_i, x, x_i


@triton.jit
def scanned(a, a_i, x, x_i, CUT: tl.constexpr, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compose all steps up to and including each step, along the middle of three axes."""
    if COMPLEX:
        if CUT:
            a, a_i, x, x_i = tl.associative_scan((a, a_i, x, x_i), 1, _compose_complex_cut)
        else:
            a, a_i, x, x_i = tl.associative_scan((a, a_i, x, x_i), 1, compose_complex)
    else:
        if CUT:
            a, x = tl.associative_scan((a, x), 1, _compose_cut)
        else:
            a, x = tl.associative_scan((a, x), 1, compose)
    return a, a_i, x, x_i


@triton.jit
def applied(a, a_i, x, x_i, y, y_i, CUT: tl.constexpr, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a y + x. With CUT, some links may be cut: a link of 0 gives x even if y is NaN."""
    if COMPLEX:
        result, result_i = x - a_i * y_i + a * y, x_i + a_i * y + a * y_i
        if CUT:
            cut = (a == 0.0) & (a_i == 0.0)
            result, result_i = tl.where(cut, x, result), tl.where(cut, x_i, result_i)
    else:
        result, result_i = a * y + x, y_i
        if CUT:
            result = tl.where(a == 0.0, x, result)
    return result, result_i


@triton.jit
def times(a, a_i, y, y_i, CUT: tl.constexpr, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a y, like `applied` with an input of zero."""
    if COMPLEX:
        result, result_i = a * y - a_i * y_i, a * y_i + a_i * y
        if CUT:
            cut = (a == 0.0) & (a_i == 0.0)
            result, result_i = tl.where(cut, 0.0, result), tl.where(cut, 0.0, result_i)
    else:
        result, result_i = a * y, y_i
        if CUT:
            result = tl.where(a == 0.0, 0.0, result)
    return result, result_i


@triton.jit
def _compose_twice(b1, z1, a1, x1, b2, z2, a2, x2):  # type: ignore[no-untyped-def]
    """Compose two prefixes at once: without the last step and with it."""
    b, z = compose(a1, x1, b2, z2)
    a, x = compose(a1, x1, a2, x2)
    return b, z, a, x


@triton.jit
def _compose_twice_cut(b1, z1, a1, x1, b2, z2, a2, x2):  # type: ignore[no-untyped-def]
    """Compose like `_compose_twice`, where links may be cut."""
    b, z = _compose_cut(a1, x1, b2, z2)
    a, x = _compose_cut(a1, x1, a2, x2)
    return b, z, a, x


@triton.jit
def _compose_twice_complex(  # type: ignore[no-untyped-def]
    b1, d1, z1, w1, a1, c1, x1, u1, b2, d2, z2, w2, a2, c2, x2, u2
):
    """Compose like `_compose_twice`, for complex numbers, where links may be cut."""
    b, d, z, w = _compose_complex_cut(a1, c1, x1, u1, b2, d2, z2, w2)
    a, c, x, u = _compose_complex_cut(a1, c1, x1, u1, a2, c2, x2, u2)
    return b, d, z, w, a, c, x, u


@triton.jit
def _up_to(a, a_i, x, x_i, CUT: tl.constexpr, COMPLEX: tl.constexpr, BACKWARDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compose the segments (PIECES, 1, COLUMNS) before each segment, and up to and including it."""
    one = tl.zeros_like(a) + 1.0
    zero = tl.zeros_like(a)
    if COMPLEX:
        b, b_i, z, z_i, a, a_i, x, x_i = tl.associative_scan(
            (one, zero, zero, zero, a, a_i, x, x_i), 0, _compose_twice_complex, reverse=BACKWARDS
        )
    else:
        if CUT:
            b, z, a, x = tl.associative_scan((one, zero, a, x), 0, _compose_twice_cut, reverse=BACKWARDS)
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
def entries(a, a_i, x, x_i, i: tl.constexpr, COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return entry `i` of each tensor along the middle of three axes, which is kept."""
    chosen = tl.arange(0, a.shape[1])[None, :, None] == i
    a, x = tl.where(chosen, a, 0.0), tl.where(chosen, x, 0.0)
    if COMPLEX:
        a_i, x_i = tl.where(chosen, a_i, 0.0), tl.where(chosen, x_i, 0.0)
        a, a_i, x, x_i = tl.reduce((a, a_i, x, x_i), 1, _add_complex, keep_dims=True)
    else:
        a, x = tl.reduce((a, x), 1, _add, keep_dims=True)
        a_i, x_i = a, x
    return a, a_i, x, x_i


@triton.jit
def _word(x, x_i, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a float64 number, or two float32 numbers, as a word that is not 0."""
    if tl.float64 == WIDE:
        bits = x.to(tl.int64, bitcast=True)
    else:
        low = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        bits = low | (x_i.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    # the complement is 0 only for the pattern of all ones, which is a NaN: it shares the word of another NaN
    return ~tl.where(bits == -1, bits ^ 1, bits)


@triton.jit
def _numbers(word, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers that `_word` encoded."""
    bits = ~word
    if tl.float64 == WIDE:
        x = bits.to(tl.float64, bitcast=True)
        x_i = x
    else:
        x = bits.to(tl.int32).to(tl.float32, bitcast=True)
        x_i = (bits >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return x, x_i


@triton.jit
def _publish(ptr, a, a_i, x, x_i, mask, COMPLEX: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Publish a link and an input, COLUMNS words apart."""
    if tl.float64 == WIDE:
        tl.atomic_xchg(ptr, _word(a, a, WIDE), mask=mask, sem="relaxed")
        tl.atomic_xchg(ptr + COLUMNS, _word(x, x, WIDE), mask=mask, sem="relaxed")
        if COMPLEX:
            tl.atomic_xchg(ptr + 2 * COLUMNS, _word(a_i, a_i, WIDE), mask=mask, sem="relaxed")
            tl.atomic_xchg(ptr + 3 * COLUMNS, _word(x_i, x_i, WIDE), mask=mask, sem="relaxed")
    elif COMPLEX:
        tl.atomic_xchg(ptr, _word(a, a_i, WIDE), mask=mask, sem="relaxed")
        tl.atomic_xchg(ptr + COLUMNS, _word(x, x_i, WIDE), mask=mask, sem="relaxed")
    else:
        tl.atomic_xchg(ptr, _word(a, x, WIDE), mask=mask, sem="relaxed")


@triton.jit
def _words(ptr, mask, TWO: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the words under `mask`, and for the words COLUMNS further; poll only the missing words."""
    word = tl.load(ptr, mask=mask, other=-1, volatile=True)
    other = word
    if TWO:
        other = tl.load(ptr + COLUMNS, mask=mask, other=-1, volatile=True)
    missing = (word == 0) | (other == 0)
    while tl.max(missing.to(tl.int32)) > 0:
        word |= tl.load(ptr, mask=missing, other=0, volatile=True)
        if TWO:
            other |= tl.load(ptr + COLUMNS, mask=missing, other=0, volatile=True)
        else:
            other = word
        missing = (word == 0) | (other == 0)
    return word, other


@triton.jit
def _wait(ptr):  # type: ignore[no-untyped-def]
    """Wait for a single word; polling all words continuously would slow down every program."""
    word = tl.load(ptr, volatile=True)
    while word == 0:
        word = tl.load(ptr, volatile=True)


@triton.jit
def _awaited(ptr, mask, COMPLEX: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the links and inputs under `mask`, and return them; the other entries are undefined."""
    word, other = _words(ptr, mask, COMPLEX or tl.float64 == WIDE, COLUMNS)
    a, a_i = _numbers(word, WIDE)
    x, x_i = _numbers(other, WIDE)
    if tl.float64 == WIDE:
        if COMPLEX:
            word, other = _words(ptr + 2 * COLUMNS, mask, True, COLUMNS)
            a_i, _ = _numbers(word, WIDE)
            x_i, _ = _numbers(other, WIDE)
    elif not COMPLEX:
        x, x_i = a_i, a_i
    return a, a_i, x, x_i


@triton.jit
def _before(  # type: ignore[no-untyped-def]
    ptr, first, n, columns, identity,
    CUT: tl.constexpr, COMPLEX: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Wait for `n` < N links and inputs from index `first` on, and return their composition."""
    b, b_i, z, z_i = identity + 1.0, identity, identity, identity
    if N > 1:  # noqa: SIM102, for one is known when the kernel is compiled
        if n > 0:
            # the last word most likely arrives last
            _wait(ptr + (first + n - 1) * STRIDE)
            # each thread holds all N entries of a column, so that composing them needs no exchange
            i = tl.arange(0, N)[None, :, None]
            needed = i < n
            c, c_i, w, w_i = _awaited(ptr + ((first + i) * STRIDE + columns), needed, COMPLEX, WIDE, COLUMNS)
            c, c_i = tl.where(needed, c, 1.0), tl.where(needed, c_i, 0.0)
            w, w_i = tl.where(needed, w, 0.0), tl.where(needed, w_i, 0.0)
            c, c_i, w, w_i = scanned(c, c_i, w, w_i, CUT, COMPLEX)
            b, b_i, z, z_i = entries(c, c_i, w, w_i, N - 1, COMPLEX)
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
    chain,
    chains,
    tile,
    tiles,
    CUT: tl.constexpr,
    COMPLEX: tl.constexpr,
    CHAINED: tl.constexpr,
    WIDE: tl.constexpr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BACKWARDS: tl.constexpr = False,
):
    """Return the value before and after each segment (PIECES, 1, COLUMNS).

    a and x (PIECES, 1, COLUMNS) are the links and inputs of a tile's segments, in reverse order if BACKWARDS;
    `start` (1, 1, COLUMNS) is the value before the first tile. All tensors have three axes, so that they have
    the same layout over threads.

    The threads of every segment read the published words, because an exchange between threads would take
    longer. Every thread must poll its own element: Triton replicates small tensors over threads, the replicas
    are read at different times, and the check of a single replica would release all of them. Hence COLUMNS is
    at least the number of threads per segment.
    """
    # compositions of the tile's segments before each segment, and up to and including it
    b, b_i, z, z_i, a, a_i, x, x_i = _up_to(a, a_i, x, x_i, CUT, COMPLEX, BACKWARDS)
    identity = tl.zeros([PIECES, 1, COLUMNS], WIDE)
    start, start_i = start + identity, start_i + identity

    if CHAINED:
        # words: links and inputs of each chain's tiles, then of its groups. Nobody needs the link and input
        # of the last tile of a supergroup, so the value takes their place
        STRIDE: tl.constexpr = COLUMNS * (2 if COMPLEX else 1) * (2 if tl.float64 == WIDE else 1)
        LAST: tl.constexpr = 0 if BACKWARDS else PIECES - 1
        piece = tl.arange(0, PIECES)[:, None, None]
        columns = tl.multiple_of(tl.arange(0, COLUMNS), VECTOR)[None, None, :] + 0 * piece
        groups = tl.cdiv(tiles, GROUP)
        of_tiles = words_ptr + tl.cast(chain, tl.int64) * tiles * STRIDE
        of_groups = words_ptr + tl.cast(chains, tl.int64) * tiles * STRIDE
        of_groups += tl.cast(chain, tl.int64) * groups * STRIDE
        in_group = tile % GROUP
        group = tile // GROUP % GROUPS
        own = of_tiles + (tile * STRIDE + columns)
        # publish first, then wait
        if (in_group < GROUP - 1) & (tile < tiles - 1):
            _publish(own, a, a_i, x, x_i, piece == LAST, COMPLEX, WIDE, COLUMNS)
        f, f_i, m, m_i = _before(
            of_tiles, tile - in_group, in_group, columns, identity, CUT, COMPLEX, WIDE, COLUMNS, GROUP, STRIDE
        )
        if (in_group == GROUP - 1) & (group < GROUPS - 1) & (tile < tiles - 1):
            c, c_i, w, w_i = composed(f, f_i, m, m_i, a, a_i, x, x_i, CUT, COMPLEX)
            whole = of_groups + (tile // GROUP * STRIDE + columns)
            _publish(whole, c, c_i, w, w_i, piece == LAST, COMPLEX, WIDE, COLUMNS)
        at = tile // GROUP - group
        c, c_i, w, w_i = _before(
            of_groups, at, group, columns, identity, CUT, COMPLEX, WIDE, COLUMNS, GROUPS, STRIDE
        )
        f, f_i, m, m_i = composed(c, c_i, w, w_i, f, f_i, m, m_i, CUT, COMPLEX)
        if tile >= GROUP * GROUPS:
            left = tile // (GROUP * GROUPS) * (GROUP * GROUPS) - 1
            # the last tile passes on the value, so it polls without a separate wait
            if tile % (GROUP * GROUPS) < GROUP * GROUPS - 1:
                _wait(of_tiles + left * STRIDE)
            value = of_tiles + (left * STRIDE + columns)
            word, other = _words(value, piece >= 0, COMPLEX and tl.float64 == WIDE, COLUMNS)
            start, start_i = _numbers(word, WIDE)
            if tl.float64 == WIDE:
                start_i, _ = _numbers(other, WIDE)
        start, start_i = applied(f, f_i, m, m_i, start, start_i, CUT, COMPLEX)
    after, after_i = applied(a, a_i, x, x_i, start, start_i, CUT, COMPLEX)
    if CHAINED:  # noqa: SIM102
        if (tile % (GROUP * GROUPS) == GROUP * GROUPS - 1) & (tile < tiles - 1):
            tl.atomic_xchg(own, _word(after, after_i, WIDE), mask=piece == LAST, sem="relaxed")
            if COMPLEX and tl.float64 == WIDE:
                tl.atomic_xchg(
                    own + COLUMNS, _word(after_i, after_i, WIDE), mask=piece == LAST, sem="relaxed"
                )
    start, start_i = applied(b, b_i, z, z_i, start, start_i, CUT, COMPLEX)
    return start, start_i, after, after_i
