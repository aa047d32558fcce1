"""The selective scan on GPUs by Triton: time in a loop, states in registers."""

import contextlib
import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops import vmap
from linrec.ops.kernels.launch import power_of_2, real
from linrec.ops.operators import operator
from linrec.ops.scan import triton as scan
from linrec.ops.scan.torch import Scan
from linrec.ops.selective_scan.torch import Gradients

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
        states: states of a channel, a power of two: some more than there are, where those are none.
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


@operator("selective_scan_triton")
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
    """Return y (b, t, c), the last state (b, n, c), and those before the chunks (b, chunks, n, c).

    Without `keep` there are no chunks.
    """
    plan = plan_of(x.shape, A.shape[1])
    y, starts = torch.empty(x.shape, dtype=x.dtype, device=x.device), _starts(x, state, plan, keep=keep)
    last = torch.empty(starts.shape[0], *starts.shape[2:], dtype=state.dtype, device=x.device)
    if x.numel() > 0:
        given = _Given(plan, x, dt, A, B, C, D, cut)
        begins = _padded(state, 1, plan.states)[:, None]
        if plan.segments > 1:
            after = given.joined(given.x, begins, adjoint=False)
            begins = torch.cat([begins, after[:, :-1]], dim=1)
        tensors = given.D, begins.contiguous(), given.cut, y, starts, last
        given.launch(
            _kernels().forward,
            (given.x, given.dt, given.A, given.weights, *tensors),
            (_row(given.A), _row(given.D)),
            KEEP=keep,
        )
    return y, last[:, : A.shape[1]].contiguous(), starts


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
    plan = plan_of(x.shape, A.shape[1])
    return x.new_empty(x.shape), state.new_empty(state.shape), _starts(x, state, plan, keep=keep)


@operator("selective_scan_triton_backward")
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
    """Return the gradients of all inputs but `cut`: of x and dt in their dtypes, else of accumulation."""
    plan = plan_of(x.shape, A.shape[1])
    (batch, time, channels), n = x.shape, A.shape[1]
    dx, ddt = (torch.empty(g.shape, dtype=g.dtype, device=x.device) for g in (x, dt))
    blocks = -(-channels // plan.columns)
    zeros = functools.partial(torch.empty if x.numel() else torch.zeros, dtype=state.dtype, device=x.device)
    dA, dD = zeros(batch, plan.segments, plan.states, channels), zeros(batch, plan.segments, channels)
    dB, dC = (zeros(blocks, batch, time, plan.states) for _ in range(2))
    dstate = zeros(batch, plan.states, channels)
    if x.numel() > 0:
        given = _Given(plan, x, dt, A, B, C, D, cut)
        dy = dy.contiguous()
        carries = _padded(dlast, 1, plan.states)[:, None]
        if plan.segments > 1:
            after = given.joined(dy, carries, adjoint=True)
            carries = torch.cat([after[:, 1:], carries], dim=1)
        tensors = given.D, given.cut, starts, dy, carries.contiguous(), dx, ddt, dA, dB, dC, dD, dstate
        given.launch(
            _kernels().backward,
            (given.x, given.dt, given.A, given.weights, *tensors),
            (batch, _row(given.A), _row(given.D)),
        )
    return (
        dx,
        ddt,
        dA[:, :, :n].sum(1).sum_to_size(A.shape),
        dB.sum(0)[..., :n].contiguous(),
        dC.sum(0)[..., :n].contiguous(),
        dD.sum(1).sum_to_size(D.shape),
        dstate[:, :n].contiguous(),
    )


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
    dA, dB, dC, dD, dstate = (state.new_empty(given.shape) for given in (A, B, C, D, state))
    return x.new_empty(x.shape), dt.new_empty(dt.shape), dA, dB, dC, dD, dstate


class _Given:
    """What all kernels read, as they take it, and how they are launched."""

    def __init__(
        self,
        plan: Plan,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        cut: Tensor | None,
    ) -> None:
        self.plan = plan
        self.x, self.dt, self.D = x.contiguous(), dt.contiguous(), D.contiguous()
        self.A = _padded(A, 1, plan.states).contiguous()
        weights = torch.complex(*(_padded(shared.to(A.dtype), 2, plan.states) for shared in (B, C)))
        # torch.complex keeps the strides of B, and kernels read rows
        self.weights = real(weights.contiguous())
        # what is None is never read; any pointer will do
        self.cut = self.x if cut is None else cut.contiguous().view(torch.uint8)
        self.has_cut = cut is not None

    def joined(self, u: Tensor, begin: Tensor, *, adjoint: bool) -> Tensor:
        """Return the states after all segments (b, segments, n, c), or what their adjoints hand on.

        A segment makes link h + end of the state h before it; `u` is x, or dy of the adjoint.
        """
        (batch, _, channels), plan = self.x.shape, self.plan
        links, ends = (self.A.new_empty(batch, plan.segments, plan.states, channels) for _ in range(2))
        tensors = u, self.dt, self.A, self.weights, self.cut, links, ends
        self.launch(_kernels().ends, tensors, (_row(self.A),), ADJOINT=adjoint)
        # a reset within a segment cuts every channel's link
        cut = (links == 0).flatten(2).all(-1) if self.has_cut else None
        after, _ = scan.scan.forward(
            Scan(links.flatten(2), ends.flatten(2), begin.flatten(1), cut, adjoint), False
        )
        return after.view_as(ends)

    def launch(
        self, kernel: Any, tensors: tuple[Tensor, ...], strides: tuple[int, ...], **options: Any
    ) -> None:
        """Run a kernel for all rows, segments and blocks of channels."""
        import triton.language as tl

        (batch, time, channels), plan = self.x.shape, self.plan
        chunks = -(-time // plan.steps)
        grid = batch * plan.segments * -(-channels // plan.columns)
        # Triton launches on the current device, whatever the tensors' one
        on_cuda = self.x.device.type == "cuda"
        with torch.cuda.device(self.x.device) if on_cuda else contextlib.nullcontext():
            kernel[(grid,)](
                *tensors,
                time,
                chunks,
                plan.segments,
                *strides,
                HAS_CUT=self.has_cut,
                CHANNELS=channels,
                STATES=plan.states,
                EVEN=time % plan.steps == 0,
                WIDE=tl.float64 if self.A.dtype == torch.float64 else tl.float32,
                STEPS=plan.steps,
                COLUMNS=plan.columns,
                VECTOR=plan.vector,
                num_warps=plan.warps,
                **options,
            )


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.selective import triton as triton_kernels

    return triton_kernels


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor with zeros for the states that are missing."""
    missing = size - tensor.shape[dim]
    after = (0, 0) * (tensor.ndim - 1 - dim)
    return functional.pad(tensor, (*after, 0, missing)) if missing else tensor


def _row(tensor: Tensor) -> int:
    """Numbers from one row of the batch to the next: none where all have the same."""
    return tensor[0].numel() if len(tensor) > 1 else 0


def _starts(x: Tensor, state: Tensor, plan: Plan, *, keep: bool) -> Tensor:
    batch, time, channels = x.shape
    return state.new_empty(batch, -(-time // plan.steps) if keep else 0, plan.states, channels)


vmap.register(forward, backward)
