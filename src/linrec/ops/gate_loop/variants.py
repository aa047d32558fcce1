"""Variants of the recurrence on top of the plain operator: a bonus, complex numbers, and normalisation.

- A bonus needs no algorithm of its own: the state before step t is the state after step t-1, so the operator
  runs with every query one step early. The loop over time, used for single steps, has both states available.
- For real kernels, a complex recurrence is a real recurrence with twice as many key channels.
- A running normaliser is an additional value column of ones, whose outputs are the sums of all weights.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.backends import Backend
from linrec.ops.core.call import time_is_split
from linrec.ops.core.isolation import isolated
from linrec.ops.core.precision import wide, widened
from linrec.ops.gate_loop.reference import normalized_gate_loop_reference
from linrec.ops.gate_loop.torch import GateLoop, Normalized, read, recurrent, twin
from linrec.ops.matrix import Matrix, numba, segments
from linrec.ops.matrix.triton import Steps, aligned, chunkwise, steps

Result = tuple[Tensor, Tensor]
Run = Callable[[GateLoop], Result]
Angle = tuple[Tensor, Tensor]
"""Cosine and sine of Phi_t at the last step, (b or 1, h, dk or 1, 1)."""


def with_bonus(run: Run, wide_run: Run | None = None) -> Run:
    """Return a backend with y_t = Re(q_t S_{t-1}) + Re(q_t diag(bonus) k_t^T) v_t from a backend without.

    Half-precision outputs would be rounded before the bonus is added. `wide_run` is the backend with outputs
    in the accumulation dtype; without it, the inputs are widened.
    """

    def wrapper(given: GateLoop) -> Result:
        if given.bonus is None:
            return run(given)
        given = widened(given) if wide_run is None else given
        q, k, v, _, _, bonus, state, reset = given
        given = given._replace(bonus=None)
        if run is recurrent:
            past, last = recurrent(given, early=True)
        else:
            asking = q if reset is None else q.masked_fill(reset[:, :, None, None], 0)
            following = asking.roll(-1, dims=1)
            following[:, -1] = 0
            early, last = (wide_run or run)(given._replace(q=following))
            past = torch.cat([read(wide(asking[:, 0]), state)[:, None], early], dim=1)[:, :-1]
            if reset is not None:
                # masked, because zero times a non-finite state is NaN
                past = past.masked_fill(reset[:, :, None, None], 0)
        return past + _current(wide(q), k, bonus)[..., None] * v, last

    return wrapper


def matrix_with_bonus(
    q: Tensor, k: Tensor, log_decay: Tensor | None, phase: Tensor | None, reset: Tensor | None, bonus: Tensor
) -> Tensor:
    """Return the matrix (b, h, t, t) whose products with v `with_bonus` returns.

    Args:
        q: (b, h, t, dk), in the layout of `segments.matrix`, like `k`, `log_decay` and `phase`.
        k: (b, h, t, dk).
        log_decay: log decays, with resets as -inf.
        phase: phases.
        reset: None or (b, t) bool.
        bonus: (h, dk).
    """
    following = torch.cat([q[..., 1:, :], torch.zeros_like(q[..., :1, :])], dim=-2)
    early = segments.matrix(following, k, log_decay, phase)
    past = functional.pad(early[..., :-1, :], (0, 0, 1, 0))
    if reset is not None:
        past = past.masked_fill(reset[:, None, :, None], 0)
    return past + torch.diag_embed(_current(q, k, bonus[:, None]))


def _current(q: Tensor, k: Tensor, bonus: Any) -> Tensor:
    """Return Re(q_t diag(bonus) k_t^T), without the last axis."""
    weight = (q * bonus * k).sum(-1)
    return weight.real if weight.is_complex() else weight


def real_form(given: GateLoop) -> tuple[Matrix, Angle]:
    """Return the recurrence in a frame that rotates with the phases; the frame itself has no gradient.

    Let Phi_t be the sum of phases over 1..t, and S'_t = exp(-i Phi_t) S_t. Then

        S'_t = diag(exp(log_decay_t)) S'_{t-1} + (exp(-i Phi_t) k_t)^T v_t,    y_t = Re(q_t exp(i Phi_t) S'_t)

    The real part of a product is a real product of (real, -imaginary) and (real, imaginary).

    Args:
        given: inputs in the accumulation dtype, with a complex state.

    Returns:
        Inputs with q and k (b, t, h, 2 dk) and the state (b, h, 2 dk, dv), and the angle for `complex_form`.
    """
    q, k, v, log_decay, phase, _, state, reset = given
    if phase is None:
        total = state.real.new_zeros(1, 1, 1, 1)
    else:
        total = phase.detach()
        if q.shape[1] > 1:
            # sums of thousands of radians lose digits in float32, and gradients through the sums would lose
            # digits by cancellation over the whole sequence
            total = total.to(torch.float64).expand(-1, q.shape[1], -1, -1).cumsum(1)
            total = total.remainder(2 * math.pi).to(phase.dtype)
    cos, sin = total.cos(), total.sin()
    real, imaginary = segments.turned(q, cos, sin)
    q, k = torch.cat([real, -imaginary], dim=-1), torch.cat(segments.turned(k, cos, -sin), dim=-1)
    if log_decay is not None and log_decay.shape[-1] > 1:
        log_decay = torch.cat([log_decay, log_decay], dim=-1)
    parts = torch.cat([state.real, state.imag], dim=-2)
    angle = cos[:, -1, :, :, None], sin[:, -1, :, :, None]
    return Matrix(q, k, v, None, log_decay, parts, reset, phase), angle


def complex_form(state: Tensor, angle: Angle) -> Tensor:
    """Return S_t from S'_t and the angle that `real_form` returned."""
    real, imaginary = state.chunk(2, dim=-2)
    cos, sin = angle
    return torch.complex(real * cos - imaginary * sin, real * sin + imaginary * cos)


def in_real_form(run: Callable[[Matrix], Any], *, weighs_pairs: bool = False, wide_y: bool = False) -> Run:
    """Return a backend of `gate_loop` from a real kernel.

    Args:
        run: the kernel.
        weighs_pairs: whether the kernel implements resets by multiplying by zero; it then also supports
            half precision.
        wide_y: whether the outputs have the accumulation dtype.
    """

    def backend(given: GateLoop) -> Result:
        q, k, v, log_decay, _, _, state, reset = given
        if state.is_complex():
            return turning(given)
        q = q.real if q.is_complex() else q
        return run(Matrix(q, k, v, None, log_decay, state, reset, wide=wide_y))[:2]

    def in_frame(given: GateLoop) -> Result:
        v, (turned, angle) = given.v, real_form(widened(given))
        if weighs_pairs:
            turned = turned._replace(q=turned.q.to(v.dtype), k=turned.k.to(v.dtype), v=v, wide=wide_y)
        y, last = run(turned)[:2]
        return y, complex_form(last, angle)

    # the frame's angle accumulates across documents, so NaN in a phase must be confined to its document
    turning = in_frame if weighs_pairs else isolated(in_frame)
    return isolated(backend) if weighs_pairs else backend


def normalized(entry: Backend[GateLoop], run: Callable[[GateLoop, str, str], Result]) -> Backend[Normalized]:
    """Return the backend of `normalized_gate_loop` that runs an entry of `gate_loop`'s table.

    A quotient of rounded numbers would be rounded three times, so the outputs of `run` are not rounded.

    Args:
        entry: the entry.
        run: `gate_loop` on canonical inputs, a mode and a backend, with outputs in the accumulation dtype.
    """

    def backend(given: Normalized) -> Result:
        # the reference has its own loop, but split sequences must run through `gate_loop`
        if entry.name == "reference" and not time_is_split():
            return normalized_gate_loop_reference(given)
        q, k, v, *others, floor, signed = given
        b, t, h, _ = q.shape
        inputs = GateLoop(q, k, functional.pad(v, (0, 1), value=1.0), *others)
        # for heads of one channel, the two value columns become two heads, so that fused kernels can run. A
        # single step does not use them, but split sequences must have the same heads on every process
        in_heads = q.shape[-1] == v.shape[-1] == 1 and (t > 1 or time_is_split())
        y, last = run(_in_heads(inputs) if in_heads else inputs, entry.mode, entry.name)
        if in_heads:
            y, last = y.reshape(b, t, h, 2), last.reshape(b, h, 1, 2)
        numerator, total = y[..., :-1], y[..., -1:]
        least = floor[..., None].to(y.dtype) if isinstance(floor, Tensor) else floor
        size = total.abs().clamp(min=least)
        return numerator / (torch.where(total < 0, -size, size) if signed else size), last

    # its conditions read only fields that both kinds of inputs have
    plain: Any = entry
    return replace(plain, run=backend)


def _in_heads(given: GateLoop) -> GateLoop:
    """Reshape inputs with dk = 1 and dv = 2 to twice as many heads with dv = 1."""

    def twice(x: Any, axis: int = 2) -> Any:
        return x if x is None else x.repeat_interleave(2, axis)

    q, k, log_decay, phase = map(twice, (given.q, given.k, given.log_decay, given.phase))
    v, state = given.v.flatten(2)[..., None], given.state.flatten(1)[..., None, None]
    return GateLoop(q, k, v, log_decay, phase, twice(given.bonus, 0), state, given.reset)


def recurrent_triton(given: GateLoop) -> tuple[Tensor, Tensor]:
    """Return y and the last state of `gate_loop`, step by step."""
    q, k, v, log_decay, phase, _, state, reset = given
    return steps(Steps(_in_parts(q), _in_parts(k), v, None, log_decay, state, reset, phase))[:2]


def _in_parts(x: Tensor) -> Tensor:
    """Return complex numbers as pairs of adjacent channels; real numbers as they are."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2) if x.is_complex() else x


matrices_triton = aligned(chunkwise("gate_loop_chunkwise_triton", twin=twin))
chunkwise_triton = in_real_form(matrices_triton, weighs_pairs=True)
chunkwise_triton_wide = in_real_form(matrices_triton, weighs_pairs=True, wide_y=True)
matrices_numba = numba.recurrent("gate_loop_recurrent_numba", twin=twin)
recurrent_numba = in_real_form(matrices_numba)
