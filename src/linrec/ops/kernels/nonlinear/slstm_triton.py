"""GPU kernels of the sLSTM's loop; imported at the first use, because importing Triton is slow.

A program runs all steps of a head and of ROWS batch rows. It computes BLOCK channels from all WIDTH channels
of the step before, which it multiplies in pieces of CHUNK. With HELD it loads its recurrent weights once,
before the first step, and holds them in shared memory; else every step loads them.

If the weights of a head do not fit into one multiprocessor, PARTS programs share the head. After each step
they exchange their channels through memory, and a counter in memory tells when all have written theirs. A
program that waits does not make room for one that has not started, so all programs of a launch must run at
the same time: they are launched as a cooperative grid. No load may move to an earlier step, so kernels are
launched with `num_stages=1`. A program that has a head of its own keeps the channels in registers, and CHUNK
is WIDTH.

The forward kernel saves the arguments of the gates, and the states that each step starts from. The backward
kernel needs no other values. The gradient of the weights is a single product over all steps, which follows
the kernel. Gates are in the order i, f, z, o. Masked channels have weights of zero and finite states.
"""

# tuples grow gate by gate, because the loops are unrolled
# mypy: disable-error-code="assignment, misc"

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
def _weights(R, head, gate, k, j, SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the weights of a gate from chunk `k` to block `j`; R is (h, 4, d, d)."""
    inputs, outputs = k * CHUNK + tl.arange(0, CHUNK), j * BLOCK + tl.arange(0, BLOCK)
    at = R + ((head * 4 + gate) * SIZE + inputs)[:, None] * SIZE + outputs[None, :]
    return tl.load(at, mask=(inputs < SIZE)[:, None] & (outputs < SIZE)[None, :], other=0.0)


@triton.jit
def _held_weights(  # type: ignore[no-untyped-def]
    R, head, j, SIZE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Load the weights of all chunks and gates to block `j`, in the order of chunks; none without HELD."""
    held = ()
    if HELD:
        for k in tl.static_range(WIDTH // CHUNK):
            for gate in tl.static_range(4):
                held = held + (_weights(R, head, gate, k, j, SIZE, CHUNK, BLOCK),)  # noqa: RUF005
    return held


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    total, x, R, held, head, gate: tl.constexpr, k, j, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `total` plus the product of chunk `k` of x and the weights of a gate."""
    weights = held[k * 4 + gate] if HELD else _weights(R, head, gate, k, j, SIZE, CHUNK, BLOCK)
    return tl.dot(x.to(R.dtype.element_ty), weights, total, input_precision=PRECISION)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    totals, x, R, held, head, k, j, SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `totals` plus the products of chunk `k` of x and the weights of each gate."""
    sums = ()
    for gate in tl.static_range(4):
        total = _product(totals[gate], x, R, held, head, gate, k, j, SIZE, CHUNK, BLOCK, HELD, PRECISION)
        sums = sums + (total,)  # noqa: RUF005
    return sums


@triton.jit
def _forward_chunk(  # type: ignore[no-untyped-def]
    totals, hidden, start, place, end, step, inside, cut, R, held, head, k, j, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, HAS_RESET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the arguments of the gates plus the products of chunk `k` of h before the step."""
    h = _load(hidden, place, inside & (step > 0), k, SIZE, CHUNK, SHARED=True)
    h += _load(start, end, inside & (step == 0), k, SIZE, CHUNK)
    h = _cut(h, cut, 0.0, HAS_RESET)
    return _products(totals, h, R, held, head, k, j, SIZE, CHUNK, BLOCK, HELD, PRECISION)


@triton.jit
def _backward_chunk(  # type: ignore[no-untyped-def]
    total, dWx, at, inside, R, held, head, k, j, HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradient of h before the step plus the products of chunk `k` of the gates' gradients."""
    for gate in tl.static_range(4):
        change = _load(dWx, (at * 4 + gate) * HEADS + head, inside, k, SIZE, CHUNK, SHARED=True)
        total = _product(total, change, R, held, head, gate, k, j, SIZE, CHUNK, BLOCK, HELD, PRECISION)
    return total


@triton.jit
def _meet(arrived, goal):  # type: ignore[no-untyped-def]
    """Wait until the programs of a group have come here `goal` times in all; each sees what all stored."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1)
    while tl.atomic_add(arrived, 0) < goal:
        pass
    tl.debug_barrier()


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


@triton.jit
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
    held = _held_weights(R, head, j, SIZE, WIDTH, CHUNK, BLOCK, HELD)
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
        # all loads are issued before the first product waits for one
        totals = ()
        for gate in tl.static_range(4):
            totals = totals + (_load(Wx, (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK),)  # noqa: RUF005
        if PARTS == 1:
            h = _cut(h, cut, 0.0, HAS_RESET)
            totals = _products(totals, h, R, held, head, 0, j, SIZE, CHUNK, BLOCK, HELD, PRECISION)
        elif HELD:
            for k in tl.static_range(WIDTH // CHUNK):
                totals = _forward_chunk(
                    totals, hidden, start, place - HEADS, end, step, inside, cut, R, held, head, k, j,
                    SIZE, CHUNK, BLOCK, HELD, HAS_RESET, PRECISION,
                )  # fmt: skip
        else:
            for k in range(WIDTH // CHUNK):
                totals = _forward_chunk(
                    totals, hidden, start, place - HEADS, end, step, inside, cut, R, held, head, k, j,
                    SIZE, CHUNK, BLOCK, HELD, HAS_RESET, PRECISION,
                )  # fmt: skip
        if KEEP:
            for gate in tl.static_range(4):
                _store(gates, totals[gate], (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
            _store(cells, c, place, inside, j, SIZE, BLOCK)
            _store(normalizers, n, place, inside, j, SIZE, BLOCK)
            _store(largests, m, place, inside, j, SIZE, BLOCK)
        log_i, f, z, o = totals
        kept = _log_forget(f, SIGMOID) + m
        m = tl.maximum(kept, log_i)
        i, f = tl.exp(log_i - m), tl.exp(kept - m)
        c = f * c + i * _tanh(z)
        n = f * n + i
        h = _sigmoid(o) * c / n
        _store(hidden, h, place, inside, j, SIZE, BLOCK)
        if PARTS > 1:
            _meet(arrived + group, (step + 1) * PARTS)
    _store(last, h, end, inside, j, SIZE, BLOCK)
    _store(cell, c, end, inside, j, SIZE, BLOCK)
    _store(normalizer, n, end, inside, j, SIZE, BLOCK)
    _store(largest, m, end, inside, j, SIZE, BLOCK)


@triton.jit
def slstm_gradients(  # type: ignore[no-untyped-def]
    gates, R, cells, normalizers, largests, reset, dhidden, dh, dc, dn, dWx, arrived, batch, time, first,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr, HAS_RESET: tl.constexpr,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dWx (b, t, 4, h, d), which is the gradient of the gates' arguments. R has its last axes swapped.

    `dh`, `dc` and `dn` hold the gradients of the last state, and hold those of the first at the end. c / n
    does not depend on m, so no gradient passes m. `arrived` counts from zero for each group. Programs that
    share a head exchange dWx in its dtype.
    """
    group, head, rows, inside = _place(batch, first, HEADS, ROWS, PARTS)
    j, end = tl.program_id(0) % PARTS, rows * HEADS + head
    held = _held_weights(R, head, j, SIZE, WIDTH, CHUNK, BLOCK, HELD)
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
        # h = o * share
        d = of_hidden + _load(dhidden, place, inside, j, SIZE, BLOCK)
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
        for gate in tl.static_range(4):
            _store(dWx, changes[gate], (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
        of_next_cell = _cut(of_cell * f, cut, 0.0, HAS_RESET)
        of_next_normalizer = _cut(of_normalizer * f, cut, 0.0, HAS_RESET)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        if PARTS > 1:
            _meet(arrived + group, (back + 1) * PARTS)
        if PARTS == 1:
            for gate in tl.static_range(4):
                total = _product(
                    total, changes[gate], R, held, head, gate, 0, j, SIZE, CHUNK, BLOCK, HELD, PRECISION
                )
        elif HELD:
            for k in tl.static_range(WIDTH // CHUNK):
                total = _backward_chunk(
                    total, dWx, at, inside, R, held, head, k, j, HEADS, SIZE, CHUNK, BLOCK, HELD, PRECISION
                )
        else:
            for k in range(WIDTH // CHUNK):
                total = _backward_chunk(
                    total, dWx, at, inside, R, held, head, k, j, HEADS, SIZE, CHUNK, BLOCK, HELD, PRECISION
                )
        of_hidden = _cut(total, cut, 0.0, HAS_RESET)
    _store(dh, of_hidden, end, inside, j, SIZE, BLOCK)
    _store(dc, of_next_cell, end, inside, j, SIZE, BLOCK)
    _store(dn, of_next_normalizer, end, inside, j, SIZE, BLOCK)
