"""The chunkwise mode of the delta rule on GPUs."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.isolation import isolated
from linrec.ops.core.kernel import Gradients, Memory
from linrec.ops.delta_rule.torch import twin
from linrec.ops.kernels.launch import Kernels, power_of_2
from linrec.ops.matrix import Matrix, Values, kernel
from linrec.ops.matrix import triton as chunks
from linrec.ops.matrix.triton import LEAST, Chunks, Pair, Tiles, contiguous_like

KERNELS = Kernels("matrix.delta_triton")
LARGEST = 512
"""Largest number of key channels per head: a program holds all of them."""


def _kept(given: Matrix, keep: bool) -> Memory:
    """Return the memory for the chunks' inverses T; the adjoint recomputes all other intermediates."""
    return chunks.of_chunks(given.q, chunk_of(given.q, given.log_decay))


def _forward(out: Values, given: Matrix) -> None:
    call = _Chunks(given)
    states, corrected, _ = call.corrected(given.state, out.last, *call.corrections(out.kept))
    matrices = call.q.new_empty(call.batch, 0, 0, 0, 0)
    if call.decay == chunks.CHANNEL:
        matrices = torch.empty_like(out.kept)
        call.mixings(matrices)
    call.mixed(out.y, corrected, matrices, states)


def _adjoint(out: Gradients, given: Matrix, kept: Values, d: Values) -> None:
    call, dy, inverses = _Chunks(given), chunks.readable(d.y), kept.kept
    read, values = call.corrections(inverses, known=True)
    # intermediate tensors are deleted after their last use to reduce the peak memory
    last = torch.empty_like(out.state)
    states, corrected, transitions = call.corrected(given.state, last, read, values)
    del values, last
    gradients, dcorrected = call.corrected_gradients(dy, d.last, out.state, read, transitions)
    del read
    passing = call.decay_gradient(out.log_decay)
    call.gate_gradients(out, dy, corrected, states, gradients, passing=passing)
    del gradients
    through, of_values = call.of_values(call.beta, inverses, dcorrected, out.v)
    del dcorrected
    of_keys = call.correction_gradients(through, corrected, states, out.k, passing)
    out.beta.copy_(of_values.sum(-1) + of_keys.sum(-1))
    call.sum_decays(out.log_decay, passing)


