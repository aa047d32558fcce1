"""A matrix memory that adds the outer products of two steps, the current step and the step before."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from linrec.nn.token_shift import token_shift
from linrec.ops import inspection
from linrec.ops.core.call import Call
from linrec.ops.gate_loop import gate_loop
from linrec.ops.inspection import note

__all__ = ["TrapezoidState", "trapezoid_mixing", "trapezoidal_gate_loop"]


class TrapezoidState(NamedTuple):
    """State of `trapezoidal_gate_loop`.

    Attributes:
        S: (b, h, dk, dv).
        k: the keys of the last step, heads side by side, (b, h dk).
        v: the values of the last step, (b, h dv).
    """

    S: Float[Tensor, "b h dk dv"]
    k: Float[Tensor, "b hdk"]
    v: Float[Tensor, "b hdv"]

    @classmethod
    def zeros(cls, batch: int, h: int, dk: int, dv: int, **like: Any) -> "TrapezoidState":
        """Return the state at the start of `batch` sequences, in the dtype and on the device given."""
        k, v = (torch.zeros(batch, h * d, **like) for d in (dk, dv))
        return cls(gate_loop.empty_state(batch, h, dk, dv, **like), k, v)


def trapezoidal_gate_loop(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "b t h"],
    dt: Float[Tensor, "b t h"],
    weight: Float[Tensor, "b t h"] | float,
    *,
    state: TrapezoidState | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], TrapezoidState]:
    """S_t = a_t S_{t-1} + beta_t k_{t-1}^T v_{t-1} + gamma_t k_t^T v_t and y_t = q_t S_t.

        gamma_t = weight_t dt_t    beta_t = (1 - weight_t) dt_t a_t    a_t = exp(log_decay_t)

    S without its last term, G_t = S_t - gamma_t k_t^T v_t, is a recurrence with a single outer product:

        G_t = a_t G_{t-1} + (a_t gamma_{t-1} + beta_t) k_{t-1}^T v_{t-1}
        y_t = q_t G_t + gamma_t (q_t k_t^T) v_t

    A call starts from G_0 = S_0 with gamma_0 = 0. The first step of a sequence has no step before.

    Args:
        q: queries, in float32 or float64.
        k: keys, likewise.
        v: values, in any precision. The operator runs in the precision of `v`.
        log_decay: log a_t <= 0, per head.
        dt: step sizes.
        weight: weight of the current step in [0, 1], per step and head or a constant; 1 is Euler's rule, 1/2
            the trapezoidal rule with equal weights.
        state: the state that an earlier call returned; None means zeros.
        reset: steps that start a new sequence.

    Returns:
        y in the precision of `q`, and the state.

    Raises:
        ValueError: the steps of a sequence are split over processes.

    Source:
        Lahoti and others, Mamba-3 (2026), eq. 6 and 7.

    Example:
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> y, state = trapezoidal_gate_loop(ones, ones, ones, torch.zeros(1, 3, 1), ones[..., 0], 0.5)
        >>> y.flatten().tolist(), state.S.item()
        ([0.5, 1.5, 2.5], 2.5)
    """
    S, last_k, last_v = (None,) * 3 if state is None else state
    heads = q.shape[2], -1
    gamma = weight * dt
    past_k, last_k = token_shift(k.flatten(2), last_k, reset=reset)
    past_v, last_v = token_shift(v.flatten(2), last_v, reset=reset)
    past_gamma, _ = token_shift(gamma, reset=reset)
    gate = log_decay.exp() * (past_gamma + dt - gamma)
    own = gamma * (q * k).sum(-1)
    note(gate=gate, own=own)
    inputs = gate[..., None] * past_v.unflatten(-1, heads)
    past_k = past_k.unflatten(-1, heads)
    y, G = gate_loop(q.to(v.dtype), past_k.to(v.dtype), inputs.to(v.dtype), log_decay, state=S, reset=reset)
    # the sum over no steps is zero
    last_gamma = gamma[:, -1:].sum(1)[..., None]
    scaled_k = last_gamma * last_k.unflatten(-1, heads)
    S = G + scaled_k[..., None] * last_v.unflatten(-1, heads)[..., None, :]
    return y + own[..., None] * v, TrapezoidState(S, last_k, last_v)


def trapezoid_mixing(call: Call | None, notes: dict[str, Tensor]) -> Float[Tensor, "b t t"]:
    """Return how much of the value of step m is in step n, the mean over heads of the weights' magnitudes.

    Args:
        call: the recorded call of `gate_loop` in `trapezoidal_gate_loop`.
        notes: the values noted in the same run.
    """
    mixing = inspection.token_mixing(call, notes)
    assert mixing is not None
    # the operator's value of step m is v of step m - 1
    return functional.pad(mixing[..., 1:], (0, 1)) + torch.diag_embed(notes["own"].abs().mean(-1))
