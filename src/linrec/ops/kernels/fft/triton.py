"""Triton kernels around FFTs, and for sums that generate the filters of long convolutions.

Imported at the first use, because importing Triton is slow. Weights and spectra are complex: pairs in memory.

Around the FFTs of a convolution: channels are contiguous in sequences (b, t, d), but FFTs need contiguous
time, so the kernels transpose tiles on the way. Spectra are (b, d, f).

Products with a Cauchy-like matrix, which is formed only in registers. With
R_nf = 1 / (rest_f - lambda_n around_f), for each model d separately:

    S_kf = sum_n w_kn R_nf
    dw_kn = sum_f dS_kf conj(R_nf)        T_nf = sum_k dS_kf conj(w_kn)
    dlambda_n = sum_f T_nf conj(around_f R_nf^2)        daround_f = sum_n T_nf conj(lambda_n R_nf^2)

Sums over powers, by a Vandermonde matrix. Taps l = c i + j for K rows of weights, for each model d
separately, are matrix products with G = w far, which is formed tile by tile:

    S_kl = Re sum_n G_kin near_nj
    dG_kin = sum_j dS_kl conj(near_nj)        dnear_nj = sum_ki dS_kl conj(G_kin)

Tables of powers and their gradients store real and imaginary parts separately, so that adjacent elements of a
tile are adjacent in memory.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(time, channels, T: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of a program, its steps (T, 1) and its channels (1, C)."""
    blocks = tl.cdiv(channels, C)
    block = tl.program_id(0) % blocks
    steps = tl.program_id(0) // blocks % tl.cdiv(time, T) * T + tl.arange(0, T)
    row = tl.program_id(0) // blocks // tl.cdiv(time, T)
    return row.to(tl.int64), steps[:, None].to(tl.int64), (block * C + tl.arange(0, C))[None].to(tl.int64)


