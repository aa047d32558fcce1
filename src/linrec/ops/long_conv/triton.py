"""Products with a matrix of Cauchy's kind on GPUs by Triton, as operators that torch.compile leaves whole."""

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops.operators import operator

# frequencies and entries of the state that a program has at once
FREQUENCIES = 64
ENTRIES = 16


@operator("cauchy_triton")
def forward(weights: Tensor, Lambda: Tensor, around: Tensor, rest: Tensor) -> Tensor:
    """Return S (d, k, f) of weights (d, k, n), Lambda (d, n), around (d, f) and rest (f,), all complex."""
    sums = _like(around, weights.shape[:2])
    d, k, f = sums.shape
    with on_device(around):
        _kernels().forward[d, -(-f // FREQUENCIES)](
            *map(pairs, (weights, Lambda, around, rest)),
            torch.view_as_real(sums),
            Lambda.shape[1],
            f,
            K=k,
            ROWS=_power_of_two(k),
            F=FREQUENCIES,
        )
    return sums


@torch.library.register_fake(forward)
def _(weights: Tensor, Lambda: Tensor, around: Tensor, rest: Tensor) -> Tensor:
    return _like(around, weights.shape[:2])


@operator("cauchy_triton_backward")
def backward(
    weights: Tensor, Lambda: Tensor, around: Tensor, rest: Tensor, dsums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of weights, Lambda and around."""
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (weights, Lambda, around)]
    dweights, dLambda, daround = map(torch.view_as_real, gradients)
    d, k, f = dsums.shape
    n = Lambda.shape[1]
    given = [pairs(x) for x in (weights, Lambda, around, rest, dsums)]
    shape = {"K": k, "ROWS": _power_of_two(k)}
    with on_device(around):
        _kernels().backward_entries[d, -(-n // ENTRIES)](
            *given, dweights, dLambda, n, f, **shape, N=ENTRIES, F=max(1, FREQUENCIES // 2)
        )
        _kernels().backward_frequencies[d, -(-f // FREQUENCIES)](
            *given, daround, n, f, **shape, F=FREQUENCIES
        )
    return gradients[0], gradients[1], gradients[2]


@torch.library.register_fake(backward)
def _(
    weights: Tensor, Lambda: Tensor, around: Tensor, rest: Tensor, dsums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(weights), torch.empty_like(Lambda), torch.empty_like(around)


def _like(around: Tensor, rows: torch.Size) -> Tensor:
    return torch.empty(*rows, around.shape[1], dtype=around.dtype, device=around.device)


def pairs(x: Tensor) -> Tensor:
    """Real and imaginary parts of complex numbers, as they lie in memory."""
    return torch.view_as_real(x.resolve_conj().contiguous())


def _power_of_two(k: int) -> int:
    return 1 << (k - 1).bit_length()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Within it, kernels run where `x` is."""
    # Triton launches on the current device
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.fft import cauchy_triton as triton_kernels

    return triton_kernels
