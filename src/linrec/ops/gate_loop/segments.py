"""What passes from step to step, and the token-mixing matrix it makes (eq. 14-21), on (..., t, d) tensors.

Step m reaches step n with the weight exp(sum of log_decay + i phase over m+1..n). Equation 14 writes that as
a quotient of two cumulative products, which underflow. A difference of two cumulative sums does not, but it
loses its digits after a strong decay, is NaN after a magnitude of exactly zero (-inf minus -inf), and its
gradients cancel over the whole sequence. So nothing is subtracted here: every sum runs over its own segment.
Each exponent is a sum of numbers <= 0, exact to rounding, and a magnitude of zero or a reset is a plain -inf
in it, in values and in gradients.

Phases need no complex arithmetic: Re(x z) is a real product of (Re x, -Im x) and (Re z, Im z). They are
summed in float64 and reduced modulo 2 pi before they meet other numbers: after some thousand radians float32
is off by 0.001, and reducing as one goes would add the rounding error of 2 pi at every turn.
"""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core import loop
from linrec.ops.core.machine import exporting
from linrec.ops.core.precision import real_dtype

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

# the longest block whose decays are written out per pair of steps and key channel
LEAF = 8


def gates(
    log_decay: Tensor | None, phase: Tensor | None, reset: Tensor | None, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return log decays and phases as this module takes them.

    Args:
        log_decay: None or (b or 1, t or 1, h, dk or 1).
        phase: likewise.
        reset: None or (b, t); becomes a log decay of -inf.
        k: (b, h, t, dk).

    Returns:
        Log decays (b or 1, h or 1, t, dk or 1), None where there are neither decays nor resets; phases in
        the dtype that they are summed in, zero where only `k` is complex, None where the recurrence is real.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=real_dtype(k.dtype), device=k.device)
    if phase is None and k.is_complex():
        phase = zero
    if log_decay is not None:
        log_decay = log_decay.expand(-1, k.shape[-2], -1, -1).transpose(1, 2)
    if reset is not None:
        log_decay = torch.where(reset[:, None, :, None], -math.inf, zero if log_decay is None else log_decay)
    if phase is not None:
        # MPS has nothing wider than float32
        wide = torch.float32 if k.device.type == "mps" else torch.float64
        phase = phase.to(wide).expand(-1, k.shape[-2], -1, -1).transpose(1, 2)
    return log_decay, phase


def prefix(gate: MaybeTensor) -> MaybeTensor:
    """Sum over 1..n for each n: from the initial state to step n."""
    return None if gate is None else gate.cumsum(-2)


