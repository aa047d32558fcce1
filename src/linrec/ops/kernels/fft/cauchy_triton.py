"""Triton kernels for products with a matrix of Cauchy's kind, which is formed in registers alone.

Imported at the first use, because importing Triton is slow.

Complex numbers are pairs in memory. With R_nf = 1 / (rest_f - lambda_n around_f), for each model d apart:

    S_kf = sum_n w_kn R_nf
    dw_kn = sum_f dS_kf conj(R_nf)        T_nf = sum_k dS_kf conj(w_kn)
    dlambda_n = sum_f T_nf conj(around_f R_nf^2)        daround_f = sum_n T_nf conj(lambda_n R_nf^2)
"""

import triton
import triton.language as tl


@triton.jit
def pair(ptr, index, mask):  # type: ignore[no-untyped-def]
    """A complex number at an index, or zero."""
    return tl.load(ptr + 2 * index, mask=mask, other=0.0), tl.load(ptr + 2 * index + 1, mask=mask, other=0.0)


@triton.jit
def put(ptr, index, mask, real, imaginary):  # type: ignore[no-untyped-def]
    """Store a complex number at an index."""
    tl.store(ptr + 2 * index, real, mask=mask)
    tl.store(ptr + 2 * index + 1, imaginary, mask=mask)


@triton.jit
def times(a_r, a_i, b_r, b_i):  # type: ignore[no-untyped-def]
    """The product of complex numbers."""
    return a_r * b_r - a_i * b_i, a_r * b_i + a_i * b_r


@triton.jit
def _reciprocal(rest_r, rest_i, lambda_r, lambda_i, around_r, around_i):  # type: ignore[no-untyped-def]
    product_r, product_i = times(lambda_r, lambda_i, around_r, around_i)
    r, i = rest_r - product_r, rest_i - product_i
    size = r * r + i * i
    # columns past the end have no denominator
    scale = tl.where(size > 0, 1 / tl.where(size > 0, size, 1.0), 0.0)
    return r * scale, -i * scale


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    w_ptr, lambda_ptr, around_ptr, rest_ptr, s_ptr, n, f, K: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr
):
    """S of F frequencies of a model; ROWS is a power of two of at least K."""
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
def backward_entries(  # type: ignore[no-untyped-def]
    w_ptr,
    lambda_ptr,
    around_ptr,
    rest_ptr,
    ds_ptr,
    dw_ptr,
    dlambda_ptr,
    n,
    f,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
):
    """Gradients of w and lambda, of N entries of a model, F frequencies at a time."""
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
def backward_frequencies(  # type: ignore[no-untyped-def]
    w_ptr,
    lambda_ptr,
    around_ptr,
    rest_ptr,
    ds_ptr,
    daround_ptr,
    n,
    f,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    F: tl.constexpr,
):
    """The gradient of around, of F frequencies of a model."""
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
