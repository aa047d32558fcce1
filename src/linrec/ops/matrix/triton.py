"""Matrix states on GPUs: in chunks on tensor cores, and step by step for decoding."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.backends import Backend
from linrec.ops.core.kernel import Gradients, In, Memory, Space, forward_op, like
from linrec.ops.core.precision import accumulation
from linrec.ops.kernels.launch import Kernels, mask, on_device, power_of_2
from linrec.ops.matrix import Matrix, Values, kernel

KERNELS, GATES = Kernels("matrix.triton"), Kernels("matrix.gates_triton")

# entries of a state that a program holds in registers
STATE = 4096
CHUNK = 64
# smallest tile of a tensor core
LEAST = 16
NONE, HEAD, CHANNEL = 0, 1, 2
# the log decay of a reset: its exponential is zero even in float64
RESET = -1e4
# number of columns per program of the kernel that sums log decays
SUMS = 32
# number of programs that occupy a GPU: with fewer, time is divided too
PROGRAMS = 256


class Outputs(NamedTuple):
    """Outputs of the kernel of steps: y and the last state."""

    y: Tensor
    last: Tensor


Pair = tuple[Tensor, Tensor]
Layout = tuple[int, int]
"""Strides of steps and heads of a tensor (b, t, h, d), whose channels are adjacent, as are its batch rows."""


def layout(x: Tensor) -> Layout | None:
    """Return the layout of a tensor (b, t, h, d), or None if kernels need a contiguous copy."""
    batch, time, heads, width = x.shape
    of_batch, row, head, column = x.stride()
    if time == 1:
        row = of_batch
    adjacent = (width == 1 or column == 1) and (batch == 1 or of_batch == time * row)
    return (row, head if heads > 1 else 0) if adjacent else None


def readable(x: Tensor) -> Tensor:
    """Return the tensor (b, t, h, d), or a contiguous copy if kernels need one."""
    return x if layout(x) is not None else x.contiguous()


class Steps(NamedTuple):
    """Inputs of the kernel of steps, as in `Matrix`.

    Attributes:
        q: (b, t, h, dk), or (b, t, h, 2 dk) if it is complex: the real and the imaginary part of each number.
        k: likewise; if it is complex, so is the state.
        v: (b, t, h, dv).
        beta: None or (b, t, h).
        log_decay: log |a|, None or (b or 1, t or 1, h, dk or 1).
        state: S_0 (b, h, dk, dv), real or complex.
        reset: None, or (b, t), true if the state is cleared before a step.
        phase: arg a, as `log_decay`; with phases the state is complex.
        r: None or (b, t, h, dk).
        w: None or (b, t, h, dk).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    state: Tensor
    reset: Tensor | None
    phase: Tensor | None = None
    r: Tensor | None = None
    w: Tensor | None = None


