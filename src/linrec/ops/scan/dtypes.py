"""Which dtypes the elementwise recurrence takes, and in which it accumulates."""

import torch

_ACCUMULATION = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}

_MIXED = ((torch.float32, torch.complex64), (torch.float64, torch.complex128))

SUPPORTED = tuple(_ACCUMULATION)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the recurrence is carried: at least float32 (complex64).

    Example:
        >>> accumulation(torch.bfloat16)
        torch.float32
    """
    return _ACCUMULATION[dtype]


def mixable(a: torch.dtype, x: torch.dtype) -> bool:
    """Return whether two dtypes differ at most in being real or complex.

    Example:
        >>> mixable(torch.float32, torch.complex64), mixable(torch.float32, torch.float64)
        (True, False)
    """
    return a == x or (a, x) in _MIXED or (x, a) in _MIXED


def promoted(a: torch.dtype, x: torch.dtype) -> torch.dtype:
    """Return the dtype of y.

    Example:
        >>> promoted(torch.float32, torch.complex64)
        torch.complex64
    """
    return torch.promote_types(a, x)
