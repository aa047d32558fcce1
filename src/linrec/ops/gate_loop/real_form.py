"""A complex recurrence as a real one of twice as many key channels, for kernels of real numbers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from linrec.ops.core.isolation import isolated
from linrec.ops.core.precision import widened
from linrec.ops.gate_loop.inputs import GateLoop, Matrix

Result = tuple[Tensor, Tensor]
Angle = tuple[Tensor, Tensor]
"""Cosine and sine of Phi_t at the last step, (b or 1, h, dk or 1, 1)."""


def real_form(
    q: Tensor, k: Tensor, log_decay: Tensor | None, phase: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Angle]:
    """Return the recurrence in a frame that turns with the phases, which is given and has no gradient.

    With Phi_t the sum of phases over 1..t and S'_t = exp(-i Phi_t) S_t

        S'_t = diag(exp(log_decay_t)) S'_{t-1} + (exp(-i Phi_t) k_t)^T v_t,    y_t = Re(q_t exp(i Phi_t) S'_t)

    and the real part of a product is a real product of (real, -imaginary) and (real, imaginary).

    Args:
        q: (b, t, h, dk), real or complex, in the accumulation dtype.
        k: likewise.
        log_decay: None or (b or 1, t or 1, h, dk or 1).
        phase: likewise.
        state: S_0 (b, h, dk, dv), complex.

    Returns:
        q and k (b, t, h, 2 dk), log_decay, S'_0 (b, h, 2 dk, dv), and what `complex_form` takes.
    """
    if phase is None:
        total = state.real.new_zeros(1, 1, 1, 1)
    else:
        total = phase.detach()
        if q.shape[1] > 1:
            # thousands of radians lose their digits in float32, and a gradient through their sum loses its
            # own, which cancels over the whole sequence
            total = total.to(torch.float64).expand(-1, q.shape[1], -1, -1).cumsum(1)
            total = total.remainder(2 * math.pi).to(phase.dtype)
    cos, sin = total.cos(), total.sin()
    # the conjugate of conj(k) exp(i Phi) is k exp(-i Phi)
    q, k = _turned(q, cos, sin), _turned(k.conj(), cos, sin)
    if log_decay is not None and log_decay.shape[-1] > 1:
        log_decay = torch.cat([log_decay, log_decay], dim=-1)
    parts = torch.cat([state.real, state.imag], dim=-2)
    return q, k, log_decay, parts, (cos[:, -1, :, :, None], sin[:, -1, :, :, None])


def complex_form(state: Tensor, angle: Angle) -> Tensor:
    """Return S_t of S'_t and of the angle that `real_form` returns."""
    real, imaginary = state.chunk(2, dim=-2)
    cos, sin = angle
    return torch.complex(real * cos - imaginary * sin, real * sin + imaginary * cos)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The conjugate of x exp(i Phi), as (real, imaginary)."""
    if not x.is_complex():
        return torch.cat([x * cos, -(x * sin)], dim=-1)
    return torch.cat([x.real * cos - x.imag * sin, -(x.real * sin + x.imag * cos)], dim=-1)


def in_real_form(
    run: Callable[[Matrix], tuple[Tensor, Tensor]],
) -> Callable[[GateLoop], tuple[Tensor, Tensor]]:
    """Return a backend of `gate_loop` from the recurrence of real numbers that `run` is."""

    # the frame of a document turns on from the frame of the document before it
    @isolated
    def turned(given: GateLoop) -> Result:
        q, k, log_decay, state, angle = real_form(given.q, given.k, given.log_decay, given.phase, given.state)
        y, last = run(Matrix(q, k, given.v, None, log_decay, given.phase, state, given.reset))
        return y, complex_form(last, angle)

    def real(given: GateLoop) -> Result:
        if given.state.is_complex():
            return turned(widened(given))
        q, k, v, log_decay, _, _, state, reset = given
        return run(Matrix(q.real if q.is_complex() else q, k, v, None, log_decay, None, state, reset))

    return real
