"""A loop over time, with resets, for networks that no operator runs."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from linrec.ops.core.call import refuse_split_time
from linrec.ops.core.loop import Step, Tensors, loop
from linrec.ops.core.precision import without_autocast

__all__ = ["Step", "Tensors", "step_by_step"]


def step_by_step(
    name: str,
    step: Callable[..., Step],
    state: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    *,
    reset: Bool[Tensor, "b t"] | None = None,
    fresh: Sequence[Tensor | float] | None = None,
    axis: int = 1,
) -> Step:
    """Run state, outputs = step(state, *inputs_t) for every step t, without autocast.

    Without autocast, since the next step would repeat the rounding errors of a step.

    Args:
        name: the mixer's name, for the error.
        step: takes and returns a tuple of states; the outputs of `step` are a tuple too.
        state: the states before the first step. Axis 1 - `axis` is the batch.
        inputs: tensors with time on `axis`; None is None at every step.
        reset: (b, t) bool; where it is true, `step` gets `fresh` in place of the state.
        fresh: the states at the start of a sequence, numbers or tensors that broadcast; None is zeros.
        axis: the axis of time in inputs and outputs, 1 or 0.

    Returns:
        The states after the last step, and the outputs of all steps. Without any steps, the states are the
        states given.

    Raises:
        ValueError: the steps of a sequence are split over processes.

    Example:
        >>> def step(state, x):
        ...     (h,) = state
        ...     h = torch.tanh(h + x)
        ...     return (h,), (h,)
        >>> (h,), (y,) = step_by_step("rnn", step, [torch.zeros(1, 2)], [torch.ones(1, 5, 2)])
        >>> y.shape, torch.equal(y[:, -1], h)
        (torch.Size([1, 5, 2]), True)
    """
    refuse_split_time(name)
    fresh = [0.0] * len(state) if fresh is None else fresh
    axes = sorted({part.dim() for part in state})

    def after_reset(state: Tensors, *now: Tensor | None) -> Step:
        cuts = dict(zip(axes, now[len(inputs) :], strict=True))
        kept = (_replaced(part, cuts[part.dim()], start) for part, start in zip(state, fresh, strict=True))
        return step(tuple(kept), *now[: len(inputs)])

    given = [*inputs, *(_cut(reset, dim, axis) for dim in axes)]
    first = next(x for x in inputs if x is not None)
    with without_autocast(first.device.type):
        if first.shape[axis] > 0:
            return loop(after_reset, tuple(state), given, axis=axis)
        # a step of zeros shows the shapes of outputs
        zeros = (None if x is None else x.new_zeros(x.shape[:axis] + x.shape[axis + 1 :]) for x in given)
        _, outputs = after_reset(tuple(state), *zeros)
    return tuple(state), tuple(y.unsqueeze(axis).narrow(axis, 0, 0) for y in outputs)


def _cut(reset: Tensor | None, dim: int, axis: int) -> Tensor | None:
    """Return the flags of all steps, of which each broadcasts to a state of `dim` axes."""
    if reset is None:
        return None
    flags = reset if axis == 1 else reset.T[:, None]
    return flags.reshape(*flags.shape, *[1] * (dim - flags.dim() + 1))


def _replaced(part: Tensor, cut: Tensor | None, start: Tensor | float) -> Tensor:
    """Return `start` where a sequence starts, and the state elsewhere."""
    if cut is None:
        return part
    return torch.where(cut, start, part) if isinstance(start, Tensor) else part.masked_fill(cut, start)
