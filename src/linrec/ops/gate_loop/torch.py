"""The modes that walk the state itself: step by step, and as an elementwise scan.

Both take inputs in the accumulation dtype, and return y (b, t, h, dv) and the final state (b, h, dk, dv).
"""

from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.precision import real_dtype
from linrec.ops.gate_loop.inputs import GateLoop
from linrec.ops.scan import scan


def transition(log_decay: Tensor | None, phase: Tensor | None) -> Tensor | None:
    """a = exp(log_decay + i phase)   (eq. 25), or None where both are."""
    magnitude = None if log_decay is None else log_decay.exp()
    if phase is None:
        return magnitude
    real, imaginary = phase.cos(), phase.sin()
    if magnitude is not None:
        real, imaginary = magnitude * real, magnitude * imaginary
    # made of real arithmetic, which torch.compile fuses; complex arithmetic it leaves as it is
    return torch.complex(real, imaginary)


def recurrent(given: GateLoop, *, early: bool = False) -> tuple[Tensor, Tensor]:
    """Step by step (eq. 7-8): O(t) work, and no memory that grows with t where no gradient is asked for.

    `early` reads every state before its step: y_t = Re(q_t S_{t-1}), zero at resets.
    """
    q, k, v, log_decay, phase, _, state, reset = given
    t = q.shape[1]
    a = transition(log_decay, phase)
    cuts = cleared_before(reset, t)
    # unbound once: the gradient of an index in a loop would be a tensor of all steps, for every step
    factors = [None] * t if a is None else a[..., None].expand(-1, t, -1, -1, -1).unbind(1)
    outputs = []
    for q_n, k_n, v_n, a_n, cut in zip(q.unbind(1), k.unbind(1), v.unbind(1), factors, cuts, strict=True):
        before = state = state if cut is None else state.masked_fill(cut, 0)
        kept = state if a_n is None else a_n * state
        state = kept + k_n[..., :, None] * v_n[..., None, :]
        outputs.append(read(q_n, before if early else state))
    return torch.stack(outputs, dim=1), state


def cleared_before(reset: Tensor | None, time: int) -> list[Any]:
    """Masks (b, 1, 1, 1) of the states that are cleared before each step, or None for each."""
    # as a factor of zero, a reset would let NaN and infinity pass
    return [None] * time if reset is None else list(reset[:, :, None, None, None].unbind(1))


def elementwise(given: GateLoop, mode: str, backend: str) -> tuple[Tensor, Tensor]:
    """Every entry of the state as one channel of `ops.scan` (eq. 13), in any of its modes and backends."""
    q, k, v, log_decay, phase, _, state, reset = given
    size = state.shape[1:]
    a = transition(log_decay, phase)
    if a is None:
        a = torch.ones(1, dtype=real_dtype(q.dtype), device=q.device)
    else:
        a = a[..., None].expand(-1, -1, *size).flatten(2)
    x = (k[..., :, None] * v[..., None, :]).flatten(2)
    hidden, state = scan(a, x, state=state.flatten(1), reset=reset, mode=mode, backend=backend)
    return read(q, hidden.unflatten(-1, size)), state.unflatten(-1, size)


def read(q: Tensor, state: Tensor) -> Tensor:
    """y = Re(q S)   (eq. 8), from (..., dk) and (..., dk, dv)."""
    if not state.is_complex():
        return _product(q.real if q.is_complex() else q, state)
    parts = torch.view_as_real(state)
    if not q.is_complex():
        return _product(q, parts[..., 0])
    return _product(q.real, parts[..., 0]) - _product(q.imag, parts[..., 1])


def _product(q: Tensor, state: Tensor) -> Tensor:
    if q.shape[-1] == 1:
        return q * state.squeeze(-2)
    return (q[..., None, :] @ state).squeeze(-2)
