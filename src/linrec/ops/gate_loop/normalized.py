"""The running normaliser: one more value of one, whose outputs are the sums of the weights of the others."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.backends import Backend
from linrec.ops.core.checks import State, check_precision, check_shape
from linrec.ops.core.handlers import time_is_split
from linrec.ops.gate_loop import inputs
from linrec.ops.gate_loop.inputs import GateLoop


class Normalized(NamedTuple):
    """Inputs of `normalized_gate_loop`: those of `gate_loop`, a floor, and a state of one column more."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    phase: Tensor | None
    bonus: Tensor | None
    floor: Tensor | float
    signed: bool
    state: State
    reset: Tensor | None


def canonical(given: Normalized) -> Normalized:
    """Check the inputs, and give gates four axes."""
    q, k, v, log_decay, phase, bonus, floor, signed, state, reset = given
    q, k, v, log_decay, phase, bonus, *_ = inputs.canonical(
        GateLoop(q, k, v, log_decay, phase, bonus, state, reset)
    )
    if isinstance(floor, Tensor):
        check_shape("floor", floor, "(b, t, h)", q.shape[:3], "Pass a number, or one per step and head.")
        check_precision("floor", floor, q, "q")
    elif not 0 < floor < math.inf:
        raise ValueError(
            f"`floor` must be positive and finite; got {floor}. It keeps a denominator from being zero."
        )
    return Normalized(q, k, v, log_decay, phase, bonus, floor, signed, state, reset)


def state_of(given: Normalized) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of the state."""
    q, k, v, log_decay, phase, bonus, _, _, state, reset = given
    (b, h, dk, dv), dtype = inputs.state_of(GateLoop(q, k, v, log_decay, phase, bonus, state, reset))
    return (b, h, dk, dv + 1), dtype


def normalized(entry: Backend, run: Callable[[GateLoop, str, str], tuple[Tensor, Tensor]]) -> Backend:
    """Return the backend of `normalized_gate_loop` that runs an entry of the table of `gate_loop`.

    Args:
        entry: the entry.
        run: `gate_loop` of canonical inputs, a mode and a backend.
    """

    def backend(given: Normalized) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, phase, bonus, floor, signed, state, reset = given
        b, t, h, _ = q.shape
        inputs = GateLoop(q, k, functional.pad(v, (0, 1), value=1.0), log_decay, phase, bonus, state, reset)
        # of heads of one channel, the two values make two heads, for the fused kernels, which one step has no
        # use for; processes that share a sequence have the same heads, but not the same steps
        in_heads = q.shape[-1] == v.shape[-1] == 1 and (t > 1 or time_is_split())
        y, last = run(_in_heads(inputs) if in_heads else inputs, entry.mode, entry.name)
        if in_heads:
            y, last = y.reshape(b, t, h, 2), last.reshape(b, h, 1, 2)
        numerator, total = y[..., :-1], y[..., -1:]
        least = floor[..., None].to(y.dtype) if isinstance(floor, Tensor) else floor
        size = total.abs().clamp(min=least)
        return numerator / (torch.where(total < 0, -size, size) if signed else size), last

    # the quotient of two rounded numbers would be rounded three times: all inputs are widened
    return replace(entry, run=backend, widen=True)


def _in_heads(given: GateLoop) -> GateLoop:
    """Inputs with dk = 1 and dv = 2 as those with h heads more and dv = 1."""
    q, k, v, log_decay, phase, bonus, state, reset = given
    q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
    log_decay, phase = (x if x is None else x.repeat_interleave(2, 2) for x in (log_decay, phase))
    bonus = bonus if bonus is None else bonus.repeat_interleave(2, 0)
    v, state = v.flatten(2)[..., None], state.flatten(1)[..., None, None]
    return GateLoop(q, k, v, log_decay, phase, bonus, state, reset)
