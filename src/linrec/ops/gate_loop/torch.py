"""The modes in torch operations: step by step, as an elementwise scan, and by pairs of steps.

All modes take inputs in the accumulation dtype, and return y (b, t, h, dv) and the final state (b, h, dk,
dv). Modes on pairs of steps use all pairs (attention), or the pairs within chunks (chunkwise). In these modes
only the states between chunks are complex; within chunks, `segments` splits complex numbers into real and
imaginary channels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.checks import State
from linrec.ops.core.isolation import isolated
from linrec.ops.core.precision import real_dtype, widened
from linrec.ops.matrix import Matrix, segments
from linrec.ops.scan import scan

Result = tuple[Tensor, Tensor]

# the work per step grows with the chunk length within chunks, and shrinks with it between chunks; 64 balances
# both for heads of size 64
CHUNK = 64


class GateLoop(NamedTuple):
    """Canonical inputs of `gate_loop`.

    Attributes:
        q: (b, t, h, dk), real or complex.
        k: (b, t, h, dk), real or complex.
        v: (b, t, h, dv), real.
        log_decay: log |a|, None or (b or 1, t or 1, h, dk or 1).
        phase: arg a in radians, same shapes as `log_decay`.
        bonus: None or (h, dk).
        state: S_0 (b, h, dk, dv) in the accumulation dtype, complex if `phase` is given or `k` is complex.
        reset: None or (b, t) bool.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    phase: Tensor | None
    bonus: Tensor | None
    state: State
    reset: Tensor | None


class Normalized(NamedTuple):
    """Inputs of `normalized_gate_loop`: as in `gate_loop`, with a larger state, a floor and a flag."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    phase: Tensor | None
    bonus: Tensor | None
    state: State
    reset: Tensor | None
    floor: Tensor | float
    signed: bool


def recurrent(given: GateLoop, *, early: bool = False) -> Result:
    """Run step by step (eq. 7-8): O(t) work, and memory independent of t if no gradient is needed.

    `early` reads every state before its step: y_t = Re(q_t S_{t-1}), zero at resets.
    """
    q, k, v, log_decay, phase, _, state, reset = given
    decays, cuts = segments.of_steps(log_decay, phase, reset, q.shape[1])
    outputs = []
    for q_n, k_n, v_n, a_n, cut in zip(q.unbind(1), k.unbind(1), v.unbind(1), decays, cuts, strict=True):
        before = state = state if cut is None else state.masked_fill(cut, 0)
        kept = state if a_n is None else a_n * state
        state = kept + k_n[..., :, None] * v_n[..., None, :]
        outputs.append(read(q_n, before if early else state))
    return torch.stack(outputs, dim=1), state


def elementwise(given: GateLoop, mode: str, backend: str) -> Result:
    """Run every entry of the state as a channel of `ops.scan` (eq. 13), in any of its modes and backends."""
    q, k, v, log_decay, phase, _, state, reset = given
    added = k[..., :, None] * v[..., None, :]
    states, last = _scanned(log_decay, phase, added, state, reset=reset, mode=mode, backend=backend)
    return read(q, states), last


def _scanned(
    log_decay: Tensor | None, phase: Tensor | None, added: Tensor, state: Tensor, **options: Any
) -> Result:
    """Return all states S_t = a_t S_{t-1} + added_t (b, t, h, dk, dv), and the last state."""
    size = state.shape[1:]
    a = segments.transition(log_decay, phase)
    if a is None:
        a = torch.ones(1, dtype=real_dtype(added.dtype), device=added.device)
    else:
        a = a[..., None].expand(-1, -1, *size).flatten(2)
    states, last = scan(a, added.flatten(2), state=state.flatten(1), **options)
    return states.unflatten(-1, size), last.unflatten(-1, size)


def read(q: Tensor, state: Tensor) -> Tensor:
    """Return y = Re(q S)   (eq. 8), from (..., dk) and (..., dk, dv)."""
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


def _in_chunks(given: GateLoop, chunk: int) -> Result:
    """Return the outputs and the last state, from pairs of steps within chunks of this length."""
    q, k, v, log_decay, phase, _, state, reset = given
    t = q.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    log_decay, phase = segments.gates(log_decay, phase, reset, k)
    # padding at the end has k = 0 and a = 1, which leaves the state unchanged
    q, k, v, log_decay, phase = segments.chunked(chunk, q, k, v, log_decay, phase)

    keys = segments.keys(k, segments.suffix(log_decay), segments.suffix(phase))
    before, state = _chunk_states(_total(log_decay), _total(phase), keys.mT @ v, state)
    queries = segments.queries(q, segments.prefix(log_decay), segments.prefix(phase))
    y = segments.matrix(q, k, log_decay, phase) @ v + queries @ before
    return segments.joined(y, t).transpose(1, 2), state


@isolated
def attention(given: GateLoop) -> Result:
    """Run all pairs of steps at once (eq. 14-21): O(t^2), with a single chunk."""
    return _in_chunks(given, given.q.shape[1])


@isolated
def chunkwise(given: GateLoop) -> Result:
    """Run pairs of steps within chunks (eq. 21), and a recurrence over chunks (eq. 7)."""
    return _in_chunks(given, CHUNK)


def _total(gate: Tensor | None) -> Tensor | None:
    """Sum over each chunk, (b, h, chunks, size, d) to (b, chunks, h, d)."""
    return None if gate is None else gate.sum(-2).transpose(1, 2)


def _chunk_states(log_decay: Tensor | None, phase: Tensor | None, update: Tensor, state: Tensor) -> Result:
    """Return all states before chunks (b, h, chunks, d, dv), split as in `segments.keys`, and the last."""
    update = update.transpose(1, 2)
    if state.is_complex():
        update = torch.complex(*update.chunk(2, dim=-2))
    angle = None if phase is None else segments.wrapped(phase, real_dtype(update.dtype))
    after, last = _scanned(log_decay, angle, update, state, backend="torch")
    before = torch.cat([state[:, None], after[:, :-1]], dim=1)
    if before.is_complex():
        before = torch.cat([before.real, before.imag], dim=-2)
    return before.transpose(1, 2), last


def twin(given: Matrix) -> Result:
    """Return y and the last state in torch operations, for double backward."""
    q, k, v, _, log_decay, state, reset, phase, is_wide, *_ = widened(given)
    if phase is None:
        y, last = chunkwise(GateLoop(q, k, v, log_decay, None, None, state, reset))
    else:
        # in the rotating frame, phases are zero, but their derivatives are not
        real, imaginary = q.chunk(2, dim=-1)
        q, k = torch.complex(real, -imaginary), torch.complex(*k.chunk(2, dim=-1))
        if log_decay is not None and log_decay.shape[-1] > 1:
            log_decay = log_decay.chunk(2, dim=-1)[0]
        start = torch.complex(*state.chunk(2, dim=-2))
        y, last = chunkwise(GateLoop(q, k, v, log_decay, phase - phase.detach(), None, start, reset))
        last = torch.cat([last.real, last.imag], dim=-2)
    return y if is_wide else y.to(given.v.dtype), last
