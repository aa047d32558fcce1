"""Matrix states in torch operations, for what kernels leave out: gradients of gradients, and of few steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.ops.operators import differentiable_gradients
from linrec.ops.precision import widened


def gradients(needed: Sequence[bool], inputs: Sequence[Any], dy: Tensor, dlast: Tensor) -> list[Any]:
    """Return the gradients of y and the last state, as functions that autograd knows.

    Args:
        needed: which of the inputs have one.
        inputs: q, k, v, beta, log_decay, phase, state and cut; `gate_loop` where beta is None, and with
            phases in the frame of `real_form`.
        dy: the gradient of y.
        dlast: the gradient of the last state.

    Returns:
        One gradient, or None, for each of `needed`.
    """
    # the packages of both operators import this module
    from linrec.ops.delta_rule.chunkwise import chunkwise as delta_rule
    from linrec.ops.gate_loop.chunkwise import chunkwise as gate_loop

    *tensors, state, cut = inputs
    q, k, v, beta, log_decay, phase = widened(*tensors)
    if beta is not None:
        y, last = delta_rule(q, k, v, beta, log_decay, state, cut)
    elif phase is None:
        y, last = gate_loop(q, k, v, log_decay, None, state, cut)
    else:
        # in the frame that turns, phases are zero, whatever their derivatives are
        q, k = torch.complex(*q.chunk(2, dim=-1)).conj(), torch.complex(*k.chunk(2, dim=-1))
        decay = log_decay
        if decay is not None and decay.shape[-1] > 1:
            decay = decay.chunk(2, dim=-1)[0]
        start = torch.complex(*state.chunk(2, dim=-2))
        y, last = gate_loop(q, k, v, decay, phase - phase.detach(), start, cut)
        last = torch.cat([last.real, last.imag], dim=-2)
    return differentiable_gradients((y.to(dy.dtype), last), inputs, needed, (dy, dlast))


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `delta_rule` step by step, or a real `gate_loop` where `beta` is None."""
    from linrec.ops.delta_rule.torch import recurrent as delta_rule
    from linrec.ops.gate_loop.torch import recurrent as gate_loop

    q, k, v, beta, log_decay = widened(q, k, v, beta, log_decay)
    if beta is None:
        return gate_loop(q, k, v, log_decay, None, state, cut)
    return delta_rule(q, k, v, beta, log_decay, state, cut)
