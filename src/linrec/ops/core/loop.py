"""Recurrences of any number of steps: as a loop, step by step, and for torch.export.

An exported program serves sequences of all lengths, and ATen has no loop whose length its inputs decide. For
linear steps, `recurrence` is a fixed number of ATen operations. Time is cut into blocks of `BLOCK` steps. One
block maps the value that enters it to the value that leaves it by `leaving = A entering + B`, and what enters
all blocks is found by doubling: after k rounds, A and B of a block stand for the 2^k blocks up to it. The
number of rounds does not depend on the length. Rounds that a sequence is too short for change nothing, and
cost little: there are few blocks.

Blocks are made by indices, and there are always several: torch.export cannot prove that one program serves
all lengths where a size is the difference of two others, or may be 1.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linrec.ops.core.machine import exporting

BLOCK = 8
ROUNDS = 27
"""Rounds for BLOCK * 2 ** ROUNDS steps, a thousand million, where no largest length is known."""

Binary = Callable[[Tensor, Tensor], Tensor]

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


def recurrence(
    a: Tensor,
    x: Tensor,
    state: Tensor,
    *,
    product: Binary | None = None,
    plus: Binary = torch.add,
    zero: float = 0.0,
) -> Tensor:
    """Return y_t = a_t y_{t-1} + x_t of all steps, with y_0 = `state`.

    Args:
        a: transitions (b, t, ...), of any length t, which may be symbolic.
        x: inputs (b, t, ...).
        state: (b, ...).
        product: of a transition and a transition or a state: `raised` or `matrix_product`; None is `passed`.
        plus: the sum, which `product` distributes over.
        zero: every entry of the transition that nothing passes.

    Returns:
        y, as x.

    Example:
        >>> ones = torch.ones(1, 3, 1)
        >>> recurrence(0.5 * ones, ones, torch.zeros(1, 1)).flatten().tolist()
        [1.0, 1.5, 1.75]
    """
    # its import takes half a second
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    product = passed if product is None else product
    steps = list(zip(blocks(a, BLOCK, 1).unbind(2), blocks(x, BLOCK, 1).unbind(2), strict=True))
    through, added = steps[0]
    for a_t, x_t in steps[1:]:
        through, added = product(a_t, through), plus(product(a_t, added), x_t)
    # what enters a block leaves the one before; what enters the first is the state, whatever came before
    count = added.shape[1]
    block = torch.arange(count, device=x.device)
    first = block == 0
    through = through.roll(1, dims=1).masked_fill(_beside(first, through), zero)
    entering = torch.where(_beside(first, added), state[:, None], added.roll(1, dims=1))
    for k in range(ROUNDS):
        if statically_known_true(count <= 1 << k):
            break
        earlier = (block - (1 << k)).clamp(min=0)
        entering = plus(product(through, entering.index_select(1, earlier)), entering)
        through = product(through, through.index_select(1, earlier))
    value, values = entering, []
    for a_t, x_t in steps:
        value = plus(product(a_t, value), x_t)
        values.append(value)
    return joined(torch.stack(values, dim=2), x.shape[1], 1)


def passed(a: Tensor, x: Tensor) -> Tensor:
    """Return a x; a transition of zero, as a reset makes it, passes nothing, not even NaN."""
    return (a * x).masked_fill(a == 0, 0.0)


def raised(a: Tensor, x: Tensor) -> Tensor:
    """Return a + x, of logarithms: a transition of -inf passes nothing, not even NaN."""
    return (a + x).masked_fill(a == -math.inf, -math.inf)


def matrix_product(a: Tensor, x: Tensor) -> Tensor:
    """Return a @ x for (b, count, ..., n, m), or a x for vectors x (b, count, ..., n), without broadcasting.

    `torch.matmul` makes one axis of the batch in a way that torch.export cannot prove for all counts.
    """
    if x.dim() < a.dim():
        return matrix_product(a, x[..., None])[..., 0]
    shape = x.shape[:-2]
    batch = math.prod(shape)
    a, x = (
        y.clone(memory_format=torch.contiguous_format).flatten().unflatten(0, (batch, *y.shape[-2:]))
        for y in (a, x)
    )
    return torch.bmm(a, x).flatten().unflatten(0, (*shape, a.shape[1], x.shape[2]))


def blocks(x: Tensor, size: int, axis: int, *, overlap: int = 0) -> Tensor:
    """Return x with its axis of time as blocks (count, overlap + size), with zeros at the end of time.

    At least one whole block is zeros. The first `overlap` steps of x are those in front of the first block.
    """
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    padded = torch.cat([x, x.new_zeros(*before, 3 * size - 1, *after)], dim=axis)
    begin = size * torch.arange((padded.shape[axis] - overlap) // size, device=x.device)
    steps = begin[:, None] + torch.arange(overlap + size, device=x.device)
    return padded[(slice(None),) * axis + (steps,)]


def _beside(flags: Tensor, x: Tensor) -> Tensor:
    """Flags (count) for x (b, count, ...)."""
    return flags.reshape(-1, *[1] * (x.dim() - 2))


def joined(x: Tensor, time: int, axis: int) -> Tensor:
    """Return the first `time` steps of the blocks on `axis` and the next one."""
    steps, size = torch.arange(time, device=x.device), x.shape[axis + 1]
    return x[(slice(None),) * axis + (steps // size, steps % size)]
