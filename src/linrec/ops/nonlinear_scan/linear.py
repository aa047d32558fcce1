"""The linear recurrences of one Newton iteration: with whole Jacobians, with diagonals, and damped."""

import torch
from torch import Tensor

from linrec.ops.core.loop import matrix_product, recurrence
from linrec.ops.scan import scan
from linrec.ops.scan.torch import Scan

# on a CPU, the least entries of the matrices of a step for which a loop of n^2 products is faster
LOOPED = 512


def whole(J: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Return h_t = J_t h_{t-1} + b_t with matrices J (b, t, .., n, n) and b (b, t, .., n)."""
    entries = J[:, :1].numel()
    if J.device.type != "cpu" or torch.compiler.is_compiling() or entries < LOOPED:
        return recurrence(J, b, state, product=matrix_product)
    h, steps = state, []
    for J_t, b_t in zip(J.unbind(1), b.unbind(1), strict=True):
        h = (J_t @ h[..., None])[..., 0] + b_t
        steps.append(h)
    return torch.stack(steps, 1)


def diagonal(d: Tensor, b: Tensor, state: Tensor | None, *, reverse: bool = False) -> Tensor:
    """Return h_t = d_t * h_{t-1} + b_t, where d and b are (b, t, .., n)."""
    entering = None if state is None else state.flatten(1)
    # without checks, which torch.compile refuses in a backward pass
    given = Scan(d.flatten(2), b.flatten(2), entering, None, reverse)
    h, _ = scan.operator.proceed(given, "auto", "auto")
    return h.reshape(b.shape)


def smoothed(d: Tensor, b: Tensor, state: Tensor, near: Tensor, damping: float) -> Tensor:
    """Return the h that minimises sum_t |h_t - d_t h_{t-1} - b_t|^2 + damping |h_t - near_t|^2.

    This is a Kalman smoother with scalar variances: the dynamics have noise of variance 1, and `near` is an
    observation of h with variance 1 / damping. Filter and smoother are scans.
    """
    # P, the variance after an observation, is a Moebius map of the variance before: p / q with
    # (p, q)_t = [[d^2, 1], [damping d^2, 1 + damping]] (p, q)_{t-1}
    square, one = d * d, torch.ones_like(d)
    step = torch.stack([square, one, damping * square, (1 + damping) * one], -1).unflatten(-1, (2, 2))
    start = torch.stack([torch.zeros_like(state), torch.ones_like(state)], -1)
    zero = torch.zeros_like(step[..., 0])
    p, q = recurrence(step, zero, start, product=_scaled_product).unbind(-1)
    P = p / q
    before = torch.cat([torch.zeros_like(P[:, :1]), P[:, :-1]], 1)
    prior = square * before + 1
    gain = damping * prior / (1 + damping * prior)
    mean = diagonal((1 - gain) * d, (1 - gain) * b + gain * near, state)
    # backwards: h_t = mean_t + C_t (h_{t+1} - d_{t+1} mean_t - b_{t+1})
    following = [torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1) for x in (d, b, 1 / prior)]
    C = P * following[0] * following[2]
    return diagonal(C, mean - C * (following[0] * mean + following[1]), None, reverse=True)


def _small_product(a: Tensor, x: Tensor) -> Tensor:
    if x.dim() < a.dim():
        return (a * x[..., None, :]).sum(-1)
    return (a[..., None] * x[..., None, :, :]).sum(-2)


def _scaled_product(a: Tensor, x: Tensor) -> Tensor:
    """Return a x divided by its largest entry: a ratio of entries does not change, and nothing overflows."""
    y = _small_product(a, x)
    entries = (-1,) if x.dim() < a.dim() else (-2, -1)
    return y / y.amax(entries, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
