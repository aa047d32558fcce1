"""GPU kernels of the sLSTM's loop; imported at the first use, because importing Triton is slow.

A program runs all steps of a head and of ROWS batch rows, and computes BLOCK channels. It multiplies by
the weights in pieces of CHUNK of the WIDTH channels, for the four gates together. With HELD it loads its
weights once, before the first step, and holds them in shared memory; else every step loads them.

PARTS programs share a head, so that more multiprocessors work on it, and each holds fewer weights. They
exchange values through memory at each step:

- Forward, a program writes its channels of h, and reads all channels of h before the next step.
- Backward, a program multiplies its own gradients of the gates by its weights, which gives a part of the
  gradient of h. It writes its part, and reads its channels of all parts before the next step.

A counter in memory tells when all programs have written. All threads of a program store, and then one thread
counts, with release order; one thread waits, with acquire order, and then all threads load past the cache of
their multiprocessor. A program that waits does not make room for one that has not started, so all programs of
a launch must run at the same time: they are launched as a cooperative grid. No load may move to an earlier
step, so kernels are launched with `num_stages=1`. A program that has a head of its own keeps the channels in
registers, and CHUNK is WIDTH.

The forward kernel saves the arguments of the gates, and the states that each step starts from. The backward
kernel needs no other values. The gradient of the weights is a single product over all steps, which follows
the kernel. Gates are in the order i, f, z, o; a product has 4 BLOCK columns, gate after gate. Masked channels
have weights of zero and finite states. Loops over held weights are unrolled, because they are a tuple.
"""

import triton
import triton.language as tl


