"""The table of tolerances, and the comparison that uses it."""

import math

import torch

from linrec.trees import Tree, leaves

__all__ = ["assert_agree", "tolerance"]

# float32 accumulates over a thousand steps; half precision rounds inputs and outputs once each
_TOLERANCES = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (1e-4, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 2e-2),
}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return keyword arguments of `torch.testing.assert_close` for results computed in `dtype`.

    Two computations of the same values agree within this tolerance if values are of order one. For larger
    values, `assert_agree` scales the absolute part. Complex dtypes have the tolerance of their real dtype.

    Example:
        >>> import torch
        >>> tolerance(torch.complex64)
        {'rtol': 0.0001, 'atol': 2e-05}
    """
    rtol, atol = _TOLERANCES[dtype.to_real()]
    return {"rtol": rtol, "atol": atol}


def assert_agree(
    actual: Tree, expected: Tree, what: str = "result", *, dtype: torch.dtype | None = None
) -> None:
    """Compare tensors, or trees of tensors, within the tolerance of their dtype.

    The absolute tolerance is scaled by the largest magnitude of `expected` if that is above one.

    Args:
        actual: computed tensors.
        expected: a tree of the same structure; floating dtypes may differ, as with a float64 reference.
        what: name of the comparison in the message.
        dtype: selects the tolerance; None uses the dtype of `actual`.

    Raises:
        AssertionError: the results differ in value, shape, structure or position of NaN.

    Example:
        >>> import torch
        >>> assert_agree(torch.tensor(1.00001), torch.tensor(1.0, dtype=torch.float64))
    """
    left, right = leaves(actual), leaves(expected)
    if len(left) != len(right):
        raise AssertionError(f"{what}: {len(left)} tensors, expected {len(right)}")
    for mine, other in zip(left, right, strict=True):
        rtol, atol = 0.0, 0.0
        if mine.is_floating_point() or mine.is_complex():
            rtol, atol = tolerance(mine.dtype if dtype is None else dtype).values()
            # an element near zero by cancellation still has the absolute error of large elements
            largest = float(other.detach().abs().max()) if other.numel() else 0.0
            atol *= max(1.0, largest) if math.isfinite(largest) else 1.0
            if mine.is_complex() == other.is_complex():
                other = other.to(mine.dtype)
        torch.testing.assert_close(
            mine, other, rtol=rtol, atol=atol, msg=lambda message: f"{what}: {message}"
        )