def _forward_steps(out: Outputs, given: Steps) -> None:
    import triton.language as tl

    beta, reset, v = given.beta, given.reset, readable(given.v)
    q, k = readable(given.q), readable(given.k)
    # the kernel does not read a missing tensor, so any pointer works
    r, w = (q if x is None else readable(x) for x in (given.r, given.w))
    batch, heads, dk, dv = given.state.shape
    is_complex = given.state.is_complex()
    state, last = given.state.contiguous(), out.last
    if is_complex:
        state, last = torch.view_as_real(state), torch.view_as_real(last)
    decay, decays, strides = _gates(given.log_decay, q)
    phase, phases, phase_strides = _gates(given.phase, q)
    block_k = power_of_2(dk)
    numbers = STATE // 2 if is_complex else STATE
    block_v = max(1, min(power_of_2(dv), numbers // block_k))
    with on_device(q.device):
        KERNELS.steps[(-(-dv // block_v) * batch * heads,)](
            q, k, v, q if beta is None else beta.contiguous(), r, w, decays, phases, mask(reset, q), state,
            out.y, last, q.shape[1], strides, phase_strides, HEADS=heads, DK=dk, DV=dv,
            DECAY=decay, PHASE=phase, DELTA=beta is not None, ERASE=given.r is not None,
            RESET=reset is not None, COMPLEX=is_complex, PARTS_Q=q.shape[-1] // dk,
            PARTS_K=k.shape[-1] // dk, BLOCK_K=block_k, BLOCK_V=block_v,
            WIDE=tl.float64 if state.dtype == torch.float64 else tl.float32,
            LAYOUTS=tuple(map(layout, (q, k, v, r, w))), num_warps=4, num_stages=1,
        )  # fmt: skip


def _gates(gates: Tensor | None, q: Tensor) -> tuple[int, Tensor, tuple[int, ...]]:
    """Return the kind of log decays or phases, their values (b, t, h, dk or 1), and three strides."""
    if gates is None:
        return NONE, q, (0, 0, 0)
    values = readable(gates).expand(*q.shape[:2], -1, -1)
    return CHANNEL if gates.shape[-1] > 1 else HEAD, values, values.stride()[:3]


steps = forward_op(
    "matrix_steps_triton", Steps, Outputs, lambda given, keep: (like(given.v), like(given.state)),
    _forward_steps, batch="q", follows={"last": "state"},
)  # fmt: skip


def steps_entry(run: Callable[[In], tuple[Tensor, Tensor]], auto: Callable[[In], bool]) -> Backend[In]:
    """Return the entry of `steps` for a table."""
    about = "the loop in one kernel, without gradients"
    return Backend("recurrent", "triton", run, about, auto=auto, differentiable=False, widen=False)


def contiguous_like(x: Tensor) -> Tensor:
    """Return uninitialised, contiguous memory for a tensor like x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Tiles(NamedTuple):
    """Work of a program per iteration: key channels, value channels, warps and stages.

    `registers` limits the registers per thread, and so how many programs run concurrently; None leaves it to
    the compiler.
    """

    block_k: int
    block_v: int
    warps: int
    stages: int
    registers: int | None = None


# by kernel; for 16-bit inputs and for wider inputs; for decays per head (or no decay) and per key channel,
# which need more registers
TILES = {
    "chunk_states": (
        (Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 2, 168)),
        (Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 2)),
    ),
    "mixings": ((Tiles(64, 16, 8, 1, 128),) * 2, (Tiles(64, 16, 8, 1),) * 2),
    "mixed": ((Tiles(64, 128, 4, 2),) * 2, (Tiles(32, 64, 4, 2),) * 2),
    "gate_gradients": ((Tiles(64, 64, 4, 3),) * 2, (Tiles(64, 64, 8, 2),) * 2),
}
# for 16-bit inputs, decays per head, and heads of at least so many channels: each block of channels reads the
# rows again, so that larger blocks read less
LARGE = 256
LARGE_TILES = {"chunk_states": Tiles(128, 128, 8, 2, 128), "mixed": Tiles(64, 256, 8, 2, 128)}


class Chunks:
    """The tensors in the layout of the kernels, and the division of the work."""

    def __init__(self, given: Matrix, chunk: int) -> None:
        q, v, log_decay, reset = given.q, given.v, given.log_decay, given.reset
        self.chunk, self.levels = chunk, chunk.bit_length() - 1
        self.q, self.k, self.v = map(readable, (q, given.k, v))
        (self.batch, self.time, self.heads, self.dk), self.dv = q.shape, v.shape[-1]
        self.chunks = -(-self.time // self.chunk)
        self.exact = q.element_size() > 2
        per_head = log_decay is None or log_decay.shape[-1] == 1
        self.large = not self.exact and per_head and min(self.dk, self.dv) >= LARGE
        self.wide = torch.promote_types(q.dtype, torch.float32)
        if log_decay is None and reset is not None:
            log_decay = torch.zeros(1, 1, self.heads, 1, dtype=self.wide, device=q.device)
        if log_decay is not None and reset is not None and q.dtype == torch.float64:
            # Triton 3.6 to 3.9 cannot compile float64 products whose operands depend on 8-bit reset flags
            log_decay, reset = log_decay.masked_fill(reset[..., None, None], RESET), None
        self.reset = reset is not None
        # the kernel of sums iterates over heads and channels at once
        log_decay = None if log_decay is None else log_decay.contiguous()
        self.decay, decays, self.strides = _gates(log_decay, self.q)
        self.gates = decays, mask(reset, self.q)
        if self.decay != NONE and not self.exact:
            self.gates = self._sums(*self.gates), self.gates[1]
        self.blocks_k = -(-self.dk // self._tiles("gate_gradients").block_k)

    def states(
        self, k: Tensor, v: Tensor, start: Tensor, end: Tensor, reverse: bool = False, weighed: bool = False
    ) -> Tensor:
        """Return the states before each chunk (b, h, chunks, dk, dv), and fill `end`, the last state.

        In reverse, these are the gradients of the states, computed from q and dy.
        """
        states = k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        tiles = self._tiles("chunk_states")
        blocks = -(-self.dk // tiles.block_k), self._blocks("chunk_states", self.dv)
        matrices = self.batch * self.heads
        pieces = max(1, min(PROGRAMS // max(math.prod(blocks) * matrices, 1), self.chunks))
        length = -(-self.chunks // pieces)
        pieces = -(-self.chunks // length)
        left, factors = start, start
        if pieces > 1:
            left = start.new_empty(matrices, pieces, self.dk, self.dv)
            factors = start.new_empty(matrices, pieces, self.dk)
        tensors = (k, v, *self.gates, start.contiguous(), left, factors, states, end)
        flags = {"REVERSE": reverse, "WEIGHED": weighed}
        for local in (True, False) if pieces > 1 else (False,):
            grid = *blocks, matrices * pieces
            self._run("chunk_states", grid, tensors, length, pieces, strided=(k, v), LOCAL=local, **flags)
        return states

    def mixings(
        self, matrices: Tensor, *, weigh: bool = False, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Fill A of all chunks (b, h, chunks, C, C); return e^P * q and e^R * k if `weigh`.

        `keys` replaces k.
        """
        keys = self.k if keys is None else keys
        read, written = (contiguous_like(x) if weigh else x for x in (self.q, keys))
        tensors = (self.q, keys, *self.gates, matrices, read, written)
        self.per_chunk("mixings", 1, *tensors, strided=tensors[:2], LEVELS=self.levels, WEIGH=weigh)
        return read, written

    def mixed(
        self,
        out: Tensor,
        *given: Tensor,
        reverse: bool = False,
        read: Tensor | None = None,
        more: Pair | None = None,
    ) -> None:
        """Fill y from v, the matrices and the states before the chunks.

        In reverse, fill dv from dy, the matrices and the gradients of the states after the chunks. `read` is
        e^P * q if it has been computed. `more` are further matrices, and the values (b, t, h, dv) that they
        multiply.
        """
        values, matrices, states = given
        q, flags = self.q if read is None else read, {"REVERSE": reverse, "WEIGHED": read is not None}
        flags["MORE"] = more is not None
        tensors = (q, self.k, values, *self.gates, matrices, states, *(more or (matrices, values)), out)
        self.per_chunk("mixed", self._blocks("mixed", self.dv), *tensors, strided=tensors[:3], **flags)

    def gate_gradients(self, out: Any, dy: Tensor, v: Tensor, *states: Tensor, passing: Tensor) -> None:
        """Fill `passing` and the gradients of q and k, from states and their gradients; see the kernel."""
        tensors = (self.q, self.k, v, dy, *self.gates, *states, self.q, out.q, out.k, passing, self.q)
        self.of_pairs(tensors)

    def of_pairs(
        self, tensors: tuple[Tensor, ...], *, correction: bool = False, early: bool = False,
        reads: bool = True, writes: bool = True,
    ) -> None:  # fmt: skip
        """Launch the kernel `gate_gradients` on its tensors."""
        flags = {"CORRECTION": correction, "EARLY": early, "READS": reads, "WRITES": writes}
        strided = tensors[:4]
        self.per_chunk(
            "gate_gradients", self.blocks_k, *tensors, strided=strided, LEVELS=self.levels, **flags
        )

    def decay_gradient(self, out: Tensor | None) -> Tensor:
        """Return memory for the gradients of decays, which `gate_gradients` fills; `out` if it fits."""
        width = {NONE: 0, HEAD: self.blocks_k, CHANNEL: self.dk}[self.decay]
        shape = *self.q.shape[:3], width
        if out is not None and self.decay == CHANNEL and out.shape == shape and out.dtype == self.wide:
            return out
        return self.q.new_empty(shape, dtype=self.wide)

    def sum_decays(self, out: Tensor | None, passing: Tensor) -> None:
        """Fill `out` with the sums over blocks of channels, and over steps that share a decay."""
        if out is not None and out is not passing:
            passing = passing.sum(-1, keepdim=True) if self.decay == HEAD else passing
            out.copy_(passing.sum_to_size(out.shape))

    def per_chunk(
        self, name: str, blocks: int, *tensors: Tensor, strided: Sequence[Tensor], **constants: Any
    ) -> None:
        """Run a kernel with a program for each block of channels, chunk, batch row and head.

        `strided` are the tensors whose `layout` the kernel takes.
        """
        self._run(name, (blocks, self.chunks, self.batch * self.heads), tensors, strided=strided, **constants)

    def _tiles(self, name: str) -> Tiles:
        tiles = TILES[name][self.exact][self.decay == CHANNEL]
        larger = LARGE_TILES.get(name) if self.large else None
        if larger is not None and (name != "chunk_states" or self._at_once(larger)):
            tiles = larger
        # double precision needs twice the registers
        part = 2 if self.q.dtype == torch.float64 else 1
        # in kernels with several products of 16 or 32 columns, Triton 3.6 to 3.7 reads beyond tiles (its
        # issue 11366), so small heads use wide tiles
        least = LEAST if name == "chunk_states" else 64 // part
        block_k = min(tiles.block_k // part, max(least, power_of_2(self.dk)))
        block_v = min(tiles.block_v // part, max(least, power_of_2(self.dv)))
        return tiles._replace(block_k=block_k, block_v=block_v)

    def _at_once(self, tiles: Tiles) -> bool:
        """Return whether blocks of states of this size occupy a GPU, all at once."""
        blocks = -(-self.dk // tiles.block_k) * -(-self.dv // tiles.block_v)
        return PROGRAMS <= blocks * self.batch * self.heads < 2 * PROGRAMS

    def _blocks(self, name: str, width: int) -> int:
        return -(-width // self._tiles(name).block_v)

    def _precision(self, tiles: Tiles) -> str:
        """Return the precision of float32 products on tensor cores: three tf32 products or one."""
        return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"

    def _kernel(self, name: str) -> Any:
        return getattr(GATES if name == "gate_gradients" else KERNELS, name)

    def _sums(self, decays: Tensor, reset: Tensor) -> Tensor:
        """Return running sums of log decays in each chunk, (b, t, h, dk or 1)."""
        width = decays.shape[-2] * decays.shape[-1]
        sums = torch.empty(decays.shape, dtype=torch.float32, device=decays.device)
        grid = -(-width // SUMS), self.chunks, self.batch
        if 0 not in grid:
            with on_device(decays.device):
                KERNELS.chunk_sums[(math.prod(grid),)](
                    decays, reset, sums, self.time, self.strides,
                    WIDTH=width, RESET=self.reset, CHUNK=self.chunk, BLOCK=SUMS, num_warps=4,
                )  # fmt: skip
        return sums

    def _run(
        self, name: str, grid: tuple[int, ...], tensors: tuple[Tensor, ...], *numbers: int,
        strided: Sequence[Tensor], **constants: Any,
    ) -> None:  # fmt: skip
        if 0 in grid:
            return
        import triton.language as tl
        from triton.runtime.errors import OutOfResources

        tiles, dtype = self._tiles(name), self.q.dtype
        # only the NVIDIA backend supports this option
        options = {"maxnreg": tiles.registers} if tiles.registers and torch.version.cuda else {}
        # exclusive sums are computed as sums minus the own term, which must be rounded as in the sum
        fusion = not (self.exact and name == "gate_gradients")
        # retry with fewer pipeline stages if shared memory is too small
        for stages in range(tiles.stages, 0, -1):
            try:
                # a kernel that does not fit raises before it is launched
                with on_device(self.q.device):
                    self._kernel(name)[(math.prod(grid),)](
                        *tensors, self.time, self.chunks, self.strides, *numbers,
                        HEADS=self.heads, DK=self.dk, DV=self.dv, DECAY=self.decay, RESET=self.reset,
                        EXACT=self.exact, CHUNK=self.chunk, BLOCK_K=tiles.block_k, BLOCK_V=tiles.block_v,
                        PRECISION=self._precision(tiles) if dtype == torch.float32 else "ieee",
                        WIDE=tl.float64 if dtype == torch.float64 else tl.float32,
                        LAYOUTS=tuple(map(layout, strided)), num_warps=tiles.warps, num_stages=stages,
                        enable_fp_fusion=fusion, **options, **constants,
                    )  # fmt: skip
                return
            except OutOfResources:
                if stages == 1:
                    raise


def of_chunks(q: Tensor, chunk: int, *, heads: int | None = None) -> Memory:
    """Return the memory of a matrix for each chunk (b, h, chunks, C, C)."""
    batch, time, all_heads, _ = q.shape
    return Memory((batch, all_heads if heads is None else heads, -(-time // chunk), chunk, chunk), q.dtype)


def _kept(given: Matrix, keep: bool) -> Memory:
    """Return the memory of the chunks' matrices A, saved if decays are per channel."""
    per_head = given.log_decay is None or given.log_decay.shape[-1] == 1
    return of_chunks(given.q, CHUNK, heads=0 if per_head else None)


def _forward(out: Values, given: Matrix) -> None:
    call = Chunks(given, CHUNK)
    # differences of sums are computed once and shared by all kernels that use them
    weighed = call.decay == CHANNEL and not call.exact
    read, written = call.q, call.k
    if call.decay == CHANNEL:
        read, written = call.mixings(out.kept, weigh=weighed)
    states = call.states(written, call.v, given.state, out.last, weighed=weighed)
    call.mixed(out.y, call.v, out.kept, states, read=read if weighed else None)


def _adjoint(out: Gradients, given: Matrix, kept: Values, d: Values) -> None:
    """Fill the gradients.

    The states before the chunks are recomputed: saving them would need as much memory as q, k, v and y.
    """
    call, dy = Chunks(given, CHUNK), readable(d.y.to(given.v.dtype))
    gradients = call.states(call.q, dy, d.last, out.state, reverse=True)
    call.mixed(out.v, dy, kept.kept, gradients, reverse=True)
    last = torch.empty_like(out.state)
    states = call.states(call.k, call.v, given.state, last)
    passing = call.decay_gradient(out.log_decay)
    call.gate_gradients(out, dy, call.v, states, gradients, passing=passing)
    call.sum_decays(out.log_decay, passing)
    if out.phase is not None:
        after = torch.cat([states[:, :, 1:], last[:, :, None].to(states.dtype)], dim=2)
        found = phase_gradient((call.q, out.q), (call.k, out.k), (after, gradients), out.phase, CHUNK)
        out.phase.copy_(found)


def _output(given: Matrix) -> Space:
    return like(given.v, accumulation(given.v.dtype) if given.wide else None)


def phase_gradient(q: Pair, k: Pair, states: Pair, phase: Tensor, chunk: int) -> Tensor:
    """Return the gradient of phases.

    The phase of step j rotates all reads at steps n >= j minus the writes there, and the last state.

    Args:
        q: q of `real_form` (b, t, h, 2 dk), and its gradient.
        k: likewise.
        states: the states after each chunk (b, h, chunks, 2 dk, dv), and their gradients.
        phase: (b or 1, t or 1, h, dk or 1).
        chunk: number of steps per sum; sums over a long sequence would lose digits.
    """
    turned = -_torque(*q) - _torque(*k)
    going_on = _torque(*(x.movedim(-2, -1) for x in states)).sum(-2).movedim(1, 2)
    batch, time, *channels = turned.shape
    missing = -time % chunk
    turned = torch.cat([turned, turned.new_zeros(batch, missing, *channels)], dim=1) if missing else turned
    sums = turned.unflatten(1, (-1, chunk)).flip(2).cumsum(2).flip(2) + going_on[:, :, None]
    # torch.compile expects a tensor without padding
    return sums.flatten(1, 2)[:, :time].sum_to_size(phase.shape).to(phase.dtype).contiguous()


def _torque(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of an angle that rotates x (..., 2 dk), given as (real, imaginary)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    real, imaginary = x.to(wide).chunk(2, dim=-1)
    of_real, of_imaginary = gradient.to(wide).chunk(2, dim=-1)
    return of_imaginary * real - of_real * imaginary


chunkwise = partial(kernel, inputs=Matrix, kept=_kept, forward=_forward, adjoint=_adjoint, output=_output)
"""Returns the kernel of `gate_loop`, from a `name` and its `twin`; see `linrec.ops.matrix.kernel`."""


def aligned(run: Callable[[Matrix], Any]) -> Callable[[Matrix], Any]:
    """Return a kernel whose rows of values begin at multiples of 16 bytes: values get columns of zeros.

    GPUs load other rows number by number; 257 columns would take four times as long as 264. Few columns stay
    as they are, because the padding would be more than an eighth of them.
    """

    def padded(given: Matrix) -> tuple[Tensor, Tensor]:
        v, state = given.v, given.state
        columns = v.shape[-1]
        missing = -columns % (16 // v.element_size())
        if not 0 < 8 * missing <= columns:
            return tuple(run(given)[:2])
        v, state = (functional.pad(x, (0, missing)) for x in (v, state))
        y, last = run(given._replace(v=v, state=state))[:2]
        return y[..., :columns], last[..., :columns]

    return padded
