"""Decays between pairs of steps, and the token-mixing matrix (eq. 14-21), on tensors (..., t, d).

The weight from step m to step n is exp(sum of log_decay + i phase over m+1..n). Equation 14 writes it as a
quotient of two cumulative products, which underflow. A difference of two cumulative sums does not underflow,
but it loses digits after a strong decay and is NaN after a decay of exactly zero (-inf minus -inf). Its
gradients cancel over the whole sequence. So this module never subtracts: every sum runs over its own segment.
Each exponent is a sum of numbers <= 0, exact up to rounding. A zero decay or a reset is a plain -inf in it,
in values and in gradients.

Phases need no complex arithmetic: Re(x z) is a real product of (Re x, -Im x) and (Re z, Im z). Phases are
summed in float64 and then reduced modulo 2 pi. After some thousand radians a float32 sum would be off by
0.001, and a reduction after every step would add the rounding error of 2 pi at every turn.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core import loop
from linrec.ops.core.ambient import exporting
from linrec.ops.core.precision import real_dtype

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

# largest block for which decays are materialised per pair of steps and key channel
LEAF = 8


def gates(
    log_decay: Tensor | None, phase: Tensor | None, reset: Tensor | None, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return log decays and phases in the layout of this module.

    Args:
        log_decay: None or (b or 1, t or 1, h, dk or 1).
        phase: likewise.
        reset: None or (b, t); becomes a log decay of -inf.
        k: (b, h, t, dk).

    Returns:
        Log decays (b or 1, h or 1, t, dk or 1), or None without decays and resets. Phases in the dtype of
        their sums: zeros if only `k` is complex, None if the recurrence is real.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=real_dtype(k.dtype), device=k.device)
    if phase is None and k.is_complex():
        phase = zero
    if log_decay is not None:
        log_decay = log_decay.expand(-1, k.shape[-2], -1, -1).transpose(1, 2)
    if reset is not None:
        log_decay = torch.where(reset[:, None, :, None], -math.inf, zero if log_decay is None else log_decay)
    if phase is not None:
        # MPS does not support float64
        wide = torch.float32 if k.device.type == "mps" else torch.float64
        phase = phase.to(wide).expand(-1, k.shape[-2], -1, -1).transpose(1, 2)
    return log_decay, phase


def prefix(gate: MaybeTensor) -> MaybeTensor:
    """Return the sum over 1..n for each n: from the initial state to step n."""
    return None if gate is None else gate.cumsum(-2)


def suffix(gate: MaybeTensor) -> MaybeTensor:
    """Return the sum over m+1..t for each m: from step m to the final state."""
    if gate is None:
        return None
    # padded first, because torch.export would ask whether t - 1 steps are one step
    later = functional.pad(gate, (0, 0, 0, 1))[..., 1:, :]
    return later.flip(-2).cumsum(-2).flip(-2)


def wrapped(phase: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sum of phases modulo 2 pi, cast to `dtype`."""
    return torch.remainder(phase, 2 * math.pi).to(dtype)


def between(log_decay: Tensor) -> Tensor:
    """Return the sum over m+1..n for each n >= m, -inf above the diagonal: (..., t) to (..., t, t) [n, m]."""
    t = log_decay.shape[-1]
    n = torch.arange(t, device=log_decay.device)
    # laid out as (m, n), because a cumulative sum is fastest along the last axis
    steps = log_decay[..., None, :].expand(*log_decay.shape[:-1], t, t)
    sums = steps.masked_fill(n[:, None] >= n, 0).cumsum(-1)
    return sums.masked_fill(n[:, None] > n, -math.inf).mT


def keys(k: Tensor, log_weight: Tensor | None, phase: Tensor | None) -> Tensor:
    """Return k exp(log_weight + i phase): (..., d) if phase is None, else (..., 2 d) as (real, imaginary)."""
    if log_weight is not None:
        k = k * log_weight.exp()
    return k if phase is None else torch.cat(_turn(k, phase), dim=-1)


def queries(q: Tensor, log_weight: Tensor | None, phase: Tensor | None) -> Tensor:
    """Return q exp(log_weight + i phase) like `keys`, but as (real, -imaginary), for real inner products."""
    if log_weight is not None:
        q = q * log_weight.exp()
    if phase is None:
        return q.real if q.is_complex() else q
    real, imaginary = _turn(q, phase)
    return torch.cat([real, -imaginary], dim=-1)


def matrix(q: Tensor, k: Tensor, log_decay: Tensor | None, phase: Tensor | None) -> Tensor:
    """Return Re(sum_channels q_n k_m exp(log_decay + i phase over m+1..n)), n >= m, else 0 (eq. 18-21).

    A factor for each pair of steps and channel would need (t, t, d) numbers. So pairs are grouped as in an
    associative scan (eq. 12). Blocks are joined two by two. At each join, the weight of a pair is the product
    of the prefix of n in the right block and the suffix of m in the left block. Both exponents are <= 0,
    every level is a matrix product, and there are log2(t) levels.

    Args:
        q: (..., t, d), real or complex.
        k: (..., t, d), real or complex.
        log_decay: None, (..., t, 1) or (..., t, d), <= 0.
        phase: likewise; not None if `k` is complex.

    Returns:
        Lower triangular, (..., t, t).
    """
    t = q.shape[-2]
    # a program for all lengths has no levels, whose number depends on the length
    if (log_decay is None and phase is None) or (exporting() and isinstance(t, torch.SymInt)):
        return _leaf(q, k, log_decay, phase)
    count, size = leaves(t)
    q, k = blocked(q, count, size), blocked(k, count, size)
    log_decay, phase = blocked(log_decay, count, size), blocked(phase, count, size)
    mixing = _leaf(q, k, log_decay, phase)
    while mixing.shape[-3] > 1:
        right = queries(_half(q, 1), prefix(_half(log_decay, 1)), prefix(_half(phase, 1)))
        left = keys(_half(k, 0), suffix(_half(log_decay, 0)), suffix(_half(phase, 0)))
        cross = right @ left.mT
        upper = torch.cat([_half(mixing, 0), torch.zeros_like(cross)], dim=-1)
        lower = torch.cat([cross, _half(mixing, 1)], dim=-1)
        mixing = torch.cat([upper, lower], dim=-2)
        q, k, log_decay, phase = _joined(q), _joined(k), _joined(log_decay), _joined(phase)
    return mixing[..., 0, :t, :t]


