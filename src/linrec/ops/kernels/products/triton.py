"""GPU kernel of products with few rows; imported at the first use, because importing Triton is slow."""

# tuples of sums keep their types
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def row_products(  # type: ignore[no-untyped-def]
    x, weight, bias, y, rows, N, K: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Fill y = x weight^T + bias. A program sums BLOCK_N columns of ROWS rows over all of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * ROWS
    at = weight + n.to(tl.int64)[:, None] * K
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BLOCK_N,), tl.float32),)  # noqa: RUF005
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weights = tl.load(at + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        added = ()
        for row in tl.static_range(ROWS):
            # rows beyond the last are not stored
            place = tl.minimum(first + row, rows - 1).to(tl.int64) * K
            given = tl.load(x + place + k, mask=k < K, other=0.0)
            product = weights.to(tl.float32) * given.to(tl.float32)[None, :]
            added = added + (sums[row] + tl.sum(product, axis=1),)  # noqa: RUF005
        sums = added
    constant = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        constant = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    for row in tl.static_range(ROWS):
        if first + row < rows:
            total = (sums[row] + constant).to(y.dtype.element_ty)
            tl.store(y + (first + row).to(tl.int64) * N + n, total, mask=n < N)
