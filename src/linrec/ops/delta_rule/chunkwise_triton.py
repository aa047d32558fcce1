"""The chunkwise mode of the delta rule on GPUs."""

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops import matrix_torch, vmap
from linrec.ops.core.isolation import isolated
from linrec.ops.gate_loop import chunkwise_triton_chunks
from linrec.ops.gate_loop.chunkwise_triton_chunks import LEAST, Chunks, Tiles
from linrec.ops.kernels.launch import power_of_2
from linrec.ops.operators import differentiated, operator

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@isolated(log_decay=4)
def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; arguments and results as in `reference.py`, q, k and v in any precision."""
    inputs = (q, k, v, beta, log_decay, state, reset)
    run = DeltaRule.apply if differentiated(*inputs[:6]) else DeltaRule.forward
    y, last, _ = run(*inputs)
    return y, last


class DeltaRule(torch.autograd.Function):
    """y, last, inverses = DeltaRule.apply(q, k, v, beta, log_decay, state, cut).

    The inverses T of the chunks are kept for the adjoint, and have no gradient of their own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
        cut: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernels."""
        return forward(q, k, v, beta, log_decay, state, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs and the inverses: all else is made again."""
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernels, or torch operations where the gradient is to be differentiated again."""
        *inputs, inverses = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            *given, state, cut = inputs
            with_phase = *needed[:5], False, needed[5]
            found = matrix_torch.gradients(with_phase, (*given, None, state, cut), dy, dlast)
            return (*found[:5], found[6], None)
        gradients = backward(*inputs, inverses, dy, dlast)
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None)


@operator("delta_rule_chunkwise_triton")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (b, t, h, dv), the last state (b, h, dk, dv), and the inverses T (b, h, chunks, C, C)."""
    chunks = _DeltaChunks(q, k, v, beta, log_decay, cut)
    inverses = _inverses(q, log_decay)
    states, last, corrected, _ = chunks.corrected(state, *chunks.corrections(inverses))
    return chunks.mixed(corrected, chunks.matrices(), states), last, inverses


@torch.library.register_fake(forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape), _inverses(q, log_decay)