@triton.jit
def pad(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, time, channels, size, row_stride, step_stride, channel_stride,
    SCALED: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Transpose x (b, t, d) of any strides to (b, d, size), zero-padded; SCALED divides by size."""
    row, step, channel = _tile(size, channels, T, C)
    place = row * row_stride + step * step_stride + channel * channel_stride
    x = tl.load(x_ptr + place, mask=(step < time) & (channel < channels), other=0.0)
    x = x.to(out_ptr.dtype.element_ty)
    if SCALED:
        x = x / size
    tl.store(out_ptr + (row * channels + channel) * size + step, x, mask=(step < size) & (channel < channels))


@triton.jit
def cut(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, time, channels, size, row_stride, step_stride, channel_stride,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Transpose the first steps of x (b, d, size) to out (b, t, d) of any strides."""
    row, step, channel = _tile(time, channels, T, C)
    mask = (step < time) & (channel < channels)
    x = tl.load(x_ptr + (row * channels + channel) * size + step, mask=mask)
    place = row * row_stride + step * step_stride + channel * channel_stride
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load(ptr, row, begin, frequencies, F: tl.constexpr):  # type: ignore[no-untyped-def]
    parts = 2 * begin + tl.arange(0, 2 * F)
    x = tl.load(ptr + 2 * row * frequencies + parts, mask=parts < 2 * frequencies, other=0.0)
    return tl.split(tl.reshape(x, [F, 2]))


@triton.jit
def _store(ptr, row, begin, frequencies, real, imaginary, F: tl.constexpr):  # type: ignore[no-untyped-def]
    parts = 2 * begin + tl.arange(0, 2 * F)
    x = tl.reshape(tl.join(real, imaginary), [2 * F])
    tl.store(ptr + 2 * row * frequencies + parts, x, mask=parts < 2 * frequencies)


@triton.jit
def multiply(x_ptr, k_ptr, channels, frequencies, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply x (b, d, f) by k (d, f), in place."""
    blocks = tl.cdiv(frequencies, F)
    row, begin = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * F
    x_r, x_i = _load(x_ptr, row, begin, frequencies, F)
    k_r, k_i = _load(k_ptr, row % channels, begin, frequencies, F)
    _store(x_ptr, row, begin, frequencies, x_r * k_r - x_i * k_i, x_r * k_i + x_i * k_r, F)


@triton.jit
def gradients(  # type: ignore[no-untyped-def]
    dy_ptr, u_ptr, k_ptr, dk_ptr, batch, channels, frequencies, size,
    NEEDS_U: tl.constexpr, NEEDS_K: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Multiply dy (b, d, f) by k^* (d, f), in place, and set dk to the sum over b of u^* dy / size."""
    blocks = tl.cdiv(frequencies, F)
    channel, begin = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * F
    if NEEDS_U:
        k_r, k_i = _load(k_ptr, channel, begin, frequencies, F)
    if NEEDS_K:
        dk_r, dk_i = tl.zeros([F], dk_ptr.dtype.element_ty), tl.zeros([F], dk_ptr.dtype.element_ty)
    for b in range(batch):
        row = b * channels + channel
        dy_r, dy_i = _load(dy_ptr, row, begin, frequencies, F)
        if NEEDS_K:
            u_r, u_i = _load(u_ptr, row, begin, frequencies, F)
            dk_r += u_r * dy_r + u_i * dy_i
            dk_i += u_r * dy_i - u_i * dy_r
        if NEEDS_U:
            _store(dy_ptr, row, begin, frequencies, dy_r * k_r + dy_i * k_i, dy_i * k_r - dy_r * k_i, F)
    if NEEDS_K:
        _store(dk_ptr, channel, begin, frequencies, dk_r / size, dk_i / size, F)


@triton.jit
def pair(ptr, index, mask):  # type: ignore[no-untyped-def]
    """Load a complex number at an index; zero where masked."""
    return tl.load(ptr + 2 * index, mask=mask, other=0.0), tl.load(ptr + 2 * index + 1, mask=mask, other=0.0)


@triton.jit
def put(ptr, index, mask, real, imaginary):  # type: ignore[no-untyped-def]
    """Store a complex number at an index."""
    tl.store(ptr + 2 * index, real, mask=mask)
    tl.store(ptr + 2 * index + 1, imaginary, mask=mask)


@triton.jit
def times(a_r, a_i, b_r, b_i):  # type: ignore[no-untyped-def]
    """Return the product of complex numbers."""
    return a_r * b_r - a_i * b_i, a_r * b_i + a_i * b_r


@triton.jit
def _reciprocal(rest_r, rest_i, lambda_r, lambda_i, around_r, around_i):  # type: ignore[no-untyped-def]
    product_r, product_i = times(lambda_r, lambda_i, around_r, around_i)
    r, i = rest_r - product_r, rest_i - product_i
    size = r * r + i * i
    # columns past the end have a zero denominator
    scale = tl.where(size > 0, 1 / tl.where(size > 0, size, 1.0), 0.0)
    return r * scale, -i * scale


@triton.jit
def cauchy(  # type: ignore[no-untyped-def]
    w_ptr, lambda_ptr, around_ptr, rest_ptr, s_ptr, n, f, K: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr
):
    """Fill S for F frequencies of a model; ROWS is a power of two >= K."""
    d = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.program_id(1) * F + tl.arange(0, F)
    inside = columns < f
    around_r, around_i = pair(around_ptr, d * f + columns, inside)
    rest_r, rest_i = pair(rest_ptr, columns, inside)
    s_r, s_i = tl.zeros([ROWS, F], s_ptr.dtype.element_ty), tl.zeros([ROWS, F], s_ptr.dtype.element_ty)
    for j in range(n):
        lambda_r, lambda_i = pair(lambda_ptr, d * n + j, True)
        r, i = _reciprocal(rest_r, rest_i, lambda_r, lambda_i, around_r, around_i)
        w_r, w_i = pair(w_ptr, (d * K + rows) * n + j, rows < K)
        more_r, more_i = times(w_r[:, None], w_i[:, None], r[None], i[None])
        s_r, s_i = s_r + more_r, s_i + more_i
    mask = (rows < K)[:, None] & inside[None]
    put(s_ptr, (d * K + rows)[:, None] * f + columns[None], mask, s_r, s_i)


@triton.jit
def cauchy_entries(  # type: ignore[no-untyped-def]
    w_ptr, lambda_ptr, around_ptr, rest_ptr, ds_ptr, dw_ptr, dlambda_ptr, n, f,
    K: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Fill the gradients of w and lambda for N entries of a model, looping over blocks of F frequencies."""
    d = tl.program_id(0).to(tl.int64)
    rows, entries = tl.arange(0, ROWS), tl.program_id(1) * N + tl.arange(0, N)
    lambda_r, lambda_i = pair(lambda_ptr, d * n + entries, entries < n)
    mask = (rows < K)[:, None] & (entries < n)[None]
    of_w = (d * K + rows)[:, None] * n + entries[None]
    w_r, w_i = pair(w_ptr, of_w, mask)
    dw_r, dw_i = tl.zeros([ROWS, N], dw_ptr.dtype.element_ty), tl.zeros([ROWS, N], dw_ptr.dtype.element_ty)
    dlambda_r, dlambda_i = tl.zeros([N], dw_ptr.dtype.element_ty), tl.zeros([N], dw_ptr.dtype.element_ty)
    for begin in range(0, f, F):
        columns = begin + tl.arange(0, F)
        around_r, around_i = pair(around_ptr, d * f + columns, columns < f)
        rest_r, rest_i = pair(rest_ptr, columns, columns < f)
        of_s = (d * K + rows)[:, None] * f + columns[None]
        ds_r, ds_i = pair(ds_ptr, of_s, (rows < K)[:, None] & (columns < f)[None])
        r, i = _reciprocal(
            rest_r[None], rest_i[None], lambda_r[:, None], lambda_i[:, None], around_r[None], around_i[None]
        )
        more_r, more_i = times(ds_r[:, None, :], ds_i[:, None, :], r[None], -i[None])
        dw_r, dw_i = dw_r + tl.sum(more_r, 2), dw_i + tl.sum(more_i, 2)
        t_r, t_i = times(ds_r[:, None, :], ds_i[:, None, :], w_r[:, :, None], -w_i[:, :, None])
        t_r, t_i = tl.sum(t_r, 0), tl.sum(t_i, 0)
        square_r, square_i = times(r, i, r, i)
        q_r, q_i = times(square_r, square_i, around_r[None], around_i[None])
        more_r, more_i = times(t_r, t_i, q_r, -q_i)
        dlambda_r, dlambda_i = dlambda_r + tl.sum(more_r, 1), dlambda_i + tl.sum(more_i, 1)
    put(dw_ptr, of_w, mask, dw_r, dw_i)
    put(dlambda_ptr, d * n + entries, entries < n, dlambda_r, dlambda_i)


@triton.jit
def cauchy_frequencies(  # type: ignore[no-untyped-def]
    w_ptr, lambda_ptr, around_ptr, rest_ptr, ds_ptr, daround_ptr, n, f,
    K: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Fill the gradient of `around` for F frequencies of a model."""
    d = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.program_id(1) * F + tl.arange(0, F)
    inside = columns < f
    around_r, around_i = pair(around_ptr, d * f + columns, inside)
    rest_r, rest_i = pair(rest_ptr, columns, inside)
    of_s = (d * K + rows)[:, None] * f + columns[None]
    ds_r, ds_i = pair(ds_ptr, of_s, (rows < K)[:, None] & inside[None])
    daround_r, daround_i = (
        tl.zeros([F], daround_ptr.dtype.element_ty),
        tl.zeros([F], daround_ptr.dtype.element_ty),
    )
    for j in range(n):
        lambda_r, lambda_i = pair(lambda_ptr, d * n + j, True)
        r, i = _reciprocal(rest_r, rest_i, lambda_r, lambda_i, around_r, around_i)
        w_r, w_i = pair(w_ptr, (d * K + rows) * n + j, rows < K)
        t_r, t_i = times(ds_r, ds_i, w_r[:, None], -w_i[:, None])
        square_r, square_i = times(r, i, r, i)
        q_r, q_i = times(square_r, square_i, lambda_r, lambda_i)
        more_r, more_i = times(tl.sum(t_r, 0), tl.sum(t_i, 0), q_r, -q_i)
        daround_r, daround_i = daround_r + more_r, daround_i + more_i
    put(daround_ptr, d * f + columns, inside, daround_r, daround_i)


@triton.jit
def _table(ptr, d, models, n, width, entries, places):  # type: ignore[no-untyped-def]
    """Return pointers into a table (2, d, n, width), the offset of its second half, and a mask."""
    index = ptr + (d * n + entries[:, None]) * width + places[None]
    return index, models * n * width, (entries < n)[:, None] & (places < width)[None]


@triton.jit
def _powers(ptr, d, models, n, width, entries, places):  # type: ignore[no-untyped-def]
    """Load powers (entries, places) from a table."""
    index, on, mask = _table(ptr, d, models, n, width, entries, places)
    return tl.load(index, mask=mask, other=0.0), tl.load(index + on, mask=mask, other=0.0)


@triton.jit
def _weighted(w_ptr, far_ptr, of_k, d, models, n, m, entries, rows):  # type: ignore[no-untyped-def]
    """Return G, transposed: (entries, rows)."""
    w_r, w_i = pair(w_ptr, (of_k * models + d) * n + entries, entries < n)
    far_r, far_i = _powers(far_ptr, d, models, n, m, entries, rows)
    return times(w_r[:, None], w_i[:, None], far_r, far_i)


@triton.jit
def _taps(of_k, d, models, c, m, length, rows, columns):  # type: ignore[no-untyped-def]
    """Return pointers to S for rows i and columns j, and a mask."""
    tap = rows[:, None] * c + columns[None]
    mask = (rows < m)[:, None] & (columns < c)[None] & (tap < length)
    return (of_k * models + d) * length + tap, mask


@triton.jit
def vandermonde(  # type: ignore[no-untyped-def]
    w_ptr, near_ptr, far_ptr, s_ptr, models, n, c, m, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill S for a row of weights, ROWS of i and COLUMNS of j, and a model."""
    blocks = tl.cdiv(m, ROWS)
    d, of_k = tl.program_id(0).to(tl.int64), tl.program_id(1) // blocks
    rows = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = s_ptr.dtype.element_ty
    s = tl.zeros([ROWS, COLUMNS], dtype)
    for first in range(0, n, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        left_r, left_i = _weighted(w_ptr, far_ptr, of_k, d, models, n, m, entries, rows)
        near_r, near_i = _powers(near_ptr, d, models, n, c, entries, columns)
        s = tl.dot(tl.trans(left_r), near_r, s, input_precision=PRECISION, out_dtype=dtype)
        s = tl.dot(tl.trans(-left_i), near_i, s, input_precision=PRECISION, out_dtype=dtype)
    index, mask = _taps(of_k, d, models, c, m, length, rows, columns)
    tl.store(s_ptr + index, s, mask=mask)


@triton.jit
def vandermonde_rows(  # type: ignore[no-untyped-def]
    near_ptr, ds_ptr, dg_ptr, models, n, k, c, m, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dG (2, k, d, n, m) for a row of weights, ROWS of i, ENTRIES of n, and a model."""
    blocks = tl.cdiv(m, ROWS)
    d, of_k = tl.program_id(0).to(tl.int64), tl.program_id(1) // blocks
    rows = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    entries = tl.program_id(2) * ENTRIES + tl.arange(0, ENTRIES)
    dtype = ds_ptr.dtype.element_ty
    dg_r, dg_i = tl.zeros([ENTRIES, ROWS], dtype), tl.zeros([ENTRIES, ROWS], dtype)
    for first in range(0, c, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        index, mask = _taps(of_k, d, models, c, m, length, rows, columns)
        ds = tl.trans(tl.load(ds_ptr + index, mask=mask, other=0.0))
        near_r, near_i = _powers(near_ptr, d, models, n, c, entries, columns)
        dg_r = tl.dot(near_r, ds, dg_r, input_precision=PRECISION, out_dtype=dtype)
        dg_i = tl.dot(-near_i, ds, dg_i, input_precision=PRECISION, out_dtype=dtype)
    index, on, mask = _table(dg_ptr, of_k * models + d, k * models, n, m, entries, rows)
    tl.store(index, dg_r, mask=mask)
    tl.store(index + on, dg_i, mask=mask)


@triton.jit
def vandermonde_columns(  # type: ignore[no-untyped-def]
    w_ptr, far_ptr, ds_ptr, dnear_ptr, models, n, k, c, m, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dnear (2, d, n, c) for ENTRIES of n, COLUMNS of j, and a model."""
    d = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = ds_ptr.dtype.element_ty
    dnear_r, dnear_i = tl.zeros([ENTRIES, COLUMNS], dtype), tl.zeros([ENTRIES, COLUMNS], dtype)
    for of_k in range(k):
        for first in range(0, m, ROWS):
            rows = first + tl.arange(0, ROWS)
            left_r, left_i = _weighted(w_ptr, far_ptr, of_k, d, models, n, m, entries, rows)
            index, mask = _taps(of_k, d, models, c, m, length, rows, columns)
            ds = tl.load(ds_ptr + index, mask=mask, other=0.0)
            dnear_r = tl.dot(left_r, ds, dnear_r, input_precision=PRECISION, out_dtype=dtype)
            dnear_i = tl.dot(-left_i, ds, dnear_i, input_precision=PRECISION, out_dtype=dtype)
    index, on, mask = _table(dnear_ptr, d, models, n, c, entries, columns)
    tl.store(index, dnear_r, mask=mask)
    tl.store(index + on, dnear_i, mask=mask)
