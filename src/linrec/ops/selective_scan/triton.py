"""The selective scan on GPUs by Triton: time in a loop, states in registers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.kernel import Gradients, Space, add_up, like, terms
from linrec.ops.kernels.launch import Kernels, mask, on_device, power_of_2, real, row_stride
from linrec.ops.scan import triton as scan
from linrec.ops.scan.torch import Scan
from linrec.ops.selective_scan.torch import Group, Outputs, gradients, kernel, outputs

KERNELS = Kernels("selective.triton")

STEPS = 8
"""Number of steps per chunk, a power of two; the states before each chunk are saved."""

ENOUGH = 1024
"""Number of warps that occupy a device: with fewer, time is divided into segments."""

SHORTEST = 128
"""Smallest number of steps per segment."""


@dataclass(frozen=True)
class Plan:
    """Division of the work among programs; see `linrec.ops.kernels.selective.triton`.

    Attributes:
        states: number of states per channel, padded to a power of two.
        columns: number of channels per program, a power of two.
        vector: number of consecutive channels per thread.
        warps: number of warps per program, which share the states of its channels.
        segments: number of parallel segments of time.
        steps: number of steps per chunk.
    """

    states: int
    columns: int
    vector: int
    warps: int
    segments: int
    steps: int = STEPS


def plan_of(shape: tuple[int, ...], n: int) -> Plan:
    """Return the division for x of this shape (b, t, c) and n states per channel."""
    batch, time, channels = shape
    states = power_of_2(n)
    # eight numbers per thread, as two channels by four states for 16 states: with more, the backward kernel
    # runs out of registers, and its sums along longer sides of a warp's tile cost more
    columns = max(16, 256 // states)
    warps = min(16, states * columns // 256)
    running = max(1, batch * -(-channels // columns) * warps)
    # segments need a first pass that takes as long again, so use only as many as necessary
    segments = max(1, min(-(-ENOUGH // running), time // SHORTEST))
    return Plan(states, columns, 2, warps, segments)


class _Work:
    """Inputs in the layout of the kernels, and the launch of kernels."""

    def __init__(self, given: Group) -> None:
        self.plan = plan = plan_of(given.x.shape, given.A.shape[1])
        self.x, self.dt, self.D = given.x.contiguous(), given.dt.contiguous(), given.D.contiguous()
        self.A = _padded(given.A, 1, plan.states).contiguous()
        weights = torch.complex(*(_padded(x.to(self.A.dtype), 2, plan.states) for x in (given.B, given.C)))
        # torch.complex keeps the strides of B, but kernels expect contiguous rows
        self.weights = real(weights.contiguous())
        self.cut, self.has_cut = mask(given.reset, self.x), given.reset is not None

    def around(self, u: Tensor, begin: Tensor, *, adjoint: bool) -> Tensor:
        """Return the initial states (b, segments, n, c) of all segments, or the adjoint's.

        A segment maps its initial state h to link h + end. `u` is x, or dy for the adjoint. `begin` is the
        initial state (b, n, c) of the first segment, or the adjoint's gradient after the last.
        """
        (batch, _, channels), plan = self.x.shape, self.plan
        begin = _padded(begin, 1, plan.states)[:, None].contiguous()
        if plan.segments == 1:
            return begin
        links, ends = (self.A.new_empty(batch, plan.segments, plan.states, channels) for _ in range(2))
        tensors = u, self.dt, self.A, self.weights, self.cut, links, ends
        self.launch(KERNELS.ends, tensors, (row_stride(self.A),), ADJOINT=adjoint)
        # a segment that contains a reset has zero links in all channels
        cut = (links == 0).flatten(2).all(-1) if self.has_cut else None
        inputs = Scan(links.flatten(2), ends.flatten(2), begin.flatten(1), cut, adjoint)
        after = scan.scan.forward(inputs, False).y.view_as(ends)
        return torch.cat([after[:, 1:], begin] if adjoint else [begin, after[:, :-1]], dim=1)

    def launch(self, kernel: Any, tensors: Sequence[Tensor], scalars: Sequence[int], **options: Any) -> None:
        """Run a kernel for all batch rows, segments and blocks of channels."""
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
    """Return the tensor, zero-padded to the padded number of states."""
    missing = size - tensor.shape[dim]
    after = (0, 0) * (tensor.ndim - 1 - dim)
    return functional.pad(tensor, (*after, 0, missing)) if missing else tensor


def _memory(given: Group, keep: bool) -> tuple[Space, Space, Space]:
    plan = plan_of(given.x.shape, given.A.shape[1])
    chunks = -(-given.x.shape[1] // plan.steps) if keep else 0
    return outputs(given, chunks, plan.states, given.x.dtype)


def _forward(out: Outputs, given: Group) -> None:
    work = _Work(given)
    begins = work.around(work.x, given.state, adjoint=False)
    last = terms(out.last, (len(begins), *begins.shape[2:]))
    read = work.x, work.dt, work.A, work.weights, work.D, begins, work.cut
    # `starts` is not written if it has no chunks
    scalars = row_stride(work.A), row_stride(work.D)
    work.launch(KERNELS.forward, (*read, out.y, out.starts, last), scalars, KEEP=out.starts.shape[1] > 0)
    add_up((out.last,), (last,))


def _gradients(given: Group, kept: Outputs, d: Outputs, needs: Sequence[bool]) -> list[Space]:
    return [like(given.x), like(given.dt), *gradients(given, kept, d, needs)[2:]]


def _adjoint(out: Gradients, given: Group, kept: Outputs, d: Outputs) -> None:
    work = _Work(given)
    plan, dy = work.plan, d.y.contiguous()
    carries = work.around(dy, d.last, adjoint=True)
    batch, time, channels = given.x.shape
    blocks = -(-channels // plan.columns)
    # partial sums over batch rows and segments, and over blocks of channels; the state is padded
    totals = out.A[:, None], out.B[None], out.C[None], out.D[:, None], out.state
    shared = blocks, batch, time, plan.states
    of_channels = batch, plan.states, channels
    shapes = (batch, plan.segments, *of_channels[1:]), shared, shared, (batch, plan.segments, channels)
    parts = list(map(terms, totals, (*shapes, of_channels)))
    read = work.x, work.dt, work.A, work.weights, work.D, work.cut, kept.starts, dy, carries
    scalars = batch, row_stride(work.A), row_stride(work.D)
    work.launch(KERNELS.backward, (*read, out.x, out.dt, *parts), scalars)
    add_up(totals, parts)


recurrent = kernel(
    "selective_scan_triton", memory=_memory, forward=_forward, adjoint=_adjoint, gradients=_gradients
)