class DeltaChunks(Chunks):
    """The kernel calls of rules that correct, in addition to `gate_loop`'s.

    Attributes:
        keys: the keys of corrected values.
        more: further keys and the values that they write, or nothing.
    """

    def __init__(self, given: Matrix, chunk: int) -> None:
        super().__init__(given, chunk)
        self.keys: Tensor = self.k
        self.more: tuple[Tensor, ...] = ()

    def corrected(
        self, start: Tensor, end: Tensor, read: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the states before the chunks, the corrected values W, and the transitions of segments.

        Fills `end`, the state after the last chunk. If there are few programs, time is divided into segments.
        A segment maps its initial state S to M S + N; the transitions M are (b * h, segments, dk, dk).
        """
        states = self.k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        corrected = contiguous_like(self.v)
        more, flag = self.more or (self.keys, values), {"MORE": bool(self.more)}
        given, found, transitions = (
            (self.keys, read, values, *more, *self.gates),
            (states, end, corrected),
            None,
        )
        strided = self.keys, *more
        if self.pieces[0] > 1:
            left, transitions = self._of_pieces(self.dv), self._of_pieces(self.dk)
            blocks = sum(self._blocks("delta_states", width) for width in (self.dv, self.dk))
            tensors = (*given, start, left, transitions, *found)
            self._over_time("delta_states", blocks, tensors, strided, local=True, **flag)
            start = _chained(start, transitions, left)
        # tensors that only a local pass writes may be any pointer here
        tensors = (*given, start.contiguous(), start, start, *found)
        self._over_time("delta_states", self._blocks("delta_states", self.dv), tensors, strided, **flag)
        return states, corrected, transitions

    def corrected_gradients(
        self, dy: Tensor, dlast: Tensor, dstate: Tensor, read: Tensor, transitions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states after the chunks, and dW; fill `dstate`, the initial state's."""
        gradients = self.k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        dcorrected = contiguous_like(self.v)
        matrices = self.matrices(self.keys)
        given = (self.q, self.keys, read, dy, matrices, *self.gates)
        found = gradients, dstate, dcorrected
        strided = self.q, self.keys, dy
        blocks = self._blocks("delta_state_gradients", self.dv)
        if transitions is not None:
            left = self._of_pieces(self.dv)
            tensors = (*given, dlast, left, *found)
            self._over_time("delta_state_gradients", blocks, tensors, strided, local=True)
            dlast = _chained(dlast, transitions.mT.flip(1), left.flip(1)).flip(1)
        tensors = (*given, dlast.contiguous(), dlast, *found)
        self._over_time("delta_state_gradients", blocks, tensors, strided)
        return gradients, dcorrected

    def matrices(self, keys: Tensor) -> Tensor:
        """Return A of all chunks for q and these keys."""
        matrices = self.q.new_empty(self.batch, self.heads, self.chunks, self.chunk, self.chunk)
        self.mixings(matrices, keys=keys)
        return matrices

    def of_values(self, beta: Tensor | None, inverses: Tensor, dcorrected: Tensor, dv: Tensor) -> Pair:
        """Return E = T^T dW; with `beta`, fill `dv` and return the values' part of the gradient of `beta`."""
        through, blocks = contiguous_like(self.v), self._blocks("value_gradients", self.dv)
        of_beta = self._of_steps(0 if beta is None else blocks)
        given = self.v if beta is None else beta
        tensors = (inverses, dcorrected, self.v, given, through, dv, of_beta)
        strengths = beta is not None
        self.per_chunk("value_gradients", blocks, *tensors, strided=(self.v,), STRENGTHS=strengths)
        return through, of_beta

    def _of_steps(self, blocks: int) -> Tensor:
        return self.q.new_zeros(*self.q.shape[:3], blocks, dtype=self.wide)

    @functools.cached_property
    def pieces(self) -> tuple[int, int]:
        """Return the number of segments into which time is divided, and the number of chunks per segment."""
        programs = self.batch * self.heads * self._blocks("delta_states", self.dv)
        most = chunks.PROGRAMS // max(programs, 1)
        pieces = min(most, self.chunks // LEAST_LENGTH)
        # segments need two passes over time, so two segments would gain nothing
        length = -(-self.chunks // pieces) if pieces > 2 else max(self.chunks, 1)
        return max(-(-self.chunks // length), 1), length

    def _of_pieces(self, width: int) -> Tensor:
        return self.q.new_empty(self.batch * self.heads, self.pieces[0], self.dk, width, dtype=self.wide)

    def _over_time(
        self,
        name: str,
        blocks: int,
        tensors: tuple[Tensor, ...],
        strided: Sequence[Tensor],
        local: bool = False,
        **flags: bool,
    ) -> None:
        pieces, length = self.pieces
        grid = blocks, pieces, self.batch * self.heads
        self._run(name, grid, tensors, length, pieces, strided=strided, LOCAL=local, **flags)

    def _tiles(self, name: str) -> Tiles:
        if name not in TILES:
            return super()._tiles(name)
        tiles = TILES[name][self.exact]
        # as in `Chunks._tiles`
        part = 2 if self.q.dtype == torch.float64 else 1
        block_k, block_v = tiles.block_k // part, min(tiles.block_v, max(64, power_of_2(self.dv)))
        if name.startswith("delta"):
            # a program needs all key channels of a state, because W reads all of them
            block_k = max(block_k, power_of_2(self.dk))
            if not self.exact and chunks.PROGRAMS // 6 < self._programs(block_v) < chunks.PROGRAMS // 2:
                # twice the programs of half the width are enough to leave time undivided
                block_v = min(block_v, NARROW)
            if block_k > 128 or (name == "delta_state_gradients" and self._few_programs(block_v)):
                # large states need the registers of more warps; with few programs, more warps reduce latency
                tiles = tiles._replace(warps=8)
        while block_k > 256 and block_k * block_v * self.q.element_size() > LARGE:
            # a state is an operand of products, so it occupies shared memory too
            block_v //= 2
        return tiles._replace(block_k=block_k, block_v=block_v)

    def _precision(self, tiles: Tiles) -> str:
        # a single tf32 product would need its operands in shared memory, which is too small for these
        return "tf32x3" if tiles.block_k > 128 else super()._precision(tiles)

    def _few_programs(self, block_v: int) -> bool:
        return self._programs(block_v) * self.pieces[0] < chunks.PROGRAMS

    def _programs(self, block_v: int) -> int:
        return self.batch * self.heads * -(-self.dv // block_v)

    def _kernel(self, name: str) -> Any:
        return getattr(KERNELS, name) if name in TILES else super()._kernel(name)


class _Chunks(DeltaChunks):
    """The kernel calls of the delta rule."""

    def __init__(self, given: Matrix) -> None:
        super().__init__(given, chunk_of(given.q, given.log_decay))
        assert given.beta is not None
        self.beta = given.beta.contiguous()

    def corrections(self, inverses: Tensor, *, known: bool = False) -> tuple[Tensor, Tensor]:
        """Return P and U; compute and store `inverses` unless they are known."""
        read, values = contiguous_like(self.k), contiguous_like(self.v)
        tensors = (self.k, self.v, self.beta, *self.gates, inverses, read, values)
        flags = {"LEVELS": self.levels, "KNOWN": known}
        self.per_chunk("corrections", 1, *tensors, strided=(self.k, self.k, self.v), **flags)
        return read, values

    def correction_gradients(
        self, through: Tensor, corrected: Tensor, states: Tensor, dk: Tensor, passing: Tensor
    ) -> Tensor:
        """Add the corrections' part of the gradients to `dk` and `passing`; return their part of dbeta."""
        of_keys = self._of_steps(self.blocks_k)
        given = (self.k, self.k, corrected, through, *self.gates, states, states, self.beta)
        self.of_pairs((*given, dk, dk, passing, of_keys), correction=True, writes=False)
        return of_keys


def chunk_of(q: Tensor, log_decay: Tensor | None, most: int | None = None) -> int:
    """Return the number of steps per chunk: below 64 if 64 keys do not fit into shared memory.

    `most` is the largest number of bytes of a chunk's keys.
    """
    chunk, row = chunks.CHUNK, power_of_2(q.shape[-1]) * q.element_size()
    weighed = log_decay is not None and log_decay.shape[-1] > 1 and q.element_size() > 2
    if most is None:
        most = SMALL if q.shape[-1] > 256 or (weighed and q.shape[-1] > 128) else LARGE
    while chunk > LEAST and chunk * row > most:
        chunk //= 2
    return chunk


def _chained(start: Tensor, transitions: Tensor, left: Tensor) -> Tensor:
    """Return S before each segment (b * h, segments, dk, dv): first `start`, then M S + N of the previous."""
    states = [start.reshape(left[:, 0].shape).to(left.dtype)]
    for piece in range(left.shape[1] - 1):
        states.append(torch.baddbmm(left[:, piece], transitions[:, piece], states[-1]))
    return torch.stack(states, 1)


# largest number of bytes of a chunk's keys: a kernel holds three such tiles, and their weights
LARGE, SMALL = 1 << 16, 1 << 15
# value channels of a program, where twice the programs make segments unnecessary
NARROW = 32
# smallest number of chunks per segment: joining two segments takes as long as a few chunks
LEAST_LENGTH = 16
# by kernel: for 16-bit inputs, and for wider inputs
TILES = {
    "corrections": (Tiles(64, 64, 4, 2, 168), Tiles(64, 64, 8, 1)),
    "erasures": (Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
    "value_gradients": (Tiles(64, 128, 4, 1), Tiles(64, 64, 8, 1)),
    "delta_states": (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 1)),
    "delta_state_gradients": (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 1)),
}


_chunkwise = kernel("delta_rule_chunkwise_triton", Matrix, twin, _kept, _forward, _adjoint)
# inputs of any precision
chunkwise = isolated(lambda given: _chunkwise(Matrix(*given))[:2])
