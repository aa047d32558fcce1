"""The chunkwise mode on GPUs: matrix products of chunks on tensor cores."""

import functools
import inspect
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops import matrix_torch
from linrec.ops.gate_loop import vmap
from linrec.ops.gate_loop.inputs import real_dtype, widened
from linrec.ops.gate_loop.real_form import complex_form, real_form
from linrec.ops.operators import differentiated, operator
from linrec.ops.triton_launch import on_device, power_of_2

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

CHUNK = 64
# the least that a tensor core takes
LEAST = 16
NONE, HEAD, CHANNEL = 0, 1, 2


class Tiles(NamedTuple):
    """What one program works on at a time, key and value channels, by how many warps, in how many stages.

    `registers` of a thread bound how many programs run beside each other; None leaves them to the compiler.
    """

    block_k: int
    block_v: int
    warps: int
    stages: int
    registers: int | None = None


# by kernel, and by what decays: nothing, a head, or every key channel
TILES = {
    "chunk_states": (Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 2, 168)),
    "mixings": (Tiles(64, 16, 8, 1, 128),) * 3,
    "mixed": (Tiles(64, 128, 4, 2), Tiles(64, 128, 4, 2), Tiles(64, 128, 4, 2)),
    "gate_gradients": (Tiles(64, 64, 4, 3),) * 3,
}
# float32 and float64, where a decay of every channel needs registers
EXACT_TILES = {
    "chunk_states": (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 2)),
    "mixings": (Tiles(64, 16, 8, 1),) * 3,
    "mixed": (Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 2)),
    "gate_gradients": (Tiles(64, 64, 8, 2),) * 3,
}
# columns of sums of log decays
SUMS = 32
# programs that keep a GPU busy: with fewer, time is divided too
PROGRAMS = 256


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; arguments and results as in `torch.py`, q, k, v and gates in any precision."""
    angle = None
    if state.is_complex():
        precision = real_dtype(q.dtype)
        wide_q, wide_k, wide_decay, phase = widened(q, k, log_decay, phase)
        wide_q, wide_k, log_decay, state, angle = real_form(wide_q, wide_k, wide_decay, phase, state)
        q, k = wide_q.to(precision), wide_k.to(precision)
    elif q.is_complex():
        q = q.real
    inputs = q, k, v, log_decay, phase, state, reset
    run = ChunkwiseGateLoop.apply if differentiated(*inputs[:6]) else ChunkwiseGateLoop.forward
    y, last, _ = run(*inputs)
    return y, last if angle is None else complex_form(last, angle)


class ChunkwiseGateLoop(torch.autograd.Function):
    """y, last, matrices = ChunkwiseGateLoop.apply(q, k, v, log_decay, phase, state, cut).

    The frame turns with the phases, as `real_form` has it: they get their gradient here, and have no part in
    the values. The token-mixing matrices of the chunks are kept for the adjoint.
    """

    generate_vmap_rule = True

    # named parameters, not *arguments: from those, torch.compile without gradients concludes that a context
    # comes first
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        phase: Tensor | None,
        state: Tensor,
        cut: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernels."""
        return forward(q, k, v, log_decay, phase, state, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs, and the matrices that every channel's own decays made."""
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernels, or torch operations where the gradient is to be differentiated again."""
        *inputs, matrices = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            q, k, v, *others = inputs
            given = q, k, v, None, *others
            with_beta = *needed[:3], False, *needed[3:]
            found = matrix_torch.gradients(with_beta, given, dy, dlast)
            return (*found[:3], *found[4:], None)
        gradients = backward(*inputs, matrices, dy, dlast)
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None)


# autograd asks for it at every call, and making it takes longer than a small recurrence
ChunkwiseGateLoop.forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    ChunkwiseGateLoop.forward
)


@operator("gate_loop_chunkwise_triton")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, h, dv), the last state (b, h, dk, dv), and the matrices A (b, h, chunks, C, C).

    The last are (b, 0, 0, 0, 0) but where every channel decays for itself.
    """
    call = Chunks(q, k, v, log_decay, cut)
    # differences of sums are made once, for all that is weighed by them
    weighed = call.decay == CHANNEL and not call.exact
    matrices, read, written = call.mixings(weigh=True) if weighed else (call.matrices(), call.q, call.k)
    states, last = call.states(written, call.v, state, weighed=weighed)
    y = call.mixed(call.v, matrices, states, read=read if weighed else None)
    return y, last, matrices


@torch.library.register_fake(forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape), _matrices(q, log_decay)


def _matrices(q: Tensor, log_decay: Tensor | None) -> Tensor:
    batch, time, heads, _ = q.shape
    if log_decay is None or log_decay.shape[-1] == 1:
        return q.new_empty(batch, 0, 0, 0, 0)
    return q.new_empty(batch, heads, -(-time // CHUNK), CHUNK, CHUNK)


@operator("gate_loop_chunkwise_triton_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    matrices: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of a gate which is None is empty.

    The states before the chunks are made again: keeping them takes as much memory as q, k, v and y together.
    """
    call = Chunks(q, k, v, log_decay, cut)
    dy = dy.contiguous()
    gradients, dstate = call.states(call.q, dy, dlast, reverse=True)
    dv = call.mixed(dy, matrices, gradients, reverse=True)
    states, last = call.states(call.k, call.v, state)
    passing = call.decay_gradient()
    dq, dk = call.gate_gradients(dy, call.v, states, gradients, passing)
    ddecay = q.new_empty(0) if log_decay is None else call.summed(passing, log_decay)
    if phase is None:
        dphase = q.new_empty(0)
    else:
        after = torch.cat([states[:, :, 1:], last[:, :, None].to(states.dtype)], dim=2)
        dphase = _phase_gradient((call.q, dq), (call.k, dk), (after, gradients), phase)
    return dq, dk, dv, ddecay, dphase, dstate


@torch.library.register_fake(backward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    matrices: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay, dphase = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, phase))
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, state))
    return dq, dk, dv, ddecay, dphase, dstate


Pair = tuple[Tensor, Tensor]


def _phase_gradient(q: Pair, k: Pair, states: Pair, phase: Tensor) -> Tensor:
    """What turning step j turns: what is read at n >= j, less what is written there, and what goes on.

    Args:
        q: q of `real_form` (b, t, h, 2 dk), and its gradient; so is `k`.
        k: likewise.
        states: after each chunk (b, h, chunks, 2 dk, dv), and their gradients.
        phase: (b or 1, t or 1, h, dk or 1).

    Returns:
        The gradient of `phase`. Sums run over a chunk: over a long sequence they would lose their digits.
    """
    turned = -_turn(*q) - _turn(*k)
    going_on = _turn(*(x.movedim(-2, -1) for x in states)).sum(-2).movedim(1, 2)
    batch, time, *channels = turned.shape
    missing = -time % CHUNK
    turned = torch.cat([turned, turned.new_zeros(batch, missing, *channels)], dim=1) if missing else turned
    sums = turned.unflatten(1, (-1, CHUNK)).flip(2).cumsum(2).flip(2) + going_on[:, :, None]
    return sums.flatten(1, 2)[:, :time].sum_to_size(phase.shape).to(phase.dtype)


def _turn(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of an angle that x (..., 2 dk), as (real, imaginary), turns by."""
    wide = torch.promote_types(x.dtype, torch.float32)
    real, imaginary = x.to(wide).chunk(2, dim=-1)
    of_real, of_imaginary = gradient.to(wide).chunk(2, dim=-1)
    return of_imaginary * real - of_real * imaginary


class Chunks:
    """Tensors as the kernels take them, and the division of the work."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, cut: Tensor | None) -> None:
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.batch, self.time, self.heads, self.dk = q.shape
        self.dv = v.shape[-1]
        self.chunks = -(-self.time // CHUNK)
        self.exact = q.element_size() > 2
        if log_decay is None and cut is not None:
            log_decay = torch.zeros(1, 1, self.heads, 1, device=q.device)
        self.decay = NONE
        # what is not there is never read; any pointer will do
        self.gates = (self.q, self.q if cut is None else cut.contiguous().view(torch.uint8))
        self.strides: tuple[int, ...] = (0, 0, 0)
        self.reset = cut is not None
        if log_decay is not None:
            self.decay = CHANNEL if log_decay.shape[-1] > 1 else HEAD
            decays = log_decay.contiguous().expand(self.batch, self.time, -1, -1)
            self.strides = decays.stride()[:3]
            self.gates = (decays, self.gates[1])
            if not self.exact:
                self.gates = (self._sums(decays), self.gates[1])
        self.blocks_k = -(-self.dk // self._tiles("gate_gradients").block_k)

    def states(
        self, k: Tensor, v: Tensor, start: Tensor, *, reverse: bool = False, weighed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """States before each chunk (b, h, chunks, dk, dv), and after the last; or gradients, of q and dy."""
        states = k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        end = torch.empty_like(start, memory_format=torch.contiguous_format)
        tiles = self._tiles("chunk_states")
        blocks = -(-self.dk // tiles.block_k), -(-self.dv // tiles.block_v)
        matrices = self.batch * self.heads
        pieces = max(1, min(PROGRAMS // max(blocks[0] * blocks[1] * matrices, 1), self.chunks))
        length = -(-self.chunks // pieces)
        pieces = -(-self.chunks // length)
        left, factors = start, start
        if pieces > 1:
            left = start.new_empty(matrices, pieces, self.dk, self.dv)
            factors = start.new_empty(matrices, pieces, self.dk)
        tensors = (k, v, *self.gates, start.contiguous(), left, factors, states, end)
        for local in (True, False) if pieces > 1 else (False,):
            self._run(
                "chunk_states",
                (*blocks, matrices * pieces),
                tensors,
                length,
                pieces,
                REVERSE=reverse,
                WEIGHED=weighed,
                LOCAL=local,
            )
        return states, end

    def matrices(self) -> Tensor:
        """Return A of all chunks (b, h, chunks, C, C), where each channel decays for itself; else nothing."""
        return self.mixings()[0] if self.decay == CHANNEL else self.q.new_empty(self.batch, 0, 0, 0, 0)

    def mixings(self, *, weigh: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """A of all chunks (b, h, chunks, C, C), and, to `weigh` them, e^P * q and e^R * k."""
        matrices = self.q.new_empty(self.batch, self.heads, self.chunks, CHUNK, CHUNK)
        read, written = (torch.empty_like(x) if weigh else x for x in (self.q, self.k))
        tensors = (self.q, self.k, *self.gates, matrices, read, written)
        self.per_chunk("mixings", 1, *tensors, LEVELS=CHUNK.bit_length() - 1, WEIGH=weigh)
        return matrices, read, written

    def mixed(
        self,
        values: Tensor,
        matrices: Tensor,
        states: Tensor,
        *,
        reverse: bool = False,
        read: Tensor | None = None,
    ) -> Tensor:
        """Y, of v and the states before the chunks; or dV, of dy and the gradients of those after them.

        `read` is e^P * q, where that has been made.
        """
        out = torch.empty_like(self.v)
        blocks = -(-self.dv // self._tiles("mixed").block_v)
        q = self.q if read is None else read
        tensors = (q, self.k, values, *self.gates, matrices, states, out)
        self.per_chunk("mixed", blocks, *tensors, REVERSE=reverse, WEIGHED=read is not None)
        return out

    def gate_gradients(
        self, dy: Tensor, v: Tensor, states: Tensor, gradients: Tensor, passing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return dq and dk, and fill `passing`; see the kernel."""
        dq, dk = torch.empty_like(self.q), torch.empty_like(self.k)
        tensors = (self.q, self.k, v, dy, *self.gates, states, gradients, self.q, dq, dk, passing, self.q)
        constants = {"LEVELS": CHUNK.bit_length() - 1, "CORRECTION": False}
        self.per_chunk("gate_gradients", self.blocks_k, *tensors, **constants)
        return dq, dk

    def decay_gradient(self) -> Tensor:
        """Where `gate_gradients` puts what passes each step."""
        width = {NONE: 0, HEAD: self.blocks_k, CHANNEL: self.dk}[self.decay]
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        return self.q.new_empty(*self.q.shape[:3], width, dtype=dtype)

    def summed(self, passing: Tensor, log_decay: Tensor) -> Tensor:
        """Sum over blocks of channels, and over the steps that share a decay."""
        passing = passing.sum(-1, keepdim=True) if self.decay == HEAD else passing
        return passing.sum_to_size(log_decay.shape).to(log_decay.dtype)

    def per_chunk(self, name: str, blocks: int, *tensors: Tensor, **constants: Any) -> None:
        """Run a kernel with one program for each block of channels, chunk, batch row and head."""
        self._run(name, (blocks, self.chunks, self.batch * self.heads), tensors, **constants)

    def _tiles(self, name: str) -> Tiles:
        tiles = (EXACT_TILES if self.exact else TILES)[name][self.decay]
        # double precision takes twice the registers
        part = 2 if self.q.dtype == torch.float64 else 1
        # where several products of 16 or 32 columns meet in a kernel, Triton 3.6 to 3.7 read beyond their
        # tiles (its issue 11366), so the gradients of small heads take wide ones
        least = 64 // part if name in ("gate_gradients", "mixings", "corrections") else LEAST
        return tiles._replace(
            block_k=_block(self.dk, tiles.block_k // part, least),
            block_v=_block(self.dv, tiles.block_v // part, least),
        )

    def _kernel(self, name: str) -> Any:
        return getattr(_kernels(), name)

    def _sums(self, decays: Tensor) -> Tensor:
        """Running sums of log decays in each chunk, (b, t, h, dk or 1)."""
        width = decays.shape[-2] * decays.shape[-1]
        sums = torch.empty(decays.shape, dtype=torch.float32, device=decays.device)
        grid = -(-width // SUMS), self.chunks, self.batch
        if 0 not in grid:
            with on_device(decays.device):
                _kernels().chunk_sums[(math.prod(grid),)](
                    decays,
                    self.gates[1],
                    sums,
                    self.time,
                    self.strides,
                    WIDTH=width,
                    RESET=self.reset,
                    CHUNK=CHUNK,
                    BLOCK=SUMS,
                    num_warps=4,
                )
        return sums

    def _run(
        self, name: str, grid: tuple[int, ...], tensors: tuple[Tensor, ...], *numbers: int, **constants: Any
    ) -> None:
        if 0 in grid:
            return
        import triton.language as tl

        # three products of ten bits each, where one of 23 has no tensor cores
        precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        tiles = self._tiles(name)
        # only NVIDIA's compiler knows the option
        options = {"maxnreg": tiles.registers} if tiles.registers and torch.version.cuda else {}
        with on_device(self.q.device):
            self._kernel(name)[(math.prod(grid),)](
                *tensors,
                self.time,
                self.chunks,
                self.strides,
                *numbers,
                HEADS=self.heads,
                DK=self.dk,
                DV=self.dv,
                DECAY=self.decay,
                RESET=self.reset,
                EXACT=self.exact,
                CHUNK=CHUNK,
                BLOCK_K=tiles.block_k,
                BLOCK_V=tiles.block_v,
                PRECISION=precision if self.q.dtype == torch.float32 else "ieee",
                WIDE=tl.float64 if self.q.dtype == torch.float64 else tl.float32,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
                **options,
                **constants,
            )


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.gate_loop import chunkwise_triton_kernels

    return chunkwise_triton_kernels


def _block(size: int, limit: int, least: int) -> int:
    return min(limit, max(least, power_of_2(size)))


vmap.register(forward, backward)
