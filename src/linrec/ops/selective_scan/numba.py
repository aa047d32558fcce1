"""The selective scan on the CPU by Numba: states stay in the caches of threads."""

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops import vmap
from linrec.ops.kernels import lanes
from linrec.ops.operators import operator
from linrec.ops.precision import accumulation
from linrec.ops.selective_scan.torch import Gradients

CHUNK = 32
"""Steps from one kept state to the next: what the adjoint makes for them stays in the second cache."""

# entries of a state that take as long as one element of the operators that `lanes` was measured with
_ENTRIES = 4
# entries of the states of a lane: they stay in the first cache
_OF_A_LANE = 2048


@operator("selective_scan_numba")
def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    cut: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, c), the last state (b, n, c), and those that chunks start from (b, chunks, n, c).

    Without `keep` there are no chunks.
    """
    y, starts = lanes.empty(x.shape, state.dtype), _starts(x, state, keep=keep)
    last = state.clone(memory_format=torch.contiguous_format)
    with lanes.threads_for(x.numel() * A.shape[1] // _ENTRIES) as threads:
        width = width_of(x, A.shape[1], threads)
        arguments = (*_given(x, dt, A, B, C, D, cut), last.numpy(), starts.numpy(), y.numpy(), CHUNK, width)
        lanes.run(_kernels(), "forward", arguments, lanes.count(x, width), threads)
    return y.to(x.dtype), last, starts


@torch.library.register_fake(forward)
def _(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    cut: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape), _starts(x, state, keep=keep)


@operator("selective_scan_numba_backward")
def backward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`, in the accumulation dtype."""
    dx, ddt = (lanes.empty(x.shape, state.dtype) for _ in range(2))
    dA, dD = torch.zeros_like(starts[:, 0]), state.new_zeros(x.shape[0], x.shape[2])
    dstate = dlast.clone(memory_format=torch.contiguous_format)
    with lanes.threads_for(x.numel() * A.shape[1] // _ENTRIES) as threads:
        width = width_of(x, A.shape[1], threads)
        shape = math.ceil(x.shape[2] / width), *B.shape
        dB, dC = (lanes.empty(shape, state.dtype) for _ in range(2))
        gradients = dx, ddt, dA, dB, dC, dD, dstate
        given = *_given(x, dt, A, B, C, D, cut), lanes.array(starts), _array(dy)
        arguments = (*given, *(g.numpy() for g in gradients), CHUNK, width)
        lanes.run(_kernels(), "backward", arguments, lanes.count(x, width), threads)
    dA, dB, dC, dD = dA.sum_to_size(A.shape), dB.sum(0), dC.sum(0), dD.sum_to_size(D.shape)
    return dx, ddt, dA, dB, dC, dD, dstate


@torch.library.register_fake(backward)
def _(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    dx, ddt, dA, dB, dC, dD, dstate = (state.new_empty(given.shape) for given in (x, dt, A, B, C, D, state))
    return dx, ddt, dA, dB, dC, dD, dstate


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.selective import numba as numba_kernels

    return numba_kernels


def width_of(x: Tensor, n: int, threads: int) -> int:
    """Return how many channels a lane has: whole cache lines, as many as keep its states in the first one."""
    batch, _, channels = x.shape
    blocks = threads // math.gcd(batch, threads)
    width = min(math.ceil(channels / blocks / 16), max(_OF_A_LANE // n // 16, 1))
    return 16 * max(width, 1)


def _starts(x: Tensor, state: Tensor, *, keep: bool) -> Tensor:
    batch, n, channels = state.shape
    return state.new_empty(batch, math.ceil(x.shape[1] / CHUNK) if keep else 0, n, channels)


def _given(*inputs: Tensor | None) -> list[Any]:
    """Return what forward and backward read, in one precision; an empty array where nothing is cut."""
    *tensors, cut = inputs
    return [*(_array(tensor) for tensor in tensors if tensor is not None), lanes.cut_array(cut)]


def _array(tensor: Tensor) -> Any:
    return lanes.array(tensor.to(accumulation(tensor.dtype)))


vmap.register(forward, backward)
