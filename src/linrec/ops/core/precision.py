"""The dtypes that operators compute in."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# tables instead of the methods of dtypes, which torch.compile cannot trace
REAL = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_NO_CONTEXT = nullcontext()
_HALF = (torch.float16, torch.bfloat16)
_ACCUMULATION = REAL | {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
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
    return _ACCUMULATION[dtype]


def wide(x: Any) -> Any:
    """Return a tensor of numbers in its accumulation dtype, and anything else as it is."""
    if isinstance(x, Tensor):
        dtype = _ACCUMULATION.get(x.dtype, x.dtype)
        # even a conversion to the same dtype costs time at every call
        return x if dtype == x.dtype else x.to(dtype)
    return x


def in_double(x: Tensor) -> Tensor:
    """Return a tensor in double precision; on MPS, which does not support it, return the tensor itself."""
    return x if x.device.type == "mps" else x.to(torch.complex128 if x.is_complex() else torch.float64)


def widened(inputs: Any) -> Any:
    """Return a named tuple with every tensor of numbers in its accumulation dtype."""
    if any(isinstance(x, Tensor) and x.dtype in _HALF for x in inputs):
        return type(inputs)(*map(wide, inputs))
    return inputs


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which operations run in the dtypes of their inputs.

    Where the caller has no autocast, it is empty: a context costs time at every call, and torch.export would
    put it into the program.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast("cpu"):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NO_CONTEXT
