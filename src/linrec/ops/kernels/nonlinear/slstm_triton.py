"""GPU kernels of the sLSTM's loop; imported at the first use, because importing Triton is slow.

A program runs all steps of a head and of ROWS batch rows. The states are in registers, as TILES tiles
(ROWS, BLOCK) of channels. The recurrent weights are TILES * TILES tiles (BLOCK, BLOCK) per gate. With HELD
they are loaded once, before the first step. Else every step reads them from the GPU's cache.

The forward kernel saves the arguments of the gates, and the states that each step starts from. The backward
kernel needs no other values, and only the products with the transposed weights. The gradient of the weights
is a single product over all steps, which follows the kernel.

Gates are in the order i, f, z, o. Masked channels have weights of zero and finite states.
"""

# tuples grow tile by tile, because the loops are unrolled
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl


@triton.jit
def _place(batch, HEADS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the head and the batch rows of a program, and which rows exist."""
    rows = tl.program_id(0) // HEADS * ROWS + tl.arange(0, ROWS).to(tl.int64)
    return tl.program_id(0) % HEADS, rows, rows < batch


@triton.jit
def _load(x, places, inside, j: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load tile `j` of the channels of vectors, of which `places` counts those before them."""
    channels = j * BLOCK + tl.arange(0, BLOCK)
    at = x + places[:, None] * SIZE + channels[None, :]
    return tl.load(at, mask=inside[:, None] & (channels < SIZE)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, places, inside, j: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = j * BLOCK + tl.arange(0, BLOCK)
    at = x + places[:, None] * SIZE + channels[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=inside[:, None] & (channels < SIZE)[None, :])


@triton.jit
def _loaded(x, places, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    tiles = ()
    for j in tl.static_range(TILES):
        tiles = tiles + (_load(x, places, inside, j, SIZE, BLOCK),)  # noqa: RUF005
    return tiles


@triton.jit
def _stored(x, tiles, places, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    for j in tl.static_range(TILES):
        _store(x, tiles[j], places, inside, j, SIZE, BLOCK)


@triton.jit
def _after_reset(tiles, cut, value, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return tiles with `value` in the rows that have a reset."""
    kept = ()
    for j in tl.static_range(TILES):
        kept = kept + (tl.where(cut[:, None] != 0, value, tiles[j]),)  # noqa: RUF005
    return kept


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    R, head, k: tl.constexpr, j: tl.constexpr, gate: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the weights from tile `k` of h to tile `j` of a gate; R is (h, d, 4 d)."""
    inputs, outputs = k * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    at = R + (head * SIZE + inputs)[:, None] * 4 * SIZE + gate * SIZE + outputs[None, :]
    return tl.load(at, mask=(inputs < SIZE)[:, None] & (outputs < SIZE)[None, :], other=0.0)


@triton.jit
def _weights(R, head, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return all tiles of the weights with HELD, else an empty tuple."""
    tiles = ()
    if HELD:
        for k in tl.static_range(TILES):
            for j in tl.static_range(TILES):
                for gate in tl.static_range(4):
                    tiles = tiles + (_weight(R, head, k, j, gate, SIZE, BLOCK),)  # noqa: RUF005
    return tiles


@triton.jit
def _tile_of(  # type: ignore[no-untyped-def]
    R, held, head, k: tl.constexpr, j: tl.constexpr, gate: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    if HELD:
        return held[(k * TILES + j) * 4 + gate]
    else:
        return _weight(R, head, k, j, gate, SIZE, BLOCK)


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
    Wx, R, h_start, c_start, n_start, m_start, reset, hidden, h_end, c_end, n_end, m_end, gates, cells,
    normalizers, largests, batch, time, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, HAS_RESET: tl.constexpr, SIGMOID: tl.constexpr,
    KEEP: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill `hidden` (b, t, h, d) and the last states; with KEEP, what the backward kernel reads."""
    head, rows, inside = _place(batch, HEADS, ROWS)
    held = _weights(R, head, SIZE, BLOCK, TILES, HELD)
    ends = rows * HEADS + head
    h = _loaded(h_start, ends, inside, SIZE, BLOCK, TILES)
    c = _loaded(c_start, ends, inside, SIZE, BLOCK, TILES)
    n = _loaded(n_start, ends, inside, SIZE, BLOCK, TILES)
    m = _loaded(m_start, ends, inside, SIZE, BLOCK, TILES)
    for step in range(time):
        at = rows * time + step
        place = at * HEADS + head
        if HAS_RESET:
            cut = tl.load(reset + at, mask=inside, other=0)
            h = _after_reset(h, cut, 0.0, TILES)
            c = _after_reset(c, cut, 0.0, TILES)
            n = _after_reset(n, cut, 0.0, TILES)
            m = _after_reset(m, cut, -float("inf"), TILES)
        if KEEP:
            _stored(cells, c, place, inside, SIZE, BLOCK, TILES)
            _stored(normalizers, n, place, inside, SIZE, BLOCK, TILES)
            _stored(largests, m, place, inside, SIZE, BLOCK, TILES)
        next_h, next_c, next_n, next_m = (), (), (), ()
        for j in tl.static_range(TILES):
            arguments = ()
            for gate in tl.static_range(4):
                of_gate = (at * 4 + gate) * HEADS + head
                total = _load(Wx, of_gate, inside, j, SIZE, BLOCK)
                for k in tl.static_range(TILES):
                    weight = _tile_of(R, held, head, k, j, gate, SIZE, BLOCK, TILES, HELD)
                    total = tl.dot(h[k].to(weight.dtype), weight, total, input_precision=PRECISION)
                if KEEP:
                    _store(gates, total, of_gate, inside, j, SIZE, BLOCK)
                arguments = arguments + (total,)  # noqa: RUF005
            log_i, f, z, o = arguments
            kept = _log_forget(f, SIGMOID) + m[j]
            largest = tl.maximum(kept, log_i)
            i, f = tl.exp(log_i - largest), tl.exp(kept - largest)
            cell = f * c[j] + i * _tanh(z)
            normalizer = f * n[j] + i
            output = _sigmoid(o) * cell / normalizer
            _store(hidden, output, place, inside, j, SIZE, BLOCK)
            next_h, next_c = next_h + (output,), next_c + (cell,)  # noqa: RUF005
            next_n, next_m = next_n + (normalizer,), next_m + (largest,)  # noqa: RUF005
        h, c, n, m = next_h, next_c, next_n, next_m
    _stored(h_end, h, ends, inside, SIZE, BLOCK, TILES)
    _stored(c_end, c, ends, inside, SIZE, BLOCK, TILES)
    _stored(n_end, n, ends, inside, SIZE, BLOCK, TILES)
    _stored(m_end, m, ends, inside, SIZE, BLOCK, TILES)


@triton.jit
def slstm_gradients(  # type: ignore[no-untyped-def]
    gates, R, cells, normalizers, largests, reset, dhidden, dh_end, dc_end, dn_end, dWx, dh_start, dc_start,
    dn_start, batch, time, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, HAS_RESET: tl.constexpr, SIGMOID: tl.constexpr, HELD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dWx (b, t, 4, h, d), which is the gradient of the gates' arguments, and those of the first states.

    c / n does not depend on m, so no gradient passes m.
    """
    head, rows, inside = _place(batch, HEADS, ROWS)
    held = _weights(R, head, SIZE, BLOCK, TILES, HELD)
    ends = rows * HEADS + head
    dh = _loaded(dh_end, ends, inside, SIZE, BLOCK, TILES)
    dc = _loaded(dc_end, ends, inside, SIZE, BLOCK, TILES)
    dn = _loaded(dn_end, ends, inside, SIZE, BLOCK, TILES)
    for back in range(time):
        at = rows * time + (time - 1 - back)
        place = at * HEADS + head
        changes, next_dc, next_dn = (), (), ()
        for j in tl.static_range(TILES):
            log_i = _load(gates, (at * 4 + 0) * HEADS + head, inside, j, SIZE, BLOCK)
            argument = _load(gates, (at * 4 + 1) * HEADS + head, inside, j, SIZE, BLOCK)
            z = _tanh(_load(gates, (at * 4 + 2) * HEADS + head, inside, j, SIZE, BLOCK))
            o = _sigmoid(_load(gates, (at * 4 + 3) * HEADS + head, inside, j, SIZE, BLOCK))
            c = _load(cells, place, inside, j, SIZE, BLOCK)
            n = _load(normalizers, place, inside, j, SIZE, BLOCK)
            kept = _log_forget(argument, SIGMOID) + _load(largests, place, inside, j, SIZE, BLOCK)
            largest = tl.maximum(kept, log_i)
            i, f = tl.exp(log_i - largest), tl.exp(kept - largest)
            normalizer = f * n + i
            share = (f * c + i * z) / normalizer
            # h = o * share
            d = dh[j] + _load(dhidden, place, inside, j, SIZE, BLOCK)
            of_cell = dc[j] + d * o / normalizer
            of_normalizer = dn[j] - d * o * share / normalizer
            of_f = (of_cell * c + of_normalizer * n) * f
            if SIGMOID:
                of_f *= _sigmoid(-argument)
            change = (
                (of_cell * z + of_normalizer) * i,
                of_f,
                of_cell * i * (1 - z * z),
                d * share * o * (1 - o),
            )
            for gate in tl.static_range(4):
                _store(dWx, change[gate], (at * 4 + gate) * HEADS + head, inside, j, SIZE, BLOCK)
            changes = changes + change
            next_dc, next_dn = next_dc + (of_cell * f,), next_dn + (of_normalizer * f,)  # noqa: RUF005
        dh, dc, dn = (), next_dc, next_dn
        for k in tl.static_range(TILES):
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            for j in tl.static_range(TILES):
                for gate in tl.static_range(4):
                    weight = _tile_of(R, held, head, k, j, gate, SIZE, BLOCK, TILES, HELD)
                    change = changes[j * 4 + gate].to(weight.dtype)
                    total = tl.dot(change, tl.trans(weight), total, input_precision=PRECISION)
            dh = dh + (total,)  # noqa: RUF005
        if HAS_RESET:
            cut = tl.load(reset + at, mask=inside, other=0)
            dh = _after_reset(dh, cut, 0.0, TILES)
            dc = _after_reset(dc, cut, 0.0, TILES)
            dn = _after_reset(dn, cut, 0.0, TILES)
    _stored(dh_start, dh, ends, inside, SIZE, BLOCK, TILES)
    _stored(dc_start, dc, ends, inside, SIZE, BLOCK, TILES)
    _stored(dn_start, dn, ends, inside, SIZE, BLOCK, TILES)
