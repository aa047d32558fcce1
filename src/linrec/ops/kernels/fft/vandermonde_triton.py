"""Triton kernels for sums over powers, whose terms are formed in registers alone.

Imported at the first use, because importing Triton is slow.

Taps l = c i + j of K rows of weights, for each model d apart, are products of matrices of G = w far, which is
formed a tile at a time:

    S_kl = Re sum_n G_kin near_nj
    dG_kin = sum_j dS_kl conj(near_nj)        dnear_nj = sum_ki dS_kl conj(G_kin)

Weights are pairs in memory. Tables and their gradients have real and imaginary parts apart, for neighbours in
a tile to be neighbours in memory.
"""

import triton
import triton.language as tl

from linrec.ops.kernels.fft.cauchy_triton import pair, times


@triton.jit
def _table(ptr, d, models, n, width, entries, places):  # type: ignore[no-untyped-def]
    """Where the real parts (entries, places) of a table (2, d, n, width) are, how far on the others."""
    index = ptr + (d * n + entries[:, None]) * width + places[None]
    return index, models * n * width, (entries < n)[:, None] & (places < width)[None]


@triton.jit
def _powers(ptr, d, models, n, width, entries, places):  # type: ignore[no-untyped-def]
    """The powers (entries, places) of a table."""
    index, on, mask = _table(ptr, d, models, n, width, entries, places)
    return tl.load(index, mask=mask, other=0.0), tl.load(index + on, mask=mask, other=0.0)


@triton.jit
def _weighted(w_ptr, far_ptr, of_k, d, models, n, m, entries, rows):  # type: ignore[no-untyped-def]
    """G, transposed: (entries, rows)."""
    w_r, w_i = pair(w_ptr, (of_k * models + d) * n + entries, entries < n)
    far_r, far_i = _powers(far_ptr, d, models, n, m, entries, rows)
    return times(w_r[:, None], w_i[:, None], far_r, far_i)


@triton.jit
def _taps(of_k, d, models, c, m, length, rows, columns):  # type: ignore[no-untyped-def]
    """Where S of rows i and columns j is, and which of it there is."""
    tap = rows[:, None] * c + columns[None]
    mask = (rows < m)[:, None] & (columns < c)[None] & (tap < length)
    return (of_k * models + d) * length + tap, mask


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    w_ptr,
    near_ptr,
    far_ptr,
    s_ptr,
    models,
    n,
    c,
    m,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S of a row of weights, of ROWS i and COLUMNS j, of one model."""
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
def backward_rows(  # type: ignore[no-untyped-def]
    near_ptr,
    ds_ptr,
    dg_ptr,
    models,
    n,
    k,
    c,
    m,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dG (2, k, d, n, m) of a row of weights, of ROWS i and ENTRIES of n, of one model."""
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
def backward_columns(  # type: ignore[no-untyped-def]
    w_ptr,
    far_ptr,
    ds_ptr,
    dnear_ptr,
    models,
    n,
    k,
    c,
    m,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dnear (2, d, n, c) of ENTRIES of n and COLUMNS of j, of one model."""
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
