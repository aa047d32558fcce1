"""The modes that weigh pairs of steps: all pairs (attention), or those within chunks (chunkwise).

Inputs and results as in `torch.py`. Complex numbers appear in the states between chunks only; within
chunks `segments` splits them into real and imaginary channels.
"""

import torch
from torch import Tensor

from linrec.ops.core.isolation import isolated
from linrec.ops.core.precision import real_dtype
from linrec.ops.gate_loop import segments
from linrec.ops.gate_loop.inputs import GateLoop
from linrec.ops.gate_loop.torch import transition
from linrec.ops.scan import scan

# within a chunk the work per step grows with its length, between chunks it shrinks with it; 64 balances the
# two for heads of 64
CHUNK = 64


def _in_chunks(given: GateLoop, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, with pairs of steps within chunks of this length."""
    q, k, v, log_decay, phase, _, state, reset = given
    t = q.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    log_decay, phase = segments.gates(log_decay, phase, reset, k)
    # steps that are added at the end have k = 0 and a = 1: they leave the state as it is
    q, k, v, log_decay, phase = segments.chunked(chunk, q, k, v, log_decay, phase)

    keys = segments.keys(k, segments.suffix(log_decay), segments.suffix(phase))
    before, state = _chunk_states(_total(log_decay), _total(phase), keys.mT @ v, state)
    queries = segments.queries(q, segments.prefix(log_decay), segments.prefix(phase))
    y = segments.matrix(q, k, log_decay, phase) @ v + queries @ before
    return segments.joined(y, t).transpose(1, 2), state


attention = isolated(lambda given: _in_chunks(given, given.q.shape[1]))
"""All pairs of steps at once (eq. 14-21): O(t^2), one chunk as long as the sequence."""
chunkwise = isolated(lambda given: _in_chunks(given, CHUNK))
"""Pairs of steps within chunks (eq. 21), the recurrence over chunks between them (eq. 7)."""


def _total(gate: Tensor | None) -> Tensor | None:
    """(b, h, chunks, size, d) to (b, chunks, h, d)."""
    return None if gate is None else gate.sum(-2).transpose(1, 2)


def _chunk_states(
    log_decay: Tensor | None, phase: Tensor | None, update: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """States before all chunks, (b, h, chunks, d, dv) as `segments.keys` splits them, and after the last."""
    size = state.shape[1:]
    update = update.transpose(1, 2)
    if state.is_complex():
        update = torch.complex(*update.chunk(2, dim=-2))
    angle = None if phase is None else segments.wrapped(phase, real_dtype(update.dtype))
    a = transition(log_decay, angle)
    if a is None:
        a = torch.ones(1, dtype=update.dtype, device=update.device)
    else:
        a = a[..., None].expand(-1, -1, *size).flatten(2)
    after, last = scan(a, update.flatten(2), state=state.flatten(1), backend="torch")
    before = torch.cat([state.flatten(1)[:, None], after[:, :-1]], dim=1).unflatten(-1, size)
    if before.is_complex():
        before = torch.cat([before.real, before.imag], dim=-2)
    return before.transpose(1, 2), last.unflatten(-1, size)