def suffix(gate: MaybeTensor) -> MaybeTensor:
    """Sum over m+1..t for each m: from step m to the final state."""
    if gate is None:
        return None
    later = functional.pad(gate[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2)


def wrapped(phase: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum of phases modulo 2 pi, in the dtype of what it turns."""
    return torch.remainder(phase, 2 * math.pi).to(dtype)


def between(log_decay: Tensor) -> Tensor:
    """Sum over m+1..n for each n >= m, -inf above the diagonal: (..., t) to (..., t, t) indexed by n, m."""
    t = log_decay.shape[-1]
    n = torch.arange(t, device=log_decay.device)
    # laid out as (m, n), because a running sum is quickest along the last axis
    steps = log_decay[..., None, :].expand(*log_decay.shape[:-1], t, t)
    sums = steps.masked_fill(n[:, None] >= n, 0).cumsum(-1)
    return sums.masked_fill(n[:, None] > n, -math.inf).mT


def keys(k: Tensor, log_weight: Tensor | None, phase: Tensor | None) -> Tensor:
    """k exp(log_weight + i phase): (..., d) where phase is None, else (..., 2 d) as (real, imaginary)."""
    if log_weight is not None:
        k = k * log_weight.exp()
    return k if phase is None else torch.cat(_turn(k, phase), dim=-1)


def queries(q: Tensor, log_weight: Tensor | None, phase: Tensor | None) -> Tensor:
    """As `keys`, but (real, -imaginary): the inner product of the two is the real part of theirs."""
    if log_weight is not None:
        q = q * log_weight.exp()
    if phase is None:
        return q.real if q.is_complex() else q
    real, imaginary = _turn(q, phase)
    return torch.cat([real, -imaginary], dim=-1)


def matrix(q: Tensor, k: Tensor, log_decay: Tensor | None, phase: Tensor | None) -> Tensor:
    """Re(sum over channels of q_n k_m exp(log_decay + i phase over m+1..n)) for n >= m, else 0 (eq. 18-21).

    A factor for each pair of steps and channel would need (t, t, d) numbers. So pairs are grouped as in an
    associative scan (eq. 12): blocks are joined two by two, and a pair is weighed by the prefix of n in the
    right block and the suffix of m in the left one, where the two meet. Both exponents are <= 0, every level
    is a matrix product, and there are log2(t) levels.

    Args:
        q: (..., t, d), real or complex.
        k: (..., t, d), real or complex.
        log_decay: None, (..., t, 1) or (..., t, d), <= 0.
        phase: likewise; not None where `k` is complex.

    Returns:
        Lower triangular, (..., t, t).
    """
    t = q.shape[-2]
    if log_decay is None and phase is None:
        return _leaf(q, k, None, None)
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
    """Return how many blocks, a power of two, of how many steps hold `time` steps, at most a quarter more.

    Found by comparisons alone, so that under torch.compile one graph, of constant sizes, serves all lengths
    of the same answer: with sizes computed from a symbolic length it compiles for minutes.

    Example:
        >>> leaves(9), leaves(1000), leaves(1025)
        ((2, 5), (128, 8), (256, 5))
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
    # one chunk has the size that `matrix` would bring it to
    count, size = (1, math.prod(leaves(t))) if t <= longest else (math.ceil(t / longest), longest)
    return [blocked(x, count, size) for x in tensors]


def joined(x: Tensor, time: int) -> Tensor:
    """Return the first `time` steps (..., t, d) of chunks."""
    if exporting():
        return loop.joined(x, time, x.dim() - 3)
    return x.flatten(-3, -2)[..., :time, :]


def blocked(x: MaybeTensor, count: int, size: int) -> MaybeTensor:
    """(..., t, d) to (..., count, size, d), with zeros for the steps that are missing."""
    if x is None:
        return None
    missing = count * size - x.shape[-2]
    # padding by nothing would copy
    return (functional.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (count, size))


def _half(x: MaybeTensor, side: int) -> MaybeTensor:
    """The left (0) or right (1) block of each pair, (..., blocks, size, d) to (..., blocks / 2, size, d)."""
    return None if x is None else x[..., side::2, :, :]


def _joined(x: MaybeTensor) -> MaybeTensor:
    """(..., blocks, size, d) to (..., blocks / 2, 2 size, d)."""
    return None if x is None else x.unflatten(-3, (-1, 2)).flatten(-3, -2)


def _leaf(q: Tensor, k: Tensor, log_decay: Tensor | None, phase: Tensor | None) -> Tensor:
    """`matrix` of a short block: phases as the quotient of eq. 14, decays as one factor per pair."""
    d = q.shape[-1]
    turned = prefix(phase)
    q, k = queries(q, None, turned), keys(k, None, None if turned is None else -turned)
    if log_decay is None:
        return (q @ k.mT).tril()
    weights = between(log_decay.mT).exp()
    if log_decay.shape[-1] == 1:
        return (q @ k.mT) * weights[..., 0, :, :]
    # real and imaginary parts decay alike
    q, k = q.unflatten(-1, (-1, d)), k.unflatten(-1, (-1, d))
    products = torch.einsum("...npd,...mpd->...dnm", q, k)
    return (products * weights).sum(-3)


def _turn(x: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    angle = wrapped(phase, real_dtype(x.dtype))
    return turned(x, angle.cos(), angle.sin())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return real and imaginary part of x exp(i phase), of cosine and sine of the phase."""
    if not x.is_complex():
        return x * cos, x * sin
    return x.real * cos - x.imag * sin, x.real * sin + x.imag * cos
