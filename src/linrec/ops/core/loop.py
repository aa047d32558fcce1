"""A loop over time, for recurrences that are no linear operator: step by step, as their equations are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linrec.ops.core.machine import exporting

Tensors = tuple[Tensor, ...]

Step = tuple[Tensors, Tensors]
"""The states after a step, and its outputs."""


def loop(
    step: Callable[..., Step], state: Tensors, inputs: Sequence[Tensor | None], *, axis: int = 1
) -> Step:
    """Run state, outputs = step(state, *inputs_t) for every step t.

    torch.export makes one operation of the loop, `torch.ops.higher_order.scan`, for any number of steps: no
    fixed number of ATen operations is a recurrence that is not linear.

    Args:
        step: takes and returns a tuple of states; its outputs are a tuple too.
        state: before the first step.
        inputs: with at least one step on `axis`; None is None at every step.
        axis: the axis of time, in inputs and outputs.

    Returns:
        The states after the last step, and the outputs of all steps.

    Example:
        >>> def step(state, x):
        ...     (h,) = state
        ...     h = torch.tanh(h + x)
        ...     return (h,), (h,)
        >>> (h,), (y,) = loop(step, (torch.zeros(2),), [torch.ones(2, 5)])
        >>> y.shape, torch.equal(y[:, -1], h)
        (torch.Size([2, 5]), True)
    """
    given = [x for x in inputs if x is not None]
    places = [None if x is None else sum(y is not None for y in inputs[:i]) for i, x in enumerate(inputs)]

    def stepped(state: Sequence[Tensor], now: Sequence[Tensor]) -> Step:
        return step(tuple(state), *(None if place is None else now[place] for place in places))

    if exporting():
        return _exported(stepped, state, given, axis)
    # unbound once: the gradient of an index in a loop would be a tensor of all steps, for every step
    rows = []
    for now in zip(*(x.unbind(axis) for x in given), strict=True):
        state, outputs = stepped(state, now)
        rows.append(outputs)
    return state, tuple(torch.stack(steps, axis) for steps in zip(*rows, strict=True))


def _exported(step: Callable[..., Step], state: Tensors, inputs: list[Tensor], axis: int) -> Step:
    # its import takes a second
    from torch._higher_order_ops.scan import scan

    def apart(state: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        # states and outputs must not share memory, and states keep their strides
        last, outputs = step(state, now)
        return [x.clone(memory_format=torch.contiguous_format) for x in last], [x.clone() for x in outputs]

    # on which axis outputs have the steps of another one than the first depends on the version of torch
    steps = [x.movedim(axis, 0) for x in inputs]
    last, outputs = scan(apart, [x.contiguous() for x in state], steps)
    return tuple(last), tuple(x.movedim(0, axis) for x in outputs)
