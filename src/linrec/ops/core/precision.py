"""The dtypes in which operators compute."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Inputs = TypeVar("Inputs", bound=tuple)

# tables, because torch.compile cannot trace the methods of dtypes
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
    """Return the dtype of the real part."""
    return REAL[dtype]


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulation: float32 (complex64), or float64 (complex128) for double precision."""
    return _ACCUMULATION[dtype]


def wide(x: T) -> T:
    """Return a numeric tensor in its accumulation dtype; return anything else unchanged."""
    if isinstance(x, Tensor):
        dtype = _ACCUMULATION.get(x.dtype, x.dtype)
        # `to` costs time at every call, even if the dtype is already right
        return x if dtype == x.dtype else x.to(dtype)  # type: ignore[return-value]
    return x


def in_double(x: Tensor) -> Tensor:
    """Return a tensor in double precision, or unchanged on MPS, which does not support it."""
    return x if x.device.type == "mps" else x.to(torch.complex128 if x.is_complex() else torch.float64)


def widened(inputs: Inputs) -> Inputs:
    """Return a named tuple with every numeric tensor in its accumulation dtype."""
    if any(isinstance(x, Tensor) and x.dtype in _HALF for x in inputs):
        return type(inputs)(*map(wide, inputs))
    return inputs


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context that disables autocast.

    If autocast is off, the context is empty: `torch.autocast` costs time at every call, and torch.export
    would record it in the program.
    """
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NO_CONTEXT
