"""The recurrences of matrix states on the CPU, step by step by Numba.

A thread iterates over time with a block of the state in its cache, so that a step is bound by arithmetic. If
a gradient is needed, a state per chunk of steps is saved; the adjoint recomputes the others from it.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.kernel import Gradients, Memory
from linrec.ops.kernels import launch
from linrec.ops.kernels.launch import Kernels
from linrec.ops.matrix import Matrix, Values, kernel

KERNELS = Kernels("matrix.numba")
ABOUT = "a loop over time, with states in the caches of threads"
# entries of a state that cost as much as an element of the operators with which `launch.SERIAL` was measured
_ENTRIES = 8


def _kept(given: Matrix, keep: bool) -> Memory:
    (batch, _, heads, dk), dv = given.q.shape, given.v.shape[-1]
    chunks = math.ceil(given.q.shape[1] / chunk_size(given.q, given.v)) if keep else 0
    return Memory((batch, heads, chunks, dk, dv), given.q.dtype)


def _lanes(q: Tensor, v: Tensor) -> launch.Lanes:
    batch, _, heads, values = v.shape
    threads = launch.threads_for(q.numel() * values // _ENTRIES)
    width = launch.width_of(batch * heads, values, threads, 16)
    return launch.divided(batch * heads, values, width, threads)


def _forward(out: Values, given: Matrix) -> None:
    work = _lanes(given.q, given.v)
    arrays = *_arrays(given), launch.array(given.state), out.last.numpy(), out.kept.numpy(), out.y.numpy()
    work.run(KERNELS, "forward", *arrays, chunk_size(given.q, given.v), work.width)


def _adjoint(out: Gradients, given: Matrix, kept: Values, d: Values) -> None:
    starts, work = kept.kept, _lanes(given.q, given.v)
    out.state.copy_(d.last)
    totals = out.q, out.k, out.beta, out.r, out.w
    dq, dk, dbeta, dr, dw = parts = [
        starts.new_empty(*[0] * axes) if x is None else _parts(x, work.blocks)
        for x, axes in zip(totals, (5, 5, 4, 5, 5), strict=True)
    ]
    ddecay, dphase = (_sums(gate, starts, work.blocks) for gate in (given.log_decay, given.phase))
    found = (x.numpy() for x in (dq, dk, out.v, dbeta, dr, dw, ddecay, dphase, out.state))
    arrays = *_arrays(given), launch.array(starts), launch.array(d.y), *found
    work.run(KERNELS, "backward", *arrays, chunk_size(given.q, given.v), work.width)
    if work.blocks > 1:
        for x, terms in zip(totals, parts, strict=True):
            if x is not None:
                torch.sum(terms, 0, out=x)
    for gate, sums in ((out.log_decay, ddecay), (out.phase, dphase)):
        if gate is not None:
            gate.copy_(sums.sum(0).sum_to_size(gate.shape))


def chunk_size(q: Tensor, v: Tensor) -> int:
    """Return the number of steps between saved states.

    The states that the adjoint recomputes fit into the second-level cache. For large states, the saved states
    need little more memory than queries, keys and values.
    """
    return min(64, max(16, (1 << 17) // max(q.shape[-1] * v.shape[-1], 1)))


def _arrays(given: Matrix) -> list[Any]:
    """Return the inputs of both kernels as arrays; None becomes a decay of 1 or an empty array."""
    q, k, v, beta, log_decay, _, reset, _, _, r, w = given
    absent = ((beta, 3), (r, 4), (w, 4))
    erasing = (launch.nothing(axes, q.dtype) if x is None else launch.array(x) for x, axes in absent)
    a = q.new_ones(1, 1, q.shape[2], 1) if log_decay is None else log_decay.exp()
    return [*map(launch.array, (q, k, v)), *erasing, launch.array(a), launch.cut_array(reset)]


def _parts(x: Tensor, blocks: int) -> Tensor:
    """Return memory for the sums of each block of value channels; a single block uses the gradient itself."""
    return x[None] if blocks == 1 else launch.empty((blocks, *x.shape), x.dtype)


def _sums(gate: Tensor | None, starts: Tensor, blocks: int) -> Tensor:
    """Return zeros to which the kernel adds a gate's gradient, per chunk if the gate is constant."""
    if gate is None:
        return starts.new_empty(0, 0, 0, 0, 0)
    batch, _, chunks = starts.shape[:3]
    _, time, heads, channels = gate.shape
    return starts.new_zeros(blocks, batch, time if time > 1 else chunks, heads, channels)


recurrent = partial(kernel, inputs=Matrix, kept=_kept, forward=_forward, adjoint=_adjoint)
"""Returns the kernel of an operator, from its `name` and its `twin`; see `linrec.ops.matrix.kernel`."""
