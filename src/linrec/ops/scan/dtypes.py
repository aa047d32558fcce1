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

# decays that are not rounded as the inputs are
_WIDER = ((torch.float32, torch.bfloat16), (torch.float32, torch.float16))

SUPPORTED = tuple(_ACCUMULATION)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the recurrence is carried: at least float32 (complex64).

    Example:
        >>> accumulation(torch.bfloat16)
        torch.float32
    """
    return _ACCUMULATION[dtype]


def mixable(a: torch.dtype, x: torch.dtype) -> bool:
    """Return whether the dtypes fit: of one precision, or `a` in float32 beside an x in half precision.

    Example:
        >>> mixable(torch.float32, torch.complex64), mixable(torch.float32, torch.float64)
        (True, False)
        >>> mixable(torch.float32, torch.bfloat16), mixable(torch.bfloat16, torch.float32)
        (True, False)
    """
    return a == x or (a, x) in _MIXED or (x, a) in _MIXED or (a, x) in _WIDER


def promoted(a: torch.dtype, x: torch.dtype) -> torch.dtype:
    """Return the dtype of y: of x, but complex where `a` is.

    Example:
        >>> promoted(torch.float32, torch.complex64), promoted(torch.float32, torch.bfloat16)
        (torch.complex64, torch.bfloat16)
    """
    return x if (a, x) in _WIDER else torch.promote_types(a, x)
