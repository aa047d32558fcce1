"""The chunkwise mode on GPUs: matrix products of chunks on tensor cores."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.gate_loop import segments, vmap
from linrec.ops.gate_loop.inputs import real_dtype, widened
from linrec.ops.operators import operator
from linrec.ops.triton_launch import on_device, power_of_2

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

CHUNK = 64
# the least that a tensor core takes
LEAST = 16
NONE, HEAD, CHANNEL = 0, 1, 2


class Tiles(NamedTuple):
    """What one program works on at a time, key and value channels, by how many warps, in how many stages."""

    block_k: int
    block_v: int
    warps: int
    stages: int


# by kernel, and by what decays: nothing, a head, or every key channel
TILES = {
    "chunk_states": (Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 3)),
    "mixings": (Tiles(64, 16, 8, 1),) * 3,
    "mixed": (Tiles(64, 128, 4, 2), Tiles(64, 128, 4, 2), Tiles(64, 128, 4, 2)),
    "gate_gradients": (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 8, 2)),
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


def real_form(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return a complex recurrence as a real one of twice as many key channels, which turns with the phases.

    With Phi_t the sum of phases over 1..t and S'_t = exp(-i Phi_t) S_t

        S'_t = diag(exp(log_decay_t)) S'_{t-1} + (exp(-i Phi_t) k_t)^T v_t,    y_t = Re(q_t exp(i Phi_t) S'_t)

    and the real part of a product is a real product of (real, -imaginary) and (real, imaginary).

    Args:
        q: (b, t, h, dk), real or complex; so is `k`.
        k: likewise.
        log_decay: None or (b or 1, t or 1, h, dk or 1).
        phase: likewise.
        state: S_0 (b, h, dk, dv), complex.

    Returns:
        q, k (b, t, h, 2 dk), log_decay, S'_0 (b, h, 2 dk, dv), and Phi_t modulo 2 pi, with two axes more.
    """
    if phase is None:
        total = state.real.new_zeros(1, 1, 1, 1)
    else:
        total = phase.to(segments.summation(q.device)).expand(-1, q.shape[1], -1, -1).cumsum(1)
    precision = real_dtype(q.dtype)
    wide_q, wide_k = widened(q, k)
    q = segments.queries(wide_q, None, total).to(precision)
    k = segments.keys(wide_k, None, -total).to(precision)
    if log_decay is not None and log_decay.shape[-1] > 1:
        log_decay = torch.cat([log_decay, log_decay], dim=-1)
    state = torch.cat([state.real, state.imag], dim=-2)
    return q, k, log_decay, state, segments.wrapped(total[:, -1, :, :, None], state.dtype)


def complex_form(state: Tensor, turned: Tensor) -> Tensor:
    """Return S_t of S'_t and Phi_t, as `real_form` makes them."""
    return torch.complex(*state.chunk(2, dim=-2)) * torch.complex(turned.cos(), turned.sin())


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
    """Return y (b, t, h, dv) and the last state (b, h, dk, dv); and nothing, (b, 0), as `fused` has it."""
    call = Chunks(q, k, v, log_decay, cut)
    states, last = call.states(call.k, call.v, state)
    y = call.mixed(call.v, call.matrices(), states)
    return y, last, state.new_empty(len(q), 0)


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
    return v.new_empty(v.shape), state.new_empty(state.shape), state.new_empty(len(q), 0)


