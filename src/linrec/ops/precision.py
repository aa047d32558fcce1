"""The dtypes that operators compute in."""

from typing import Any

import torch
from torch import Tensor

# a table instead of the method of dtypes, which torch.compile cannot trace
REAL = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real part.

    Example:
        >>> real_dtype(torch.complex64)
        torch.float32
    """
    return REAL[dtype]


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are kept in: float32 (complex64), or float64 (complex128) for double inputs.

    Example:
        >>> accumulation(torch.bfloat16), accumulation(torch.complex128)
        (torch.float32, torch.complex128)
    """
    return torch.promote_types(dtype, torch.float32)


def widened(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors in their accumulation dtypes; None stays None."""
    return [x if x is None else x.to(accumulation(x.dtype)) for x in tensors]
