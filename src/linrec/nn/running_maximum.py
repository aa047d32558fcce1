"""The largest exponent so far, by which sums of exponentials are divided, so that they do not overflow."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.loop import raised, recurrence
from linrec.ops.core.machine import exporting

__all__ = ["maxima_around_steps", "running_maximum"]


def running_maximum(
    x: Float[Tensor, "b t *c"],
    before: Float[Tensor, "b *c"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b steps *c"]:
    """m_t = max(m_{t-1} + log_decay_t, x_t), m_0 = before: the largest of exponents that decay.

    A sum s_t = exp(log_decay_t) s_{t-1} + exp(x_t) u_t, kept as exp(-m_t) s_t, neither overflows nor loses
    its largest part. The sum itself does not depend on m, so m has no gradient here.

    Without decays and resets this is a cumulative maximum; with them, log2(t) passes over the steps, each of
    which doubles the stretch that a step has looked back.

    Args:
        x: exponents (b, t, ..), not +inf.
        before: m_0 (b, ..), -inf where nothing came before.
        log_decay: (b, t, ..), or (..) where it is constant in time, of either sign, not +inf; None is 0.
        reset: (b, t) bool; true at t makes m_t = x_t.

    Returns:
        m_0 .. m_t, (b, t + 1, ..), in the dtype of `x`.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 0.0]).reshape(1, 3, 1)
        >>> none = torch.full((1, 1), -torch.inf)
        >>> running_maximum(x, none, torch.tensor([-1.0])).flatten().tolist()
        [-inf, 3.0, 2.0, 1.0]
    """
    largest = torch.cat([before.detach()[:, None].to(x.dtype), x.detach()], 1)
    if log_decay is None and reset is None:
        return largest.cummax(1).values
    fall = torch.zeros_like(x) if log_decay is None else log_decay.detach().to(x.dtype).expand_as(x)
    if exporting():
        if reset is not None:
            fall = fall.masked_fill(reset.reshape(*reset.shape, *[1] * (x.dim() - 2)), -torch.inf)
        start = largest[:, 0]
        later = recurrence(fall, x.detach(), start, product=raised, plus=torch.maximum, zero=-torch.inf)
        return torch.cat([largest[:, :1], later], 1)
    # from step t-1 to step t, for t = 1 ..; the entry before m_0 is never read
    fall = torch.cat([torch.zeros_like(largest[:, :1]), fall], 1)
    cut = None
    if reset is not None:
        cut = functional.pad(reset, (1, 0)).reshape(*largest.shape[:2], *[1] * (x.dim() - 2))
    span = 1
    while span < largest.shape[1]:
        earlier = largest[:, :-span] + fall[:, span:]
        if cut is not None:
            # the sum of -inf and NaN would be NaN
            earlier = earlier.masked_fill(cut[:, span:], -torch.inf)
            cut = torch.cat([cut[:, :span], cut[:, span:] | cut[:, :-span]], 1)
        largest = torch.cat([largest[:, :span], torch.maximum(largest[:, span:], earlier)], 1)
        fall = torch.cat([fall[:, :span], fall[:, span:] + fall[:, :-span]], 1)
        span *= 2
    return largest


def maxima_around_steps(
    x: Float[Tensor, "b t *c"],
    before: Float[Tensor, "b *c"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t *c"], Float[Tensor, "b t *c"], Float[Tensor, "b *c"]]:
    """Return m_{t-1} and m_t of `running_maximum` for every step t, and the last m.

    m_{t-1} is -inf where a new sequence starts. The last m shares no memory with the others.

    Example:
        >>> x = torch.tensor([3.0, 5.0]).reshape(1, 2, 1)
        >>> earlier, m, last = maxima_around_steps(x, torch.zeros(1, 1))
        >>> earlier.flatten().tolist(), m.flatten().tolist(), last.item()
        ([0.0, 3.0], [3.0, 5.0], 5.0)
    """
    m = running_maximum(x, before, log_decay, reset=reset)
    earlier = m[:, :-1]
    if reset is not None:
        earlier = earlier.masked_fill(reset.reshape(*reset.shape, *[1] * (x.dim() - 2)), -torch.inf)
    return earlier, m[:, 1:], m[:, -1].clone()
