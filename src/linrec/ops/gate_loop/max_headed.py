"""The max-headed GateLoop (dk = dv = 1) with real q and k: gates, recurrence and output in a fused kernel.

Unlike `elementwise`, it does not write intermediate results to memory: a, k v, the states, and their
gradients. Only a state per chunk of time is saved; the adjoint recomputes the others from it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Gradients, Memory, add_up
from linrec.ops.core.precision import accumulation, wide
from linrec.ops.gate_loop.torch import GateLoop, elementwise
from linrec.ops.kernels import launch
from linrec.ops.kernels.launch import Kernels, Tiling, grouping, mask, n_tiles, real, run_tiled
from linrec.ops.matrix import Values, kernel

NUMBA = Kernels("elementwise.numba")
TRITON = Kernels("elementwise.max_headed_triton")


class MaxHeaded(NamedTuple):
    """Inputs of the kernels.

    Attributes:
        q: (b, t, h).
        k: (b, t, h).
        v: (b, t, h).
        log_decay: None, (b, t, h), or (1, 1, h) if constant over time.
        phase: same shapes as `log_decay`.
        state: (b, h), complex if there are phases.
        cut: None, or (b, t), true if the state is cleared before a step.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    phase: Tensor | None
    state: Tensor
    cut: Tensor | None


def takes(given: GateLoop) -> bool:
    """Return whether a kernel supports these inputs: real q and k, heads of one channel."""
    return given.q.shape[-1] == given.v.shape[-1] == 1 and not (given.q.is_complex() or given.k.is_complex())


def _twin(given: MaxHeaded) -> tuple[Tensor, Tensor]:
    gates = (x if x is None else wide(x)[..., None] for x in given[:5])
    flat: Any = *gates, None, given.state[..., None, None], given.cut
    y, last = elementwise(GateLoop(*flat), "scan", "torch")
    return y.squeeze(-1).to(given.v.dtype), last.flatten(1)


def _flat(run: Callable[[MaxHeaded], Values]) -> Callable[[GateLoop], tuple[Tensor, Tensor]]:
    """Return a backend of `gate_loop` from a kernel without channel axes."""

    def backend(given: GateLoop) -> tuple[Tensor, Tensor]:
        gates = (x if x is None else x.squeeze(-1) for x in given[:5])
        flat: Any = *gates, given.state.flatten(1), given.reset
        y, last, _ = run(MaxHeaded(*flat))
        return y.unsqueeze(-1), last.unflatten(-1, given.state.shape[1:])

    return backend


# CPU


def _kept_numba(given: MaxHeaded, keep: bool) -> Memory:
    batch, time, channels = given.q.shape
    chunks = math.ceil(time / chunk_size(channels))
    return Memory((batch, 2 if given.state.is_complex() else 1, chunks, channels), given.q.dtype)


def _forward_numba(out: Values, given: MaxHeaded) -> None:
    state, last = (_parts(x).contiguous().numpy() for x in (given.state, out.last))
    _walk("max_headed_forward", given, state, last, out.kept.numpy(), out.y.numpy())


def _adjoint_numba(out: Gradients, given: MaxHeaded, kept: Values, d: Values) -> None:
    starts, dstate = kept.kept, _parts(out.state)
    dstate.copy_(_parts(d.last))
    # gradients of constant gates are summed per chunk
    totals, nothing, of_chunks = (out.log_decay, out.phase), starts.new_empty(0, 0, 0), starts[:, 0]
    parts = [nothing if x is None else x if x.shape[1] > 1 else torch.zeros_like(of_chunks) for x in totals]
    gradients = (x.numpy() for x in (out.q, out.k, out.v, *parts, dstate))
    _walk("max_headed_backward", given, launch.array(starts), launch.array(d.y), *gradients)
    add_up(totals, parts)


