"""Recurrences of any length: a loop, step by step, and a form for torch.export.

An exported program must work for sequences of all lengths, but ATen has no loop whose length depends on its
inputs. For linear steps, `recurrence` is a fixed number of ATen operations. Time is divided into blocks of
`BLOCK` steps. A block maps its initial value to its final value by `final = A initial + B`. The initial
values
of all blocks are computed by doubling: after k rounds, A and B of a block describe the 2^k blocks up to it.
The number of rounds does not depend on the length. Rounds beyond those that a sequence needs change nothing
and cost little, because there are few blocks.

Blocks are made by indexing, and there are always at least two. Otherwise torch.export could not prove that
the
program works for all lengths: a size would be a difference of two sizes, or could be 1.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linrec.ops.core.ambient import exporting
from linrec.torch_private import exported_scan

BLOCK = 8
ROUNDS = 27
"""Number of rounds if the largest length is unknown: enough for BLOCK * 2 ** ROUNDS steps, about 10^9."""

Binary = Callable[[Tensor, Tensor], Tensor]

Tensors = tuple[Tensor, ...]

Step = tuple[Tensors, Tensors]
"""The states after a step, and its outputs."""


def loop(
    step: Callable[..., Step], state: Tensors, inputs: Sequence[Tensor | None], *, axis: int = 1
) -> Step:
    """Run state, outputs = step(state, *inputs_t) for every step t.

    torch.export turns the loop into `torch.ops.higher_order.scan`, for any number of steps, because a
    nonlinear recurrence cannot be written as a fixed number of ATen operations.

    Args:
        step: a function of a tuple of states and of inputs; it returns two tuples, states and outputs.
        state: the initial states.
        inputs: tensors with at least one step on `axis`; None stays None at every step.
        axis: the time axis of inputs and outputs.

    Returns:
        The states after the last step, and the outputs of all steps.
    """
    given = [x for x in inputs if x is not None]
    places = [None if x is None else sum(y is not None for y in inputs[:i]) for i, x in enumerate(inputs)]

    def stepped(state: Sequence[Tensor], now: Sequence[Tensor]) -> Step:
        return step(tuple(state), *(None if place is None else now[place] for place in places))

    if exporting():
        return _exported(stepped, state, given, axis)
    # unbind, because the gradient of indexing in a loop would allocate a full-length tensor at every step
    rows = []
    for now in zip(*(x.unbind(axis) for x in given), strict=True):
        state, outputs = stepped(state, now)
        rows.append(outputs)
    return state, tuple(torch.stack(steps, axis) for steps in zip(*rows, strict=True))


def _exported(step: Callable[..., Step], state: Tensors, inputs: list[Tensor], axis: int) -> Step:
    def apart(state: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        # states and outputs must not share memory, and states keep their strides
        last, outputs = step(state, now)
        return [x.clone(memory_format=torch.contiguous_format) for x in last], [x.clone() for x in outputs]

    # scan runs over axis 0: its treatment of outputs on other axes depends on the version of torch
    steps = [x.movedim(axis, 0) for x in inputs]
    # copies: a step that also reads the first state as it was would read it in place of the current one
    first = [x.clone(memory_format=torch.contiguous_format) for x in state]
    last, outputs = exported_scan()(apart, first, steps)
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
    """Return y_t = a_t y_{t-1} + x_t for all steps, with y_0 = `state`.

    Args:
        a: transitions (b, t, ...), of any length t, which may be symbolic.
        x: inputs (b, t, ...).
        state: (b, ...).
        product: product of a transition with a transition or a state: `raised` or `matrix_product`; None
            means `passed`.
        plus: addition, over which `product` distributes.
        zero: value of all entries of the zero transition.

    Returns:
        y, as x.
    """
    # the import takes half a second
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    product = passed if product is None else product
    steps = list(zip(blocks(a, BLOCK, 1).unbind(2), blocks(x, BLOCK, 1).unbind(2), strict=True))
    through, added = steps[0]
    for a_t, x_t in steps[1:]:
        through, added = product(a_t, through), plus(product(a_t, added), x_t)
    # a block starts from the final value of the previous block, and the first block from the state
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
    """Return a x, where a zero transition, such as at a reset, gives zero even for NaN."""
    return (a * x).masked_fill(a == 0, 0.0)


def raised(a: Tensor, x: Tensor) -> Tensor:
    """Return a + x for logarithms, where a transition of -inf gives -inf even for NaN."""
    return (a + x).masked_fill(a == -math.inf, -math.inf)


def matrix_product(a: Tensor, x: Tensor) -> Tensor:
    """Return a @ x for (b, count, ..., n, m), or a x for vectors x (b, count, ..., n), without broadcasting.

    `torch.matmul` flattens the batch axes in a way that torch.export cannot prove for every count.
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
    """Return x with its time axis split into blocks (count, overlap + size), zero-padded at the end.

    The last block is entirely padding. The first `overlap` steps of x precede the first block.
    """
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    padded = torch.cat([x, x.new_zeros(*before, 3 * size - 1, *after)], dim=axis)
    begin = size * torch.arange((padded.shape[axis] - overlap) // size, device=x.device)
    steps = begin[:, None] + torch.arange(overlap + size, device=x.device)
    return padded[(slice(None),) * axis + (steps,)]


def _beside(flags: Tensor, x: Tensor) -> Tensor:
    """Reshape flags (count) to broadcast against x (b, count, ...)."""
    return flags.reshape(-1, *[1] * (x.dim() - 2))


def joined(x: Tensor, time: int, axis: int) -> Tensor:
    """Return the first `time` steps of blocks, whose axes are `axis` and the next axis."""
    steps, size = torch.arange(time, device=x.device), x.shape[axis + 1]
    return x[(slice(None),) * axis + (steps // size, steps % size)]