def _inverses(q: Tensor, log_decay: Tensor | None) -> Tensor:
    chunk = chunk_of(q, log_decay)
    batch, time, heads, _ = q.shape
    return q.new_empty(batch, heads, -(-time // chunk), chunk, chunk)


@operator("delta_rule_chunkwise_triton_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    inverses: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of `log_decay` is empty where there is none."""
    chunks = _DeltaChunks(q, k, v, beta, log_decay, cut)
    dy = dy.contiguous()
    read, values = chunks.corrections(inverses, known=True)
    # what nothing reads any more makes room for what follows
    states, _, corrected, transitions = chunks.corrected(state, read, values)
    del values
    gradients, dstate, dcorrected = chunks.corrected_gradients(dy, dlast, read, transitions)
    del read
    passing = chunks.decay_gradient()
    dq, dk = chunks.gate_gradients(dy, corrected, states, gradients, passing)
    del gradients
    through, dv, of_values = chunks.value_gradients(inverses, dcorrected)
    del dcorrected
    of_keys = chunks.correction_gradients(through, corrected, states, dk, passing)
    dbeta = (of_values.sum(-1) + of_keys.sum(-1)).to(beta.dtype)
    ddecay = q.new_empty(0) if log_decay is None else chunks.summed(passing, log_decay)
    return dq, dk, dv, dbeta, ddecay, dstate


@torch.library.register_fake(backward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    inverses: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dq, dk, dv, dbeta, dstate = (x.new_empty(x.shape) for x in (q, k, v, beta, state))
    return dq, dk, dv, dbeta, ddecay, dstate


class _DeltaChunks(Chunks):
    """The calls that the delta rule has beyond those of `gate_loop`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        cut: Tensor | None,
    ) -> None:
        super().__init__(q, k, v, log_decay, cut, chunk_of(q, log_decay))
        self.beta = beta.contiguous()

    def corrections(self, inverses: Tensor, *, known: bool = False) -> tuple[Tensor, Tensor]:
        """Return P and U, and fill `inverses`, unless they are known."""
        read, values = torch.empty_like(self.k), torch.empty_like(self.v)
        tensors = (self.k, self.v, self.beta, *self.gates, inverses, read, values)
        self.per_chunk("corrections", 1, *tensors, LEVELS=self.levels, KNOWN=known)
        return read, values

    def corrected(
        self, start: Tensor, read: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """States before the chunks and after the last, the corrected values W, and the pieces' transitions.

        Few programs divide time into pieces, each of which makes M S + N of the state S before it; the
        transitions M are (b * h, pieces, dk, dk).
        """
        states = self.k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        end = torch.empty_like(start, memory_format=torch.contiguous_format)
        corrected = torch.empty_like(self.v)
        given, found, transitions = (self.k, read, values, *self.gates), (states, end, corrected), None
        if self.pieces[0] > 1:
            left, transitions = self._of_pieces(self.dv), self._of_pieces(self.dk)
            blocks = sum(self._blocks("delta_states", width) for width in (self.dv, self.dk))
            tensors = (*given, start, left, transitions, *found)
            self._over_time("delta_states", blocks, tensors, local=True)
            start = _chained(start, transitions, left)
        # what only a local run writes can be any pointer
        tensors = (*given, start.contiguous(), start, start, *found)
        self._over_time("delta_states", self._blocks("delta_states", self.dv), tensors)
        return *found, transitions

    def corrected_gradients(
        self, dy: Tensor, dlast: Tensor, read: Tensor, transitions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the states after the chunks and before the first, and dW."""
        gradients = self.k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        end = torch.empty_like(dlast, memory_format=torch.contiguous_format)
        dcorrected = torch.empty_like(self.v)
        given = (self.q, self.k, read, dy, self.mixings()[0], *self.gates)
        found = gradients, end, dcorrected
        blocks = self._blocks("delta_state_gradients", self.dv)
        if transitions is not None:
            left = self._of_pieces(self.dv)
            self._over_time("delta_state_gradients", blocks, (*given, dlast, left, *found), local=True)
            dlast = _chained(dlast, transitions.mT.flip(1), left.flip(1)).flip(1)
        tensors = (*given, dlast.contiguous(), dlast, *found)
        self._over_time("delta_state_gradients", blocks, tensors)
        return found

    def value_gradients(self, inverses: Tensor, dcorrected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return E, dV, and the part of the gradient of beta that comes from the values."""
        through, dv = torch.empty_like(self.v), torch.empty_like(self.v)
        blocks = -(-self.dv // self._tiles("value_gradients").block_v)
        of_values = self._of_steps(blocks)
        tensors = (inverses, dcorrected, self.v, self.beta, through, dv, of_values)
        self.per_chunk("value_gradients", blocks, *tensors)
        return through, dv, of_values

    def correction_gradients(
        self, through: Tensor, corrected: Tensor, states: Tensor, dk: Tensor, passing: Tensor
    ) -> Tensor:
        """Add what the corrections read to `dk` and `passing`, and return its part of beta's gradient."""
        of_keys = self._of_steps(self.blocks_k)
        given = (self.k, self.k, corrected, through, *self.gates, states, states, self.beta)
        tensors = (*given, dk, dk, passing, of_keys)
        constants = {"LEVELS": self.levels, "CORRECTION": True}
        self.per_chunk("gate_gradients", self.blocks_k, *tensors, **constants)
        return of_keys

    def _of_steps(self, blocks: int) -> Tensor:
        return self.q.new_zeros(*self.q.shape[:3], blocks, dtype=self.wide)

    @functools.cached_property
    def pieces(self) -> tuple[int, int]:
        """Into how many pieces programs divide time, and how many chunks a piece has."""
        programs = self.batch * self.heads * self._blocks("delta_states", self.dv)
        most = chunkwise_triton_chunks.PROGRAMS // max(programs, 1)
        pieces = min(most, self.chunks // LEAST_LENGTH)
        # in two passes over time, two pieces would gain nothing
        length = -(-self.chunks // pieces) if pieces > 2 else max(self.chunks, 1)
        return max(-(-self.chunks // length), 1), length

    def _of_pieces(self, width: int) -> Tensor:
        return self.q.new_empty(self.batch * self.heads, self.pieces[0], self.dk, width, dtype=self.wide)

    def _blocks(self, name: str, width: int) -> int:
        return -(-width // self._tiles(name).block_v)

    def _over_time(self, name: str, blocks: int, tensors: tuple[Tensor, ...], *, local: bool = False) -> None:
        pieces, length = self.pieces
        grid = blocks, pieces, self.batch * self.heads
        self._run(name, grid, tensors, length, pieces, LOCAL=local)

    def _tiles(self, name: str) -> Tiles:
        if name not in TILES:
            return super()._tiles(name)
        tiles = TILES[name][self.exact]
        # as in `Chunks._tiles`
        part = 2 if self.q.dtype == torch.float64 else 1
        block_k = tiles.block_k // part
        if name.startswith("delta"):
            # a state is whole in its key channels, for W reads all of them
            block_k = max(block_k, power_of_2(self.dk))
            if block_k > 128 or (name == "delta_state_gradients" and self._few_programs(tiles.block_v)):
                # large states need the registers of more warps, and few programs wait for each product
                tiles = tiles._replace(warps=8)
        block_v = min(tiles.block_v, max(64, power_of_2(self.dv)))
        while block_k > 256 and block_k * block_v * self.q.element_size() > LARGE:
            # a state is a factor of products, which lies in shared memory too
            block_v //= 2
        return tiles._replace(block_k=block_k, block_v=block_v)

    def _precision(self, tiles: Tiles) -> str:
        # one product takes its factors from shared memory, which has no room for so many channels
        return "tf32x3" if tiles.block_k > 128 else super()._precision(tiles)

    def _few_programs(self, block_v: int) -> bool:
        programs = self.batch * self.heads * -(-self.dv // block_v) * self.pieces[0]
        return programs < chunkwise_triton_chunks.PROGRAMS

    def _kernel(self, name: str) -> Any:
        return getattr(_kernels(), name) if name in TILES else super()._kernel(name)


def chunk_of(q: Tensor, log_decay: Tensor | None) -> int:
    """Return the steps of a chunk: below 64 where that many keys would not fit into shared memory."""
    chunk, row = chunkwise_triton_chunks.CHUNK, power_of_2(q.shape[-1]) * q.element_size()
    weighed = log_decay is not None and log_decay.shape[-1] > 1 and q.element_size() > 2
    most = SMALL if q.shape[-1] > 256 or (weighed and q.shape[-1] > 128) else LARGE
    while chunk > LEAST and chunk * row > most:
        chunk //= 2
    return chunk


def _chained(start: Tensor, transitions: Tensor, left: Tensor) -> Tensor:
    """S of each piece (b * h, pieces, dk, dv): the first one's is `start`, the next is M S + N."""
    states = [start.reshape(left[:, 0].shape).to(left.dtype)]
    for piece in range(left.shape[1] - 1):
        states.append(torch.baddbmm(left[:, piece], transitions[:, piece], states[-1]))
    return torch.stack(states, 1)


# bytes of a chunk's keys, at most: three such tiles meet in a kernel, and beside them what weighs them
LARGE, SMALL = 1 << 16, 1 << 15
# chunks of a piece of time at least: joining two pieces takes as long as a few chunks
LEAST_LENGTH = 16
# by kernel: inputs of 16 bits, and wider ones
TILES = {
    "corrections": (Tiles(64, 64, 4, 2, 168), Tiles(64, 64, 8, 1)),
    "value_gradients": (Tiles(64, 128, 4, 1), Tiles(64, 64, 8, 1)),
    "delta_states": (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 1)),
    "delta_state_gradients": (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 1)),
}


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.matrix import delta_triton as chunkwise_triton_kernels

    return chunkwise_triton_kernels


# autograd asks for it at every call, and making it takes longer than a small recurrence
DeltaRule.forward.__signature__ = inspect.signature(DeltaRule.forward)  # type: ignore[attr-defined]


vmap.register(forward, backward)