@operator("gate_loop_chunkwise_triton_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of a gate which is None is empty.

    The states before the chunks are made again: keeping them takes as much memory as q, k, v and y together.
    """
    call = Chunks(q, k, v, log_decay, cut)
    dy = dy.contiguous()
    dq, dk = torch.empty_like(call.q), torch.empty_like(call.k)
    gradients, dstate = call.states(call.q, dy, dlast, reverse=True)
    dv = call.mixed(dy, call.matrices(), gradients, reverse=True)
    states, _ = call.states(call.k, call.v, state)
    ddecay = call.decay_gradient()
    call.gate_gradients(call.q, call.k, dy, call.v, *call.gates, states, states, dq, ddecay)
    call.gate_gradients(call.k, call.q, call.v, dy, *call.gates, gradients, states, dk, ddecay, reverse=True)
    ddecay = q.new_empty(0) if log_decay is None else call.summed(ddecay, log_decay)
    return dq, dk, dv, ddecay, q.new_empty(0), dstate


@torch.library.register_fake(backward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, state))
    return dq, dk, dv, ddecay, q.new_empty(0), dstate


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

    def states(self, k: Tensor, v: Tensor, start: Tensor, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """States before each chunk (b, h, chunks, dk, dv), and after the last; or gradients, of q and dy."""
        states = k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        end = torch.empty_like(start, memory_format=torch.contiguous_format)
        tiles = self._tiles("chunk_states")
        grid = -(-self.dk // tiles.block_k), -(-self.dv // tiles.block_v), self.batch * self.heads
        tensors = (k, v, *self.gates, start.contiguous(), states, end)
        self._run("chunk_states", grid, tensors, REVERSE=reverse)
        return states, end

    def matrices(self) -> Tensor:
        """Return A of all chunks (b, h, chunks, C, C), where each channel decays for itself; else nothing."""
        return self.q if self.decay != CHANNEL else self.mixings(self.q)

    def mixings(self, q: Tensor, *, strict: bool = False, inverse: bool = False) -> Tensor:
        """A of all chunks (b, h, chunks, C, C), of these queries; see the kernel."""
        matrices = self.q.new_empty(self.batch, self.heads, self.chunks, CHUNK, CHUNK)
        constants = {"LEVELS": CHUNK.bit_length() - 1, "STRICT": strict, "INVERSE": inverse}
        self.per_chunk("mixings", 1, q, self.k, *self.gates, matrices, **constants)
        return matrices

    def mixed(self, values: Tensor, matrices: Tensor, states: Tensor, *, reverse: bool = False) -> Tensor:
        """Y, of v and the states before the chunks; or dV, of dy and the gradients of those after them."""
        out = torch.empty_like(self.v)
        blocks = -(-self.dv // self._tiles("mixed").block_v)
        tensors = (self.q, self.k, values, *self.gates, matrices, states, out)
        self.per_chunk("mixed", blocks, *tensors, REVERSE=reverse)
        return out

    def gate_gradients(
        self, *tensors: Tensor, reverse: bool = False, strict: bool = False, states: bool = True
    ) -> None:
        """Make dQ; or, after it, dK; see the kernel."""
        constants = {"LEVELS": CHUNK.bit_length() - 1, "STRICT": strict, "STATES": states}
        self.per_chunk("gate_gradients", self.blocks_k, *tensors, REVERSE=reverse, **constants)

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
        least = 64 // part if name == "gate_gradients" else LEAST
        return tiles._replace(
            block_k=_block(self.dk, tiles.block_k // part, least),
            block_v=_block(self.dv, tiles.block_v // part, least),
        )

    def _kernel(self, name: str) -> Any:
        return getattr(_kernels(), name)

    def _sums(self, decays: Tensor) -> Tensor:
        """Running sums of log decays in each chunk, (b, t, h, dk or 1)."""
        width = decays[0, 0].numel()
        sums = torch.empty(decays.shape, dtype=torch.float32, device=decays.device)
        grid = -(-width // SUMS), self.chunks, self.batch
        if 0 not in grid:
            with on_device(decays.device):
                _kernels().chunk_sums[grid](
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

    def _run(self, name: str, grid: tuple[int, ...], tensors: tuple[Tensor, ...], **constants: Any) -> None:
        if 0 in grid:
            return
        import triton.language as tl

        # three products of ten bits each, where one of 23 has no tensor cores
        precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        tiles = self._tiles(name)
        with on_device(self.q.device):
            self._kernel(name)[grid](
                *tensors,
                self.time,
                self.chunks,
                self.strides,
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
                **constants,
            )


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.gate_loop import chunkwise_triton_kernels

    return chunkwise_triton_kernels


def _block(size: int, limit: int, least: int) -> int:
    return min(limit, max(least, power_of_2(size)))


vmap.register(forward, backward)