def leaves(time: int) -> tuple[int, int]:
    """Return a number of blocks, a power of two, and their size, that hold `time` steps and at most 25% more.

    They are found by comparisons alone. So under torch.compile a graph with constant sizes serves all lengths
    with the same result; sizes computed from a symbolic length would take minutes to compile.
    """
    count, size = 1, LEAF
    while count * size < time:
        count *= 2
    while size > 1 and count * (size - 1) >= time:
        size -= 1
    return count, size


def chunked(longest: int, *tensors: Tensor | None) -> list[Any]:
    """Return tensors (..., t, d) in chunks of at most `longest` steps, with zeros for steps beyond t."""
    if exporting():
        return [x if x is None else loop.blocks(x, longest, x.dim() - 2) for x in tensors]
    t = next(x.shape[-2] for x in tensors if x is not None)
    # a single chunk has the padded size that `matrix` needs
    count, size = (1, math.prod(leaves(t))) if t <= longest else (math.ceil(t / longest), longest)
    return [blocked(x, count, size) for x in tensors]


def joined(x: Tensor, time: int) -> Tensor:
    """Return the first `time` steps (..., t, d) of chunked tensors."""
    if exporting():
        return loop.joined(x, time, x.dim() - 3)
    return x.flatten(-3, -2)[..., :time, :]


def blocked(x: MaybeTensor, count: int, size: int) -> MaybeTensor:
    """Reshape (..., t, d) to (..., count, size, d), zero-padded at the end."""
    if x is None:
        return None
    missing = count * size - x.shape[-2]
    # `pad` would copy even without padding
    return (functional.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (count, size))


def _half(x: MaybeTensor, side: int) -> MaybeTensor:
    """Return every left (0) or right (1) block, (.., blocks, size, d) to (.., blocks / 2, size, d)."""
    return None if x is None else x[..., side::2, :, :]


def _joined(x: MaybeTensor) -> MaybeTensor:
    """Join pairs of blocks, (..., blocks, size, d) to (..., blocks / 2, 2 size, d)."""
    return None if x is None else x.unflatten(-3, (-1, 2)).flatten(-3, -2)


def _leaf(q: Tensor, k: Tensor, log_decay: Tensor | None, phase: Tensor | None) -> Tensor:
    """Compute `matrix` for a short block: phases as a quotient (eq. 14), decays as a factor per pair."""
    d = q.shape[-1]
    turned = prefix(phase)
    q, k = queries(q, None, turned), keys(k, None, None if turned is None else -turned)
    if log_decay is None:
        return (q @ k.mT).tril()
    weights = between(log_decay.mT).exp()
    if log_decay.shape[-1] == 1:
        return (q @ k.mT) * weights[..., 0, :, :]
    # real and imaginary parts share the decay
    q, k = q.unflatten(-1, (-1, d)), k.unflatten(-1, (-1, d))
    products = torch.einsum("...npd,...mpd->...dnm", q, k)
    return (products * weights).sum(-3)


def _turn(x: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    angle = wrapped(phase, real_dtype(x.dtype))
    return turned(x, angle.cos(), angle.sin())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return real and imaginary part of x exp(i phase), given cosine and sine of the phase."""
    if not x.is_complex():
        return x * cos, x * sin
    return x.real * cos - x.imag * sin, x.real * sin + x.imag * cos


def transition(log_decay: Tensor | None, phase: Tensor | None) -> Tensor | None:
    """Return a = exp(log_decay + i phase)   (eq. 25), or None if both are None."""
    magnitude = None if log_decay is None else log_decay.exp()
    if phase is None:
        return magnitude
    real, imaginary = phase.cos(), phase.sin()
    if magnitude is not None:
        real, imaginary = magnitude * real, magnitude * imaginary
    # in real arithmetic, which torch.compile fuses, unlike complex arithmetic
    return torch.complex(real, imaginary)


def of_steps(
    log_decay: Tensor | None, phase: Tensor | None, reset: Tensor | None, time: int
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the transition of each step, and the mask (b, 1, 1, 1) that clears its state, or Nones."""
    a = transition(log_decay, phase)
    # unbind, because the gradient of indexing in a loop would allocate a full-length tensor at every step
    factors = [None] * time if a is None else a[..., None].expand(-1, time, -1, -1, -1).unbind(1)
    # masks, because multiplying by zero would let NaN and infinity pass a reset
    return factors, [None] * time if reset is None else reset[:, :, None, None, None].unbind(1)