@triton.jit
def _place(batch, first, HEADS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the group of a program, its head and batch rows, and which rows exist.

    A group is PARTS programs; `first` is the first group of the launch.
    """
    group = first + tl.program_id(0) // PARTS
    rows = group // HEADS * ROWS + tl.arange(0, ROWS).to(tl.int64)
    return group, group % HEADS, rows, rows < batch


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    x, place, inside, j, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr = False
):
    """Load block `j` of vectors of SIZE channels; `place` is the number of vectors before them.

    SHARED means that other programs wrote them, which the cache of this multiprocessor does not see.
    """
    channels = j * BLOCK + tl.arange(0, BLOCK)
    at = x + place[:, None] * SIZE + channels[None, :]
    mask = inside[:, None] & (channels < SIZE)[None, :]
    if SHARED:
        return tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    else:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, place, inside, j, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = j * BLOCK + tl.arange(0, BLOCK)
    at = x + place[:, None] * SIZE + channels[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=inside[:, None] & (channels < SIZE)[None, :])


@triton.jit
def _columns(j, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the gate and the channel of each column of block `j`."""
    columns = tl.arange(0, 4 * BLOCK)
    return columns // BLOCK, j * BLOCK + columns % BLOCK


@triton.jit
def _load_gates(x, at, head, inside, gates, channels, HEADS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load channels of gates; x is (b, t, 4, h, d), and `at` is the number of steps before."""
    place = (at[:, None] * 4 + gates[None, :]) * HEADS + head
    mask = inside[:, None] & (channels < SIZE)[None, :]
    return tl.load(x + place * SIZE + channels[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weights(R, head, k, gates, channels, SIZE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the weights from chunk `k` to channels of gates; R is (h, d, 4 d)."""
    inputs = k * CHUNK + tl.arange(0, CHUNK)
    at = R + (head.to(tl.int64) * SIZE + inputs)[:, None] * (4 * SIZE) + (gates * SIZE + channels)[None, :]
    return tl.load(at, mask=(inputs < SIZE)[:, None] & (channels < SIZE)[None, :], other=0.0)


@triton.jit
def _apart(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the four gates of columns (ROWS, 4 BLOCK)."""
    pairs = x.reshape(ROWS, 2, 2, BLOCK).permute(0, 3, 1, 2)
    i_z, f_o = tl.split(pairs)
    i, z = tl.split(i_z)
    f, o = tl.split(f_o)
    return i, f, z, o


@triton.jit
def _together(gates, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the four gates as columns (ROWS, 4 BLOCK)."""
    i, f, z, o = gates
    pairs = tl.join(tl.join(i, z), tl.join(f, o))
    return pairs.permute(0, 2, 3, 1).reshape(ROWS, 4 * BLOCK)


@triton.jit
def _held_weights(  # type: ignore[no-untyped-def]
    R, head, gates, channels, SIZE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Load the weights from all chunks to a block; none without HELD."""
    held = ()
    if HELD:
        for k in tl.static_range(WIDTH // CHUNK):
            held = held + (_weights(R, head, k, gates, channels, SIZE, CHUNK),)  # type: ignore[assignment]  # noqa: RUF005
    return held


@triton.jit
def _arrive(arrived):  # type: ignore[no-untyped-def]
    """Count this program as arrived: the values that its group waits for are stored."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release")


@triton.jit
def _wait(arrived, goal):  # type: ignore[no-untyped-def]
    """Wait until the programs of a group have arrived `goal` times in all."""
    while tl.atomic_add(arrived, 0, sem="acquire") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def _sum_of_parts(  # type: ignore[no-untyped-def]
    parts, arrived, steps, end, vectors, inside, j, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return the sum of block `j` of the parts after `steps` steps, when all programs have written them.

    `end` is the number of vectors before those of this program in a part, and `vectors` that of a part.
    """
    _wait(arrived, steps * PARTS)
    place = end + steps % 2 * PARTS * vectors
    total = _load(parts, place, inside, j, SIZE, BLOCK, SHARED=True)
    for part in tl.static_range(1, PARTS):
        total += _load(parts, place + part * vectors, inside, j, SIZE, BLOCK, SHARED=True)
    return total


@triton.jit
def _resets(reset, at, inside, HAS_RESET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return which rows have a reset at a step."""
    if HAS_RESET:
        return tl.load(reset + at, mask=inside, other=0) != 0
    else:
        return at < 0


@triton.jit
def _cut(x, cut, value, HAS_RESET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `value` in the rows that have a reset, else x."""
    if HAS_RESET:
        return tl.where(cut[:, None], value, x)
    else:
        return x


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    # no exponential overflows
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0, power, 1.0) / (1 + power)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * _sigmoid(2 * x) - 1


@triton.jit
def _log_forget(f, SIGMOID: tl.constexpr):  # type: ignore[no-untyped-def]
    if SIGMOID:
        return tl.minimum(f, 0.0) - tl.log(1 + tl.exp(-tl.abs(f)))
    else:
        return f


@triton.jit(do_not_specialize=["first"])
def slstm(  # type: ignore[no-untyped-def]
    Wx, R, start, reset, hidden, last, cell, normalizer, largest, gates, cells, normalizers, largests,
    arrived, batch, time, first, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr,
    HAS_RESET: tl.constexpr, SIGMOID: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill `hidden` (b, t, h, d) and `last`, from the hidden state `start`.

    `cell`, `normalizer` and `largest` hold the first state, and hold the last at the end. The four arrays
    after them are filled with KEEP. `arrived` counts from zero for each group.
    """
    group, head, rows, inside = _place(batch, first, HEADS, ROWS, PARTS)
    j, end = tl.program_id(0) % PARTS, rows * HEADS + head
    gate_of, channel_of = _columns(j, BLOCK)
    held = _held_weights(R, head, gate_of, channel_of, SIZE, WIDTH, CHUNK, HELD)
    h = _load(start, end, inside, j, SIZE, BLOCK)
    c = _load(cell, end, inside, j, SIZE, BLOCK)
    n = _load(normalizer, end, inside, j, SIZE, BLOCK)
    m = _load(largest, end, inside, j, SIZE, BLOCK)
    for step in range(time):
        at = rows * time + step
        place = at * HEADS + head
        cut = _resets(reset, at, inside, HAS_RESET)
        c = _cut(c, cut, 0.0, HAS_RESET)
        n = _cut(n, cut, 0.0, HAS_RESET)
        m = _cut(m, cut, -float("inf"), HAS_RESET)
        totals = _load_gates(Wx, at, head, inside, gate_of, channel_of, HEADS, SIZE)
        if PARTS > 1:
            _wait(arrived + group, step * PARTS)
            source = tl.where(step == 0, start, hidden)
            before = tl.where(step == 0, end, place - HEADS)
        for k in (tl.static_range if HELD else range)(WIDTH // CHUNK):
            weights = held[k] if HELD else _weights(R, head, k, gate_of, channel_of, SIZE, CHUNK)
            x = h if PARTS == 1 else _load(source, before, inside, k, SIZE, CHUNK, SHARED=True)
            x = _cut(x, cut, 0.0, HAS_RESET).to(weights.dtype)
            totals = tl.dot(x, weights, totals, input_precision=PRECISION)
        arguments = _apart(totals, ROWS, BLOCK)
        log_i, argument, z, o = arguments
        kept = _log_forget(argument, SIGMOID) + m
        next_m = tl.maximum(kept, log_i)
        i, f = tl.exp(log_i - next_m), tl.exp(kept - next_m)
        next_c = f * c + i * _tanh(z)
        next_n = f * n + i
        h = _sigmoid(o) * next_c / next_n
        _store(hidden, h, place, inside, j, SIZE, BLOCK)
        if PARTS > 1:
            _arrive(arrived + group)
        # no other program waits for these
        if KEEP:
            for gate in tl.static_range(4):
                _store(gates, arguments[gate], (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
            _store(cells, c, place, inside, j, SIZE, BLOCK)
            _store(normalizers, n, place, inside, j, SIZE, BLOCK)
            _store(largests, m, place, inside, j, SIZE, BLOCK)
        c, n, m = next_c, next_n, next_m
    _store(last, h, end, inside, j, SIZE, BLOCK)
    _store(cell, c, end, inside, j, SIZE, BLOCK)
    _store(normalizer, n, end, inside, j, SIZE, BLOCK)
    _store(largest, m, end, inside, j, SIZE, BLOCK)


@triton.jit(do_not_specialize=["first"])
def slstm_gradients(  # type: ignore[no-untyped-def]
    gates, R, cells, normalizers, largests, reset, dhidden, dh, dc, dn, dWx, parts, arrived, batch, time,
    first, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr,
    HAS_RESET: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dWx (b, t, 4, h, d), which is the gradient of the gates' arguments.

    `dh`, `dc` and `dn` hold the gradients of the last state, and hold those of the first at the end. c / n
    does not depend on m, so no gradient passes m. Programs that share a head exchange parts of the gradient
    of h in `parts` (2, PARTS, b, h, d): a step reads the PARTS that the step before wrote, and overwrites the
    others, which all programs had read when they arrived. The sum of the first PARTS is the gradient of the
    last h. `arrived` counts from zero for each group.
    """
    group, head, rows, inside = _place(batch, first, HEADS, ROWS, PARTS)
    j, end = tl.program_id(0) % PARTS, rows * HEADS + head
    vectors = batch * HEADS
    gate_of, channel_of = _columns(j, BLOCK)
    held = _held_weights(R, head, gate_of, channel_of, SIZE, WIDTH, CHUNK, HELD)
    of_hidden = _load(dh, end, inside, j, SIZE, BLOCK)
    of_next_cell = _load(dc, end, inside, j, SIZE, BLOCK)
    of_next_normalizer = _load(dn, end, inside, j, SIZE, BLOCK)
    for back in range(time):
        at = rows * time + (time - 1 - back)
        place = at * HEADS + head
        cut = _resets(reset, at, inside, HAS_RESET)
        log_i = _load(gates, (at * 4 + 0) * HEADS + head, inside, j, SIZE, BLOCK)
        argument = _load(gates, (at * 4 + 1) * HEADS + head, inside, j, SIZE, BLOCK)
        z = _tanh(_load(gates, (at * 4 + 2) * HEADS + head, inside, j, SIZE, BLOCK))
        o = _sigmoid(_load(gates, (at * 4 + 3) * HEADS + head, inside, j, SIZE, BLOCK))
        c = _load(cells, place, inside, j, SIZE, BLOCK)
        n = _load(normalizers, place, inside, j, SIZE, BLOCK)
        kept = _log_forget(argument, SIGMOID) + _load(largests, place, inside, j, SIZE, BLOCK)
        m = tl.maximum(kept, log_i)
        i, f = tl.exp(log_i - m), tl.exp(kept - m)
        normalizer = f * n + i
        share = (f * c + i * z) / normalizer
        d = _load(dhidden, place, inside, j, SIZE, BLOCK)
        if PARTS > 1:
            of_hidden = _sum_of_parts(
                parts, arrived + group, back, end, vectors, inside, j, SIZE, BLOCK, PARTS
            )
        # h = o * share
        d += of_hidden
        of_cell = of_next_cell + d * o / normalizer
        of_normalizer = of_next_normalizer - d * o * share / normalizer
        of_f = (of_cell * c + of_normalizer * n) * f
        if SIGMOID:
            of_f *= _sigmoid(-argument)
        changes = (
            (of_cell * z + of_normalizer) * i,
            of_f,
            of_cell * i * (1 - z * z),
            d * share * o * (1 - o),
        )
        of_next_cell = _cut(of_cell * f, cut, 0.0, HAS_RESET)
        of_next_normalizer = _cut(of_normalizer * f, cut, 0.0, HAS_RESET)
        joined = _together(changes, ROWS, BLOCK).to(R.dtype.element_ty)
        slot = end + ((back + 1) % 2 * PARTS + j) * vectors
        for k in (tl.static_range if HELD else range)(WIDTH // CHUNK):
            weights = held[k] if HELD else _weights(R, head, k, gate_of, channel_of, SIZE, CHUNK)
            part = _cut(tl.dot(joined, weights.T, input_precision=PRECISION), cut, 0.0, HAS_RESET)
            if PARTS == 1:
                of_hidden = part
            else:
                _store(parts, part, slot, inside, k, SIZE, CHUNK)
        if PARTS > 1:
            _arrive(arrived + group)
        # no other program waits for these
        for gate in tl.static_range(4):
            _store(dWx, changes[gate], (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
    if PARTS > 1:
        of_hidden = _sum_of_parts(parts, arrived + group, time, end, vectors, inside, j, SIZE, BLOCK, PARTS)
    _store(dh, of_hidden, end, inside, j, SIZE, BLOCK)
    _store(dc, of_next_cell, end, inside, j, SIZE, BLOCK)
    _store(dn, of_next_normalizer, end, inside, j, SIZE, BLOCK)
