"""The mode that walks the state itself, step by step."""

import torch
from torch import Tensor

from linrec.ops.gate_loop.torch import cleared_before, transition


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What the state holds under a key is read, and moved towards the value: O(dk dv) work per step.

        w_n = beta_n (v_n - (diag(a_n) S_{n-1})^T k_n),    S_n = diag(a_n) S_{n-1} + k_n w_n^T

    Arguments and results as in `reference.py`. There is no memory that grows with time where no gradient is
    asked for.
    """
    t = q.shape[1]
    a = transition(log_decay, None)
    cuts = cleared_before(reset, t)
    # unbound once: the gradient of an index in a loop would be a tensor of all steps, for every step
    factors = [None] * t if a is None else a[..., None].expand(-1, t, -1, -1, -1).unbind(1)
    rows = ((x[..., None, :]).unbind(1) for x in (q, k, v, beta[..., None]))
    outputs = []
    for q_n, k_n, v_n, beta_n, a_n, cut in zip(*rows, factors, cuts, strict=True):
        state = state if cut is None else state.masked_fill(cut, 0)
        kept = state if a_n is None else a_n * state
        state = kept + k_n.mT * (beta_n * (v_n - k_n @ kept))
        outputs.append((q_n @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state
