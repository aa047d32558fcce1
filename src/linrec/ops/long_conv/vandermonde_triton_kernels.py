"""Triton kernels for sums over powers, whose terms are formed in registers alone.

Imported at the first use, because importing Triton is slow.

Complex numbers are pairs in memory. Taps l = c i + j of K rows of weights, for each model d apart, are

    S_kl = Re sum_n w_kn far_ni near_nj
    dG_kni = sum_j dS_kl conj(near_nj)        dnear_nj = sum_ki dS_kl conj(w_kn far_ni)

of which dG is the gradient of w_kn far_ni.
"""

import triton
import triton.language as tl

from linrec.ops.long_conv.triton_kernels import pair, put, times


@triton.jit
def _weighted(w_ptr, far_ptr, of_w, of_far, mask):  # type: ignore[no-untyped-def]
    w_r, w_i = pair(w_ptr, of_w, mask)
    far_r, far_i = pair(far_ptr, of_far, mask)
    return times(w_r, w_i, far_r, far_i)


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    w_ptr, near_ptr, far_ptr, s_ptr, models, n, k, c, m, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """S of ROWS pairs (k, i) and COLUMNS of j, of one model."""
    d = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_k, of_i = rows // m, rows % m
    s = tl.zeros([ROWS, COLUMNS], s_ptr.dtype.element_ty)
    for e in range(n):
        left_r, left_i = _weighted(
            w_ptr, far_ptr, (of_k * models + d) * n + e, (d * n + e) * m + of_i, rows < k * m
        )
        near_r, near_i = pair(near_ptr, (d * n + e) * c + columns, columns < c)
        s += left_r[:, None] * near_r[None] - left_i[:, None] * near_i[None]
    tap = of_i[:, None] * c + columns[None]
    mask = (rows < k * m)[:, None] & (columns < c)[None] & (tap < length)
    tl.store(s_ptr + (of_k * models + d)[:, None] * length + tap, s, mask=mask)


@triton.jit
def backward_rows(  # type: ignore[no-untyped-def]
    near_ptr, ds_ptr, dg_ptr, models, n, k, c, m, length, ROWS: tl.constexpr, ENTRIES: tl.constexpr
):
    """dG of ROWS pairs (k, i) and ENTRIES of n, of one model."""
    d = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    entries = tl.program_id(2) * ENTRIES + tl.arange(0, ENTRIES)
    of_k, of_i = rows // m, rows % m
    dg_r = tl.zeros([ROWS, ENTRIES], ds_ptr.dtype.element_ty)
    dg_i = tl.zeros([ROWS, ENTRIES], ds_ptr.dtype.element_ty)
    for j in range(c):
        tap = of_i * c + j
        mask = (rows < k * m) & (tap < length)
        ds = tl.load(ds_ptr + (of_k * models + d) * length + tap, mask=mask, other=0.0)
        near_r, near_i = pair(near_ptr, (d * n + entries) * c + j, entries < n)
        dg_r += ds[:, None] * near_r[None]
        dg_i -= ds[:, None] * near_i[None]
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
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dnear of ENTRIES of n and COLUMNS of j, of one model."""
    d = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dnear_r = tl.zeros([ENTRIES, COLUMNS], ds_ptr.dtype.element_ty)
    dnear_i = tl.zeros([ENTRIES, COLUMNS], ds_ptr.dtype.element_ty)
    for row in range(k * m):
        of_k, i = row // m, row % m
        left_r, left_i = _weighted(
            w_ptr, far_ptr, (of_k * models + d) * n + entries, (d * n + entries) * m + i, entries < n
        )
        tap = i * c + columns
        mask = (columns < c) & (tap < length)
        ds = tl.load(ds_ptr + (of_k * models + d) * length + tap, mask=mask, other=0.0)
        dnear_r += left_r[:, None] * ds[None]
        dnear_i -= left_i[:, None] * ds[None]
    mask = (entries < n)[:, None] & (columns < c)[None]
    put(dnear_ptr, (d * n + entries)[:, None] * c + columns[None], mask, dnear_r, dnear_i)
