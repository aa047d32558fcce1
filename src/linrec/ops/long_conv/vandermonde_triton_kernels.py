"""Triton kernels for sums over powers, whose terms are formed in registers alone.

Imported at the first use, because importing Triton is slow.

Complex numbers are pairs in memory. Taps l = c i + j of K rows of weights, for each model d apart, are
products of matrices of G = w far, which is formed a tile at a time:

    S_kl = Re sum_n G_kin near_nj
    dG_kin = sum_j dS_kl conj(near_nj)        dnear_nj = sum_ki dS_kl conj(G_kin)
"""

import triton
import triton.language as tl

from linrec.ops.long_conv.triton_kernels import pair, put, times


@triton.jit
def _weighted(w_ptr, far_ptr, d, models, n, k, m, rows, entries):  # type: ignore[no-untyped-def]
    """G of rows (k, i) and of entries, and zeros outside."""
    of_k, of_i = rows // m, rows % m
    mask = (rows < k * m)[:, None] & (entries < n)[None]
    w_r, w_i = pair(w_ptr, (of_k * models + d)[:, None] * n + entries[None], mask)
    far_r, far_i = pair(far_ptr, (d * n + entries)[None] * m + of_i[:, None], mask)
    return times(w_r, w_i, far_r, far_i)


@triton.jit
def _taps(d, models, k, c, m, length, rows, columns):  # type: ignore[no-untyped-def]
    """Where S of rows (k, i) and of columns j is, and which of it there is."""
    of_k, of_i = rows // m, rows % m
    tap = of_i[:, None] * c + columns[None]
    mask = (rows < k * m)[:, None] & (columns < c)[None] & (tap < length)
    return (of_k * models + d)[:, None] * length + tap, mask


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    w_ptr,
    near_ptr,
    far_ptr,
    s_ptr,
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
    """S of ROWS pairs (k, i) and COLUMNS of j, of one model."""
    d = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = s_ptr.dtype.element_ty
    s = tl.zeros([ROWS, COLUMNS], dtype)
    for first in range(0, n, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        left_r, left_i = _weighted(w_ptr, far_ptr, d, models, n, k, m, rows, entries)
        mask = (entries < n)[:, None] & (columns < c)[None]
        near_r, near_i = pair(near_ptr, (d * n + entries)[:, None] * c + columns[None], mask)
        s = tl.dot(left_r, near_r, s, input_precision=PRECISION, out_dtype=dtype)
        s = tl.dot(-left_i, near_i, s, input_precision=PRECISION, out_dtype=dtype)
    index, mask = _taps(d, models, k, c, m, length, rows, columns)
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
    """dG of ROWS pairs (k, i) and ENTRIES of n, of one model."""
    d = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    entries = tl.program_id(2) * ENTRIES + tl.arange(0, ENTRIES)
    dtype = ds_ptr.dtype.element_ty
    dg_r, dg_i = tl.zeros([ROWS, ENTRIES], dtype), tl.zeros([ROWS, ENTRIES], dtype)
    for first in range(0, c, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        index, mask = _taps(d, models, k, c, m, length, rows, columns)
        ds = tl.load(ds_ptr + index, mask=mask, other=0.0)
        mask = (columns < c)[:, None] & (entries < n)[None]
        near_r, near_i = pair(near_ptr, (d * n + entries)[None] * c + columns[:, None], mask)
        dg_r = tl.dot(ds, near_r, dg_r, input_precision=PRECISION, out_dtype=dtype)
        dg_i = tl.dot(ds, -near_i, dg_i, input_precision=PRECISION, out_dtype=dtype)
    of_k, of_i = rows // m, rows % m
    index = ((of_k * models + d)[:, None] * n + entries[None]) * m + of_i[:, None]
    put(dg_ptr, index, (rows < k * m)[:, None] & (entries < n)[None], dg_r, dg_i)


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
    """dnear of ENTRIES of n and COLUMNS of j, of one model."""
    d = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = ds_ptr.dtype.element_ty
    dnear_r, dnear_i = tl.zeros([ENTRIES, COLUMNS], dtype), tl.zeros([ENTRIES, COLUMNS], dtype)
    for first in range(0, k * m, ROWS):
        rows = first + tl.arange(0, ROWS)
        left_r, left_i = _weighted(w_ptr, far_ptr, d, models, n, k, m, rows, entries)
        index, mask = _taps(d, models, k, c, m, length, rows, columns)
        ds = tl.load(ds_ptr + index, mask=mask, other=0.0)
        dnear_r = tl.dot(tl.trans(left_r), ds, dnear_r, input_precision=PRECISION, out_dtype=dtype)
        dnear_i = tl.dot(tl.trans(-left_i), ds, dnear_i, input_precision=PRECISION, out_dtype=dtype)
    mask = (entries < n)[:, None] & (columns < c)[None]
    put(dnear_ptr, (d * n + entries)[:, None] * c + columns[None], mask, dnear_r, dnear_i)
