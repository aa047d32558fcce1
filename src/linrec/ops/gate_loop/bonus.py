"""Outputs that see the state before their own step, and the current token by a factor of its own.

No mode needs mathematics of its own for that: the state before step t is the one that step t-1 leaves, so
the operator answers every query one step early. The loop over time, which single steps take, has both states
at hand.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.precision import widened
from linrec.ops.gate_loop import segments
from linrec.ops.gate_loop.inputs import GateLoop
from linrec.ops.gate_loop.torch import read, recurrent

Run = Callable[[GateLoop], tuple[Tensor, Tensor]]


def with_bonus(run: Run) -> Run:
    """Return a backend with y_t = Re(q_t S_{t-1}) + Re(q_t diag(bonus) k_t^T) v_t, from one without bonus."""

    def wrapper(given: GateLoop) -> tuple[Tensor, Tensor]:
        if given.bonus is None:
            return run(given)
        # the output of a backend that takes half precision is not the last word
        given = widened(given)
        q, k, v, bonus, state, reset = given.q, given.k, given.v, given.bonus, given.state, given.reset
        assert bonus is not None
        given = given._replace(bonus=None)
        if run is recurrent:
            past, last = recurrent(given, early=True)
        else:
            asking = q if reset is None else q.masked_fill(reset[:, :, None, None], 0)
            following = asking.roll(-1, dims=1)
            following[:, -1] = 0
            early, last = run(given._replace(q=following))
            past = torch.cat([read(asking[:, 0], state)[:, None], early], dim=1)[:, :-1]
            if reset is not None:
                # zero times a state that is not finite is not zero
                past = past.masked_fill(reset[:, :, None, None], 0)
        return past + _current(q, k, bonus)[..., None] * v, last

    return wrapper


def matrix_with_bonus(
    q: Tensor, k: Tensor, log_decay: Tensor | None, phase: Tensor | None, reset: Tensor | None, bonus: Tensor
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
