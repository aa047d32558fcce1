"""The generalised delta rule in torch operations: step by step, and in chunks.

A step adds k_n v_n^T + w_n z_n^T to the decayed state, with the erased value z_n = -S_{n-1}^T r_n. So the
rule is `gate_loop` with two keys and two values per step. Within a chunk, with the state S before it:

    z_n = -S^T A_{1..n-1} r_n - sum_{m<n} (v_m k_m^T + z_m w_m^T) A_{m+1..n-1} r_n

This is a triangular system for all z_n, as in `linrec.ops.delta_rule.torch`: its solution is Z = U - P S, and
the loop over chunks is the same. r_n reads the state before the decay of its step, so the decays in the
system end at step n-1.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.checks import State
from linrec.ops.core.isolation import isolated
from linrec.ops.core.precision import widened
from linrec.ops.delta_rule.torch import CHUNK, chunk_states
from linrec.ops.matrix import Matrix, segments


class GeneralizedDeltaRule(NamedTuple):
    """Canonical inputs of the backends.

    Attributes:
        q: (b, t, h, dk).
        k: (b, t, h, dk).
        v: (b, t, h, dv).
        r: (b, t, h, dk).
        w: (b, t, h, dk).
        log_decay: log a, None or (b or 1, t or 1, h, dk or 1).
        state: S_0 (b, h, dk, dv) in the accumulation dtype.
        reset: None or (b, t) bool.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    w: Tensor
    log_decay: Tensor | None
    state: State
    reset: Tensor | None


def recurrent(given: GeneralizedDeltaRule) -> tuple[Tensor, Tensor]:
    """Erase the value that r reads, and write v: O(dk dv) work per step.

        z_n = -S_{n-1}^T r_n,    S_n = diag(a_n) S_{n-1} + w_n z_n^T + k_n v_n^T

    Without gradients, memory does not grow with time.
    """
    *vectors, log_decay, state, reset = given
    of_time = segments.of_steps(log_decay, None, reset, given.q.shape[1])
    rows = (x[..., None, :].unbind(1) for x in vectors)
    outputs = []
    for q_n, k_n, v_n, r_n, w_n, a_n, cut in zip(*rows, *of_time, strict=True):
        state = state if cut is None else state.masked_fill(cut, 0)
        erased = r_n @ state
        state = (state if a_n is None else a_n * state) - w_n.mT * erased + k_n.mT * v_n
        outputs.append((q_n @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state


@isolated
def chunkwise(given: GeneralizedDeltaRule) -> tuple[Tensor, Tensor]:
    """Solve triangular systems within chunks, and run the recurrence over chunks."""
    *vectors, log_decay, state, reset = unread(given)
    q, k, v, r, w = (x.transpose(1, 2) for x in vectors)
    t = q.shape[2]
    log_decay, _ = segments.gates(log_decay, None, reset, k)
    # padding at the end has k = w = 0 and a = 1, which leaves the state unchanged
    q, k, v, r, w, log_decay = segments.chunked(CHUNK, q, k, v, r, w, log_decay)

    # reading the state before step n is reading the state after step n - 1
    following = functional.pad(r[..., 1:, :], (0, 0, 0, 1))
    reads, writes = torch.stack([q, following])[:, None], torch.stack([k, w])
    mixing = segments.matrix(reads, writes, log_decay, None)
    (q_k, q_w), (r_k, r_w) = mixing[0], _delayed(mixing[1])
    from_start = segments.prefix(log_decay)
    before_step = None if from_start is None else _delayed(from_start)
    known = torch.cat([r_k @ v, segments.queries(r, before_step, None)], dim=-1)
    # solve_triangular ignores the upper triangle, and assumes ones on the diagonal
    solved = torch.linalg.solve_triangular(r_w, known, upper=False, unitriangular=True)
    U, P = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    to_end = segments.suffix(log_decay)
    added = segments.keys(k, to_end, None).mT @ v
    before, Z, state = chunk_states(-U, P, segments.keys(w, to_end, None), log_decay, state, added)
    y = q_k @ v + q_w @ Z + segments.queries(q, from_start, None) @ before
    return segments.joined(y, t).transpose(1, 2), state


def unread(given: GeneralizedDeltaRule) -> GeneralizedDeltaRule:
    """Return the inputs with r = 0 at resets: a decay of -inf does not reach the state that r reads."""
    if given.reset is None:
        return given
    return given._replace(r=given.r.masked_fill(given.reset[..., None, None], 0))


def _delayed(x: Tensor) -> Tensor:
    """Move the rows of (..., t, d) one step later, with zeros before the first."""
    return functional.pad(x[..., :-1, :], (0, 0, 1, 0))


def matrix(given: GeneralizedDeltaRule) -> Matrix:
    """Return the inputs for kernels."""
    q, k, v, r, w, log_decay, state, reset = given
    return Matrix(q, k, v, None, log_decay, state, reset, r=r, w=w)


def twin(given: Matrix) -> tuple[Tensor, Tensor]:
    """Return y and the last state in torch operations, for double backward."""
    q, k, v, _, log_decay, state, reset, _, _, r, w = widened(given)
    assert r is not None and w is not None
    y, last = chunkwise(GeneralizedDeltaRule(q, k, v, r, w, log_decay, state, reset))
    return y.to(given.v.dtype), last