def _walk(name: str, given: MaxHeaded, *arrays: Any) -> None:
    """Run a kernel; gates that are None become a magnitude of 1 and an absent phase."""
    q, k, v, log_decay, phase, _, cut = given
    log_decay = q.new_zeros(1, 1, q.shape[2]) if log_decay is None else log_decay
    turns = launch.nothing(3, q.dtype) if phase is None else launch.array(phase)
    inputs = *map(launch.array, (q, k, v, log_decay)), turns, launch.cut_array(cut)
    work = launch.lanes_of(q)
    work.run(NUMBA, name, *inputs, *arrays, chunk_size(q.shape[2]), work.width)


def chunk_size(channels: int) -> int:
    """Return the number of steps between saved states.

    The states that the adjoint recomputes fit into the second-level cache. A chunk of an input is long enough
    for fast sequential reads.
    """
    return max(16, 8192 // max(channels, 1))


def _parts(state: Tensor) -> Tensor:
    """Return the state as (b, h, 1 or 2): the real part, and the imaginary part of a complex state."""
    if state.is_complex():
        return torch.view_as_real(state.resolve_conj())
    return state.resolve_neg().unsqueeze(-1)


# GPU


def _kept_triton(given: MaxHeaded, keep: bool) -> Memory:
    (batch, time, heads), plan = given.q.shape, tiling(given.q.shape)
    return Memory((batch, n_tiles(time, plan) * plan.pieces, heads), given.state.dtype)


def _forward_triton(out: Values, given: MaxHeaded) -> None:
    _launch(TRITON.forward, 104, given, given.state.contiguous(), out.y, out.kept, out.last)


def _adjoint_triton(out: Gradients, given: MaxHeaded, kept: Values, d: Values) -> None:
    q, tensors = given.q, (x.contiguous() for x in (kept.kept, d.y, d.last))
    # the kernel sums gradients of constant gates within a tile, and the code below over tiles and the batch
    shape = q.shape[0], n_tiles(q.shape[1], tiling(q.shape)), q.shape[2]
    totals, dtype = (out.log_decay, out.phase), accumulation(q.dtype)
    parts = [q if x is None else x if x.shape == q.shape else q.new_empty(shape, dtype=dtype) for x in totals]
    _launch(TRITON.backward, 168, given, *tensors, out.q, out.k, out.v, *parts, out.state)
    add_up(totals, parts)


def _launch(run: Any, registers: int, given: MaxHeaded, *tensors: Tensor) -> None:
    q, _, _, log_decay, phase, state, cut = given
    run_tiled(
        run, tiling(q.shape), q.shape, state.dtype, q.device, registers,
        *(real((q if x is None else x).contiguous()) for x in given[:5]), mask(cut, q), *map(real, tensors),
        DECAY=_kind(log_decay, q), PHASE=_kind(phase, q), HAS_CUT=cut is not None,
    )  # fmt: skip


def tiling(shape: tuple[int, ...]) -> Tiling:
    """Return the division of time for q of this shape (b, t, h), tuned on an H200.

    A thread holds more numbers per step than in `ops.scan`, so it processes fewer steps. The chunks do not
    depend on the length, so that a model compiled for dynamic lengths uses the same kernels.
    """
    batch, _, heads = shape
    columns = 64 if heads > 32 else 32
    groups = grouping(batch * -(-heads // columns))
    return Tiling(4, 8, columns, columns // 32, *groups, warps=4)


def _kind(gate: Tensor | None, q: Tensor) -> int:
    # the constants NONE, STEP and CONSTANT of the kernels
    return 0 if gate is None else 1 if gate.shape == q.shape else 2


NUMBA_OP = kernel("gate_loop_numba", MaxHeaded, _twin, _kept_numba, _forward_numba, _adjoint_numba)
TRITON_OP = kernel("gate_loop_triton", MaxHeaded, _twin, _kept_triton, _forward_triton, _adjoint_triton)
recurrent_numba, scan_triton = _flat(NUMBA_OP), _flat(TRITON_OP)
