"""The max-headed GateLoop (dk = dv = 1) of real q and k: gates, recurrence and output in one kernel.

It is `elementwise` without what that writes and reads in between: a, k v and the states, and their gradients.
Of the states, one per piece of time is kept, from which the adjoint makes the others again.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Differentiable, Memory, by_autograd, kernel_op, like
from linrec.ops.core.precision import accumulation, wide
from linrec.ops.gate_loop.inputs import GateLoop, Values
from linrec.ops.gate_loop.torch import elementwise
from linrec.ops.kernels import Kernels, lanes
from linrec.ops.kernels.launch import Tiling, grouping, launch, mask, n_tiles, real

NUMBA = Kernels("elementwise.max_headed_numba")
TRITON = Kernels("elementwise.max_headed_triton")


class MaxHeaded(NamedTuple):
    """What the kernels take.

    Attributes:
        q: (b, t, h).
        k: (b, t, h).
        v: (b, t, h).
        log_decay: None, (b, t, h), or (1, 1, h) where it is constant.
        phase: as `log_decay`.
        state: (b, h), complex where there are phases.
        cut: None, or (b, t), true where the state before a step is cleared.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    phase: Tensor | None
    state: Tensor
    cut: Tensor | None


def takes(given: GateLoop) -> bool:
    """Return whether there is a kernel for these inputs: real q and k, heads of one channel."""
    return given.q.shape[-1] == given.v.shape[-1] == 1 and not (given.q.is_complex() or given.k.is_complex())


def _twin(given: MaxHeaded) -> tuple[Tensor, Tensor]:
    flat: Any = (x if x is None else wide(x)[..., None] for x in given[:5])
    q, k, v, log_decay, phase = flat
    y, last = elementwise(
        GateLoop(q, k, v, log_decay, phase, None, given.state[..., None, None], given.cut), "scan", "torch"
    )
    return y.squeeze(-1).to(given.v.dtype), last.flatten(1)


def _flat(run: Callable[[MaxHeaded], Values]) -> Callable[[GateLoop], tuple[Tensor, Tensor]]:
    """Return a backend of `gate_loop` from a kernel without the axes of channels."""

    def backend(given: GateLoop) -> tuple[Tensor, Tensor]:
        flat: Any = (x if x is None else x.squeeze(-1) for x in given[:5])
        q, k, v, log_decay, phase = flat
        y, last, _ = run(MaxHeaded(q, k, v, log_decay, phase, given.state.flatten(1), given.reset))
        return y.unsqueeze(-1), last.unflatten(-1, given.state.shape[1:])

    return backend


# on the CPU


def _memory_numba(given: MaxHeaded, keep: bool) -> Any:
    batch, time, channels = given.q.shape
    chunks = math.ceil(time / chunk_size(channels))
    parts = 2 if given.state.is_complex() else 1
    return like(given.q), like(given.state), Memory((batch, parts, chunks, channels), given.q.dtype)


def _forward_numba(out: Values, given: MaxHeaded) -> None:
    q, last = given.q, _parts(out.last)
    last.copy_(_parts(given.state))
    with lanes.threads_for(q.numel()) as threads:
        width, size = lanes.width_of(q, threads), chunk_size(q.shape[2])
        arguments = (*_arrays(given), last.numpy(), out.kept.numpy(), out.y.numpy(), size, width)
        lanes.run(NUMBA, "forward", arguments, lanes.count(q, width), threads)


def _adjoint_numba(out: Any, given: MaxHeaded, kept: Values, d: Values) -> None:
    q, starts, dstate = given.q, kept.kept, _parts(out.state)
    dstate.copy_(_parts(d.last))
    # gradients of constant gates are summed once per chunk
    gates = [
        q.new_empty(0, 0, 0) if x is None else x if x.shape[1] > 1 else torch.zeros_like(starts[:, 0])
        for x in (out.log_decay, out.phase)
    ]
    with lanes.threads_for(q.numel()) as threads:
        width, size = lanes.width_of(q, threads), chunk_size(q.shape[2])
        arrays = *_arrays(given), lanes.array(starts), lanes.array(d.y)
        gradients = [x.numpy() for x in (out.q, out.k, out.v, *gates, dstate)]
        lanes.run(NUMBA, "backward", (*arrays, *gradients, size, width), lanes.count(q, width), threads)
    for x, sums in zip((out.log_decay, out.phase), gates, strict=True):
        if x is not None and x is not sums:
            x.copy_(sums.sum_to_size(x.shape))


