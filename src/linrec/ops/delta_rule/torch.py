"""The delta rule in torch operations: step by step, and in chunks.

A step adds k_n w_n^T to the decayed state, with w_n = beta_n (v_n - (diag(a_n) S_{n-1})^T k_n). So the delta
rule is `gate_loop` with corrected values w_n. Within a chunk, the corrections depend on the steps of the
chunk and on the state S before it:

    w_n = beta_n (v_n - S^T A_{1..n} k_n - sum_{m<n} w_m (k_m^T A_{m+1..n} k_n))

where A_{m+1..n} is the product of diag(a) over the steps m+1..n. This is a triangular system for all w_n,
(I + L) W = V' - K' S, where L has the entries beta_n k_m^T A_{m+1..n} k_n below the diagonal, V' has the rows
beta_n v_n^T, and K' has the rows beta_n k_n^T A_{1..n}. Its solution W = U - P S is the WY representation of
the chunk's product of transitions (Bischof and Van Loan, 1987). U and P do not depend on S, so all chunks are
solved in parallel. The sequential loop over chunks needs only two matrix products per chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.ambient import exporting
from linrec.ops.core.checks import State
from linrec.ops.core.isolation import isolated
from linrec.ops.core.loop import matrix_product, recurrence
from linrec.ops.core.precision import widened
from linrec.ops.matrix import Matrix, segments

# longer chunks mean fewer sequential steps, but more work in the triangular systems
CHUNK = 64


class DeltaRule(NamedTuple):
    """Canonical inputs of the backends.

    Attributes:
        q: (b, t, h, dk).
        k: (b, t, h, dk).
        v: (b, t, h, dv).
        beta: (b, t, h).
        log_decay: log a, None or (b or 1, t or 1, h, dk or 1).
        state: S_0 (b, h, dk, dv) in the accumulation dtype.
        reset: None or (b, t) bool.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    state: State
    reset: Tensor | None


def recurrent(given: DeltaRule) -> tuple[Tensor, Tensor]:
    """Correct the value that the state returns for each key: O(dk dv) work per step.

        w_n = beta_n (v_n - (diag(a_n) S_{n-1})^T k_n),    S_n = diag(a_n) S_{n-1} + k_n w_n^T

    Without gradients, memory does not grow with time.
    """
    q, k, v, beta, log_decay, state, reset = given
    of_time = segments.of_steps(log_decay, None, reset, q.shape[1])
    rows = (x[..., None, :].unbind(1) for x in (q, k, v, beta[..., None]))
    outputs = []
    for q_n, k_n, v_n, beta_n, a_n, cut in zip(*rows, *of_time, strict=True):
        state = state if cut is None else state.masked_fill(cut, 0)
        kept = state if a_n is None else a_n * state
        state = kept + k_n.mT * (beta_n * (v_n - k_n @ kept))
        outputs.append((q_n @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state


@isolated
def chunkwise(given: DeltaRule) -> tuple[Tensor, Tensor]:
    """Solve triangular systems within chunks, and run the recurrence over chunks."""
    q, k, v, beta, log_decay, state, reset = given
    t = q.shape[1]
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta[..., None]))
    log_decay, _ = segments.gates(log_decay, None, reset, k)
    # padding at the end has k = 0, beta = 0 and a = 1, which leaves the state unchanged
    q, k, v, beta, log_decay = segments.chunked(CHUNK, q, k, v, beta, log_decay)

    # products of step n with step m, decayed: `reading` for queries, `meeting` for keys
    reading, meeting = segments.matrix(torch.stack([q, k]), k, log_decay, None)
    from_start = segments.prefix(log_decay)
    known = torch.cat([v, segments.queries(k, from_start, None)], dim=-1)
    # solve_triangular ignores the upper triangle, and assumes ones on the diagonal
    solved = torch.linalg.solve_triangular(beta * meeting, beta * known, upper=False, unitriangular=True)
    U, P = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    keys = segments.keys(k, segments.suffix(log_decay), None)
    before, W, state = chunk_states(U, P, keys, log_decay, state)
    y = reading @ W + segments.queries(q, from_start, None) @ before
    return segments.joined(y, t).transpose(1, 2), state


def chunk_states(
    U: Tensor,
    P: Tensor,
    keys: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    writes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before all chunks (b, h, chunks, dk, dv), corrected values W, and the last state.

    `writes`, of the shape of the states, is added to the state at the end of each chunk.
    """
    # as a factor on the rows of a state
    a = None if log_decay is None else log_decay.sum(-2).exp()[..., None]
    if exporting():
        kept = torch.eye(keys.shape[-1], dtype=P.dtype, device=P.device)
        through = (kept if a is None else a * kept) - keys.mT @ P
        added = keys.mT @ U if writes is None else keys.mT @ U + writes
        after = recurrence(
            through.transpose(1, 2), added.transpose(1, 2), state, product=matrix_product
        ).transpose(1, 2)
        states = torch.cat([state[:, :, None], after[:, :, :-1]], dim=2)
        return states, U - P @ states, after[:, :, -1]
    decays, added_to = ([None] * U.shape[2] if x is None else x.unbind(2) for x in (a, writes))
    chunks = zip(U.unbind(2), P.unbind(2), keys.unbind(2), decays, added_to, strict=True)
    before, corrected = [], []
    for U_c, P_c, keys_c, a_c, writes_c in chunks:
        before.append(state)
        corrected.append(U_c - P_c @ state)
        kept = state if a_c is None else a_c * state
        state = kept + keys_c.mT @ corrected[-1]
        state = state if writes_c is None else state + writes_c
    return torch.stack(before, dim=2), torch.stack(corrected, dim=2), state


def twin(given: Matrix) -> tuple[Tensor, Tensor]:
    """Return y and the last state in torch operations, for double backward."""
    q, k, v, beta, log_decay, state, reset, *_ = widened(given)
    assert beta is not None
    y, last = chunkwise(DeltaRule(q, k, v, beta, log_decay, state, reset))
    return y.to(given.v.dtype), last
