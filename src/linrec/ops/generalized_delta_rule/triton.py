"""The chunkwise mode of the generalised delta rule on GPUs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.isolation import isolated
from linrec.ops.core.kernel import Gradients, Memory
from linrec.ops.delta_rule.triton import SMALL, DeltaChunks, chunk_of
from linrec.ops.generalized_delta_rule.torch import matrix, twin, unread
from linrec.ops.matrix import Matrix, kernel
from linrec.ops.matrix import triton as chunks
from linrec.ops.matrix.triton import contiguous_like


class Outputs(NamedTuple):
    """Outputs of the kernel: y, the last state, and the matrices T and M of all chunks, for the adjoint."""

    y: Tensor
    last: Tensor
    inverses: Tensor
    writes: Tensor


def _kept(given: Matrix, keep: bool) -> Memory:
    return chunks.of_chunks(given.q, chunk_of(given.q, given.log_decay, most=SMALL))


def _forward(out: Outputs, given: Matrix) -> None:
    call = _Chunks(given)
    read, values = call.erasures(out.inverses, out.writes)
    states, erased, _ = call.corrected(given.state, out.last, read, values)
    del read, values
    more = call.matrices(call.keys), erased
    call.mixed(out.y, call.v, call.direct_matrices(), states, more=more)


def _adjoint(out: Gradients, given: Matrix, kept: Outputs, d: Outputs) -> None:
    call, dy = _Chunks(given), chunks.readable(d.y)
    read, values = call.erasures(kept.inverses, kept.writes, known=True)
    # intermediate tensors are deleted after their last use to reduce the peak memory
    last = torch.empty_like(out.state)
    states, erased, transitions = call.corrected(given.state, last, read, values)
    del values, last
    gradients, derased = call.corrected_gradients(dy, d.last, out.state, read, transitions)
    del read
    call.mixed(out.v, dy, call.direct_matrices(), gradients, reverse=True, more=(kept.writes, derased))
    through, _ = call.of_values(None, kept.inverses, derased, call.v)
    del derased
    passing = call.decay_gradient(out.log_decay)
    of_k, of_w = (call.k, call.v, out.k), (call.keys, erased, out.w)
    for (q, dq, dy_or_e, early), (keys, v, dk) in (
        ((call.q, out.q, dy, False), of_k), ((call.q, out.q, dy, False), of_w),
        ((call.r, out.r, through, True), of_k), ((call.r, out.r, through, True), of_w),
    ):  # fmt: skip
        tensors = (q, keys, v, dy_or_e, *call.gates, states, gradients, q, dq, dk, passing, q)
        call.of_pairs(tensors, early=early, reads=keys is call.k, writes=not early)
    call.sum_decays(out.log_decay, passing)


class _Chunks(DeltaChunks):
    """The kernel calls of the generalised delta rule: w are the keys of the erased values."""

    def __init__(self, given: Matrix) -> None:
        super().__init__(given, chunk_of(given.q, given.log_decay, most=SMALL))
        assert given.r is not None and given.w is not None
        self.r, self.keys = map(chunks.readable, (given.r, given.w))
        self.more = self.k, self.v

    def erasures(self, inverses: Tensor, writes: Tensor, *, known: bool = False) -> tuple[Tensor, Tensor]:
        """Return P and U; compute and store T and M unless they are known."""
        read, values = contiguous_like(self.k), contiguous_like(self.v)
        strided = self.r, self.keys, self.k, self.v
        tensors = (*strided, *self.gates, inverses, writes, read, values)
        self.per_chunk("erasures", 1, *tensors, strided=strided, LEVELS=self.levels, KNOWN=known)
        return read, values

    def direct_matrices(self) -> Tensor:
        """Return A for q and k, if `mixed` reads it."""
        return self.matrices(self.k) if self.decay == chunks.CHANNEL else self.q


_chunkwise = kernel(
    "generalized_delta_rule_chunkwise_triton", Matrix, twin, _kept, _forward, _adjoint, outputs=Outputs
)
# inputs of any precision
chunkwise: Any = isolated(lambda given: _chunkwise(matrix(unread(given)))[:2])