def chunk_size(channels: int) -> int:
    """Return the steps from one kept state to the next.

    What the adjoint makes for them stays in the second cache; of each input they are a piece long enough to
    come fast from memory.
    """
    return max(16, 8192 // max(channels, 1))


def _arrays(given: MaxHeaded) -> list[Any]:
    """Return the inputs: a magnitude of 1 and a phase that is not there where gates are None."""
    q, k, v, log_decay, phase, _, cut = given
    log_decay = q.new_zeros(1, 1, q.shape[2]) if log_decay is None else log_decay
    turns = lanes.nothing(3, q.dtype) if phase is None else lanes.array(phase)
    return [*map(lanes.array, (q, k, v, log_decay)), turns, lanes.cut_array(cut)]


def _parts(state: Tensor) -> Tensor:
    """Return the state (b, h, 1 or 2): the real part, and the imaginary one where there is one."""
    if state.is_complex():
        return torch.view_as_real(state.resolve_conj())
    return state.resolve_neg().unsqueeze(-1)


# on the GPU


def _memory_triton(given: MaxHeaded, keep: bool) -> Any:
    q, plan = given.q, tiling(given.q.shape)
    batch, time, heads = q.shape
    starts = Memory((batch, n_tiles(time, plan) * plan.pieces, heads), given.state.dtype)
    return like(given.v), like(given.state), starts


def _forward_triton(out: Values, given: MaxHeaded) -> None:
    q, k, v, log_decay, phase, state, cut = given
    launch(
        TRITON.forward, tiling(q.shape), q.shape, state.dtype, q.device, 104,
        *(real((q if x is None else x).contiguous()) for x in (q, k, v, log_decay, phase, state)),
        mask(cut, q), out.y, real(out.kept), real(out.last),
        DECAY=_kind(log_decay, q), PHASE=_kind(phase, q), HAS_CUT=cut is not None,
    )  # fmt: skip


def _adjoint_triton(out: Any, given: MaxHeaded, kept: Values, d: Values) -> None:
    q, k, v, log_decay, phase, _, cut = given
    plan = tiling(q.shape)
    # gradients of constant gates are summed in a tile by the kernel, and over tiles and the batch below
    shape = q.shape[0], n_tiles(q.shape[1], plan), q.shape[2]
    gates = [
        q if x is None else x if _kind(x, q) == 1 else x.new_empty(shape, dtype=accumulation(x.dtype))
        for x in (out.log_decay, out.phase)
    ]
    launch(
        TRITON.backward, plan, q.shape, given.state.dtype, q.device, 168,
        *(real((q if x is None else x).contiguous()) for x in (q, k, v, log_decay, phase)),
        mask(cut, q), *(real(x.contiguous()) for x in (kept.kept, d.y, d.last)),
        out.q, out.k, out.v, *gates, real(out.state),
        DECAY=_kind(log_decay, q), PHASE=_kind(phase, q), HAS_CUT=cut is not None,
    )  # fmt: skip
    for x, sums in zip((out.log_decay, out.phase), gates, strict=True):
        if x is not None and x is not sums:
            x.copy_(sums.sum((0, 1), keepdim=True))


def tiling(shape: tuple[int, ...]) -> Tiling:
    """Return the division of time for q of this shape (b, t, h): measured, on an H200.

    A thread holds more numbers per step than in `ops.scan`, so fewer steps. The pieces are the same for every
    length, so that a model compiled for any length serves all.
    """
    batch, _, heads = shape
    columns = 64 if heads > 32 else 32
    groups = grouping(batch * -(-heads // columns))
    return Tiling(4, 8, columns, columns // 32, *groups, warps=4)


def _kind(gate: Tensor | None, q: Tensor) -> int:
    # NONE, STEP and CONSTANT of the kernels
    return 0 if gate is None else 1 if gate.shape == q.shape else 2


def _kernel(name: str, memory: Any, forward: Any, adjoint: Any) -> Differentiable[MaxHeaded, Values]:
    again = by_autograd(_twin)
    return kernel_op(
        name, MaxHeaded, Values, memory, forward, adjoint, again=again, batch="q", kept=("kept",)
    )


NUMBA_OP = _kernel("gate_loop_numba", _memory_numba, _forward_numba, _adjoint_numba)
TRITON_OP = _kernel("gate_loop_triton", _memory_triton, _forward_triton, _adjoint_triton)
recurrent_numba, scan_triton = _flat(NUMBA_OP), _flat(TRITON_OP)
