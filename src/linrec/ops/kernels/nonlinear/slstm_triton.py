"""GPU kernels of the sLSTM's loop; imported at the first use, because importing Triton is slow.

A program runs all steps of a head and of ROWS batch rows, in TILES tiles (ROWS, BLOCK) of channels. If one
tile has all channels of a head, the program loads the recurrent weights once, before the first step, and
holds them in shared memory. Else every step reads them, tile by tile, from the GPU's cache.

The states are in memory, where any thread of the program can read them: the cache holds them. A barrier
separates the steps. No load may move to an earlier step, so kernels are launched with `num_stages=1`.

The forward kernel saves the arguments of the gates, and the states that each step starts from. The backward
kernel needs no other values. The gradient of the weights is a single product over all steps, which follows
the kernel. Gates are in the order i, f, z, o. Masked channels have weights of zero and finite states.
"""

# tuples grow gate by gate, because the loops are unrolled
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl


@triton.jit
def _place(batch, HEADS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the head and the batch rows of a program, and which rows exist."""
    rows = tl.program_id(0) // HEADS * ROWS + tl.arange(0, ROWS).to(tl.int64)
    return tl.program_id(0) % HEADS, rows, rows < batch


@triton.jit
def _load(x, place, inside, j, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load tile `j` of vectors of SIZE channels; `place` is the number of vectors before them."""
    channels = j * BLOCK + tl.arange(0, BLOCK)
    at = x + place[:, None] * SIZE + channels[None, :]
    return tl.load(at, mask=inside[:, None] & (channels < SIZE)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, place, inside, j, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = j * BLOCK + tl.arange(0, BLOCK)
    at = x + place[:, None] * SIZE + channels[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=inside[:, None] & (channels < SIZE)[None, :])


@triton.jit
def _weights(R, head, k, j, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the weights of the gates from tile `k` to tile `j`; R is (h, 4, d, d)."""
    inputs, outputs = k * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    mask = (inputs < SIZE)[:, None] & (outputs < SIZE)[None, :]
    tiles = ()
    for gate in tl.static_range(4):
        at = R + ((head * 4 + gate) * SIZE + inputs)[:, None] * SIZE + outputs[None, :]
        tiles = tiles + (tl.load(at, mask=mask, other=0.0),)  # noqa: RUF005
    return tiles


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
    Wx, R, start, reset, hidden, last, cell, normalizer, largest, gates, cells, normalizers, largests, batch,
    time, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, HAS_RESET: tl.constexpr, SIGMOID: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill `hidden` (b, t, h, d) and `last`, from the hidden state `start`.

    `cell`, `normalizer` and `largest` hold the first state, and hold the last at the end. The arrays after
    them are filled with KEEP.
    """
    head, rows, inside = _place(batch, HEADS, ROWS)
    end = rows * HEADS + head
    weights = _weights(R, head, 0, 0, SIZE, BLOCK)
    for step in range(time):
        at = rows * time + step
        place = at * HEADS + head
        cut = _resets(reset, at, inside, HAS_RESET)
        for j in range(TILES):
            totals = ()
            for gate in tl.static_range(4):
                total = _load(Wx, (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
                totals = totals + (total,)  # noqa: RUF005
            c = _cut(_load(cell, end, inside, j, SIZE, BLOCK), cut, 0.0, HAS_RESET)
            n = _cut(_load(normalizer, end, inside, j, SIZE, BLOCK), cut, 0.0, HAS_RESET)
            m = _cut(_load(largest, end, inside, j, SIZE, BLOCK), cut, -float("inf"), HAS_RESET)
            for k in range(TILES):
                if TILES > 1:
                    weights = _weights(R, head, k, j, SIZE, BLOCK)
                h = _load(hidden, place - HEADS, inside & (step > 0), k, SIZE, BLOCK)
                h += _load(start, end, inside & (step == 0), k, SIZE, BLOCK)
                h = _cut(h, cut, 0.0, HAS_RESET).to(R.dtype.element_ty)
                sums = ()
                for gate in tl.static_range(4):
                    sums = sums + (tl.dot(h, weights[gate], totals[gate], input_precision=PRECISION),)  # noqa: RUF005
                totals = sums
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
            # the threads that read a state may not be those that write it
            tl.debug_barrier()
            _store(cell, c, end, inside, j, SIZE, BLOCK)
            _store(normalizer, n, end, inside, j, SIZE, BLOCK)
            _store(largest, m, end, inside, j, SIZE, BLOCK)
            _store(hidden, h, place, inside, j, SIZE, BLOCK)
            _store(last, h, end, inside, j, SIZE, BLOCK)
        tl.debug_barrier()


@triton.jit
def slstm_gradients(  # type: ignore[no-untyped-def]
    gates, R, cells, normalizers, largests, reset, dhidden, dh, dc, dn, dWx, batch, time,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    HAS_RESET: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dWx (b, t, 4, h, d), which is the gradient of the gates' arguments. R has its last axes swapped.

    `dh`, `dc` and `dn` hold the gradients of the last state, and hold those of the first at the end. c / n
    does not depend on m, so no gradient passes m.
    """
    head, rows, inside = _place(batch, HEADS, ROWS)
    end = rows * HEADS + head
    weights = _weights(R, head, 0, 0, SIZE, BLOCK)
    for back in range(time):
        at = rows * time + (time - 1 - back)
        place = at * HEADS + head
        cut = _resets(reset, at, inside, HAS_RESET)
        for j in range(TILES):
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
            d = _load(dh, end, inside, j, SIZE, BLOCK) + _load(dhidden, place, inside, j, SIZE, BLOCK)
            of_cell = _load(dc, end, inside, j, SIZE, BLOCK) + d * o / normalizer
            of_normalizer = _load(dn, end, inside, j, SIZE, BLOCK) - d * o * share / normalizer
            of_f = (of_cell * c + of_normalizer * n) * f
            if SIGMOID:
                of_f *= _sigmoid(-argument)
            changes = (
                (of_cell * z + of_normalizer) * i,
                of_f,
                of_cell * i * (1 - z * z),
                d * share * o * (1 - o),
            )
            # the threads that read a gradient may not be those that write it
            tl.debug_barrier()
            for gate in tl.static_range(4):
                _store(dWx, changes[gate], (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
            _store(dc, _cut(of_cell * f, cut, 0.0, HAS_RESET), end, inside, j, SIZE, BLOCK)
            _store(dn, _cut(of_normalizer * f, cut, 0.0, HAS_RESET), end, inside, j, SIZE, BLOCK)
        tl.debug_barrier()
        for k in range(TILES):
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            for j in range(TILES):
                if TILES > 1:
                    weights = _weights(R, head, j, k, SIZE, BLOCK)
                for gate in tl.static_range(4):
                    change = _load(dWx, (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
                    total = tl.dot(
                        change.to(R.dtype.element_ty), weights[gate], total, input_precision=PRECISION
                    )
            _store(dh, _cut(total, cut, 0.0, HAS_RESET), end, inside, k, SIZE, BLOCK)
        tl.debug_barrier()
