"""Outputs that see the state before their own step, and the current token by a factor of its own.

No mode needs mathematics of its own for that: the state before step t is the one that step t-1 leaves, so
the operator answers every query one step early. The loop over time, which single steps take, has both states
at hand.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.gate_loop import segments
from linrec.ops.gate_loop.torch import read, recurrent


def with_bonus(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
    *,
    bonus: Tensor,
    run: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """y_t = Re(q_t S_{t-1}) + Re(q_t diag(bonus) k_t^T) v_t, by a mode that returns Re(q_t S_t).

    Args:
        q: (b, t, h, dk), real or complex, at least one step; it and what follows in the accumulation dtype.
        k: (b, t, h, dk), real or complex.
        v: (b, t, h, dv).
        log_decay: as `run` takes it.
        phase: likewise.
        state: S_0, (b, h, dk, dv).
        reset: None or (b, t) bool.
        bonus: (h, dk).
        run: the mode, a function of the seven tensors.

    Returns:
        y (b, t, h, dv), and S_t.
    """
    if run is recurrent:
        past, last = recurrent(q, k, v, log_decay, phase, state, reset, early=True)
    else:
        asking = q if reset is None else q.masked_fill(reset[:, :, None, None], 0)
        following = asking.roll(-1, dims=1)
        following[:, -1] = 0
        early, last = run(following, k, v, log_decay, phase, state, reset)
        past = torch.cat([read(asking[:, 0], state)[:, None], early], dim=1)[:, :-1]
        if reset is not None:
            # zero times a state that is not finite is not zero
            past = past.masked_fill(reset[:, :, None, None], 0)
    return past + _current(q, k, bonus)[..., None] * v, last


def matrix_with_bonus(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    reset: Tensor | None,
    bonus: Tensor,
) -> Tensor:
    """The matrix of which `with_bonus` returns products with v, (b, h, t, t).

    Args:
        q: (b, h, t, dk), as `segments.matrix` takes it, and so are `k`, `log_decay` and `phase`.
        k: (b, h, t, dk).
        log_decay: with resets as -inf.
        phase: likewise without them.
        reset: None or (b, t) bool.
        bonus: (h, dk).
    """
    following = torch.cat([q[..., 1:, :], torch.zeros_like(q[..., :1, :])], dim=-2)
    early = segments.matrix(following, k, log_decay, phase)
    past = functional.pad(early[..., :-1, :], (0, 0, 1, 0))
    if reset is not None:
        past = past.masked_fill(reset[:, None, :, None], 0)
    return past + torch.diag_embed(_current(q, k, bonus[:, None]))


def _current(q: Tensor, k: Tensor, bonus: Tensor) -> Tensor:
    """Re(q_t diag(bonus) k_t^T), without the last axis."""
    weight = (q * bonus * k).sum(-1)
    return weight.real if weight.is_complex() else weight
