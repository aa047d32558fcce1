"""The selective scan on GPUs by Triton: time in a loop, states in registers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.kernel import Space, add_up, like, terms
from linrec.ops.kernels import Kernels
from linrec.ops.kernels.launch import mask, on_device, power_of_2, real
from linrec.ops.scan import triton as scan
from linrec.ops.scan.torch import Scan
from linrec.ops.selective_scan.torch import Outputs, gradients, kernel, outputs

KERNELS = Kernels("selective.triton")

STEPS = 8
"""Steps of a chunk, a power of two: the states before each chunk are kept."""

ENOUGH = 1024
"""Warps that keep a device busy: with fewer, time is divided into segments."""

SHORTEST = 128
"""Steps of a segment, at least."""


@dataclass(frozen=True)
class Plan:
    """How the work is divided among programs; see `linrec.ops.kernels.selective.triton`.

    Attributes:
        states: states of a channel, padded to a power of two.
        columns: channels of a program, a power of two.
        vector: neighbouring channels of a thread.
        warps: warps of a program, which have the states of its channels between them.
        segments: parts of time that run side by side.
        steps: steps of a chunk.
    """

    states: int
    columns: int
    vector: int
    warps: int
    segments: int
    steps: int = STEPS


def plan_of(shape: tuple[int, ...], n: int) -> Plan:
    """Return the division for x of this shape (b, t, c) and n states."""
    batch, time, channels = shape
    states = power_of_2(n)
    # eight numbers of a thread, two channels by four states where there are 16: with more the backward kernel
    # has no registers left, and along longer sides of a warp's tile its sums cost more
    columns = max(16, 256 // states)
    warps = min(16, states * columns // 256)
    running = max(1, batch * -(-channels // columns) * warps)
    # what segments do to a state is made before they run, which takes as long again: no more than is needed
    segments = max(1, min(-(-ENOUGH // running), time // SHORTEST))
    return Plan(states, columns, 2, warps, segments)


class _Work:
    """What all kernels read, as they take it, and how they are launched."""

    def __init__(self, given: Any) -> None:
        self.plan = plan = plan_of(given.x.shape, given.A.shape[1])
        self.x, self.dt, self.D = given.x.contiguous(), given.dt.contiguous(), given.D.contiguous()
        self.A = _padded(given.A, 1, plan.states).contiguous()
        weights = torch.complex(*(_padded(x.to(self.A.dtype), 2, plan.states) for x in (given.B, given.C)))
        # torch.complex keeps the strides of B, and kernels read rows
        self.weights = real(weights.contiguous())
        self.cut, self.has_cut = mask(given.reset, self.x), given.reset is not None

    def around(self, u: Tensor, begin: Tensor, *, adjoint: bool) -> Tensor:
        """Return the states (b, segments, n, c) before all segments, or what adjoints take from the next.

        A segment makes link h + end of the state h before it; `u` is x, or dy of the adjoint. `begin` is the
        state (b, n, c) before the first, or what the adjoint of the last takes.
        """
        (batch, _, channels), plan = self.x.shape, self.plan
        begin = _padded(begin, 1, plan.states)[:, None].contiguous()
        if plan.segments == 1:
            return begin
        links, ends = (self.A.new_empty(batch, plan.segments, plan.states, channels) for _ in range(2))
        tensors = u, self.dt, self.A, self.weights, self.cut, links, ends
        self.launch(KERNELS.ends, tensors, (_row(self.A),), ADJOINT=adjoint)
        # a reset within a segment cuts every channel's link
        cut = (links == 0).flatten(2).all(-1) if self.has_cut else None
        inputs = Scan(links.flatten(2), ends.flatten(2), begin.flatten(1), cut, adjoint)
        after = scan.scan.forward(inputs, False).y.view_as(ends)
        return torch.cat([after[:, 1:], begin] if adjoint else [begin, after[:, :-1]], dim=1)

    def launch(self, kernel: Any, tensors: Sequence[Tensor], scalars: Sequence[int], **options: Any) -> None:
        """Run a kernel for all rows, segments and blocks of channels."""
        import triton.language as tl

        (batch, time, channels), plan = self.x.shape, self.plan
        with on_device(self.x.device):
            kernel[(batch * plan.segments * -(-channels // plan.columns),)](
                *tensors, time, -(-time // plan.steps), plan.segments, *scalars, HAS_CUT=self.has_cut,
                CHANNELS=channels, STATES=plan.states, EVEN=time % plan.steps == 0, STEPS=plan.steps,
                COLUMNS=plan.columns, VECTOR=plan.vector, num_warps=plan.warps,
                WIDE=tl.float64 if self.A.dtype == torch.float64 else tl.float32, **options,
            )  # fmt: skip


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return the tensor with zeros for the missing states."""
    missing = size - tensor.shape[dim]
    after = (0, 0) * (tensor.ndim - 1 - dim)
    return functional.pad(tensor, (*after, 0, missing)) if missing else tensor


def _row(tensor: Tensor) -> int:
    """Return the numbers from one row of the batch to the next: 0 where all rows have the same ones."""
    return tensor[0].numel() if len(tensor) > 1 else 0


def _memory(given: Any, keep: bool) -> Any:
    plan = plan_of(given.x.shape, given.A.shape[1])
    chunks = -(-given.x.shape[1] // plan.steps) if keep else 0
    return outputs(given, chunks, plan.states, given.x.dtype)


def _forward(out: Outputs, given: Any) -> None:
    work = _Work(given)
    begins = work.around(work.x, given.state, adjoint=False)
    last = terms(out.last, (len(begins), *begins.shape[2:]))
    read = work.x, work.dt, work.A, work.weights, work.D, begins, work.cut
    # `starts` without chunks is not written
    scalars = _row(work.A), _row(work.D)
    work.launch(KERNELS.forward, (*read, out.y, out.starts, last), scalars, KEEP=out.starts.shape[1] > 0)
    add_up((out.last,), (last,))


def _gradients(given: Any, kept: Outputs, d: Outputs, needs: Sequence[bool]) -> list[Space]:
    return [like(given.x), like(given.dt), *gradients(given, kept, d, needs)[2:]]


def _adjoint(out: Any, given: Any, kept: Outputs, d: Outputs) -> None:
    work = _Work(given)
    plan, dy = work.plan, d.y.contiguous()
    carries = work.around(dy, d.last, adjoint=True)
    batch, time, channels = given.x.shape
    blocks = -(-channels // plan.columns)
    # sums over batch rows and segments, and over blocks of channels; and the state, which is padded
    totals = out.A[:, None], out.B[None], out.C[None], out.D[:, None], out.state
    shared = blocks, batch, time, plan.states
    of_channels = batch, plan.states, channels
    shapes = (batch, plan.segments, *of_channels[1:]), shared, shared, (batch, plan.segments, channels)
    parts = list(map(terms, totals, (*shapes, of_channels)))
    read = work.x, work.dt, work.A, work.weights, work.D, work.cut, kept.starts, dy, carries
    scalars = batch, _row(work.A), _row(work.D)
    work.launch(KERNELS.backward, (*read, out.x, out.dt, *parts), scalars)
    add_up(totals, parts)


recurrent = kernel(
    "selective_scan_triton", memory=_memory, forward=_forward, adjoint=_adjoint, gradients=_gradients
)
