"""The elementwise recurrence in torch operations: step by step, or as a blocked parallel scan of O(t) work.

The scan cuts time into blocks of `BLOCK` steps. One block maps the value that enters it to the value that
leaves it by `leaving = A * entering + B`. A first pass makes A and B of all blocks at once. The recurrence
over blocks is the same problem with t / BLOCK steps. A second pass walks all blocks at once from their
entering values. The scan neither divides nor takes logarithms, so a decay of 0 is as exact as any other.

At a reset, zeros replace the value before it, since NaN times zero is NaN.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.kernel import Differentiable
from linrec.ops.core.machine import exporting
from linrec.ops.core.precision import accumulation, wide
from linrec.ops.core.unbounded import recurrence

BLOCK = 16


class Scan(NamedTuple):
    """What backends take.

    Attributes:
        a: three axes, each of x's size or 1.
        x: (b, t, c).
        state: (b, c) in the accumulation dtype, or None for zeros.
        reset: (b, t); true where a_t counts as zero, which in reversed time is the step before the reset.
        reverse: run from the last step to the first.
    """

    a: Tensor
    x: Tensor
    state: Tensor | None
    reset: Tensor | None
    reverse: bool


class Values(NamedTuple):
    """What backends return: y (b, t, c), and the last value (b, c) in the accumulation dtype."""

    y: Tensor
    last: Tensor


def promoted(a: torch.dtype, x: torch.dtype) -> torch.dtype:
    """Return the dtype of y: of x, but complex where `a` is.

    Example:
        >>> promoted(torch.float32, torch.complex64), promoted(torch.float32, torch.bfloat16)
        (torch.complex64, torch.bfloat16)
    """
    return a if a.is_complex else x


def forward(given: Scan, blocked: bool) -> Values:
    """Run the recurrence, step by step or blocked."""
    a, x, state, cut, reverse = given
    dtype = promoted(a.dtype, x.dtype)
    sums = accumulation(dtype)
    links, start = _cleared(wide(a), cut), entering(state, x, sums)
    if blocked and exporting():
        y, last = _any_length(links, x.to(sums), start, reverse)
        return Values(_cast(y, dtype), last)
    y, last = _run(links, wide(x), cut, start, reverse, False, blocked)
    return Values(_cast(y, dtype), _cast(last, sums))


def _any_length(a: Tensor, x: Tensor, carry: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    a = a.expand(-1, x.shape[1], -1)
    if reverse:
        a, x = a.flip(1), x.flip(1)
    y = recurrence(a.expand_as(x), x, carry)
    return y.flip(1) if reverse else y, y[:, -1]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # torch 2.11, when it compiles an autograd.Function, drops the gradient of what `to` returned unchanged
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def adjoint(
    given: Scan, kept: Values, d: Values, needs: Sequence[bool], blocked: bool = True
) -> tuple[Any, ...]:
    """Return the gradients of a (if it needs one), x and the state, in the accumulation dtype.

    With y_t = a_t y_{t-1} + x_t and the gradients dy of the outputs and dlast of the final state, the
    gradient of step t is g_t = dy_t + conj(a_{t+1}) g_{t+1}, to which dlast is added at the last step. Then

        dx_t = g_t        da_t = g_t conj(y_{t-1})        dstate = conj(a_1) g_1
    """
    a, _, state, cut, reverse = given
    y, dy, dlast = kept.y, *d
    sums = accumulation(y.dtype)
    # the adjoint runs against time: it adds dy_t, gives dx_t, and goes on multiplied with conj(a_t)
    links = _cleared(wide(a), cut).conj()
    dx, dstate = _run(links, dy.to(sums), cut, dlast, not reverse, True, blocked)
    if not needs[0]:
        return None, dx, dstate, None, None
    first = entering(state, y, sums).unsqueeze(1)
    before = [y[:, 1:].to(sums), first] if reverse else [first, y[:, :-1].to(sums)]
    da = _cleared(dx * torch.cat(before, dim=1).conj(), cut)
    return da.sum_to_size(a.shape), dx, dstate, None, None


# the adjoint reads a and y, and not x
SAVED = ("a", "state", "reset", "y")
recurrent = Differentiable(
    Scan,
    Values,
    lambda given, keep: forward(given, False),
    lambda given, kept, d, needs: adjoint(given, kept, d, needs, False),
    again=lambda given, kept, d, needs: adjoint(given, kept, d, needs, False),
    saves=SAVED,
)
in_blocks = Differentiable(
    Scan, Values, lambda given, keep: forward(given, True), adjoint, again=adjoint, saves=SAVED
)


def entering(state: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value before the first step, zeros where it is None."""
    return x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if state is None else state


def _cleared(x: Tensor, cut: Tensor | None) -> Tensor:
    """Zeros where the link is cut, x else."""
    return x if cut is None else x.masked_fill(cut.unsqueeze(-1), 0)


def _run(
    a: Tensor, x: Tensor, cut: Tensor | None, carry: Tensor, reverse: bool, adjoint: bool, blocked: bool
) -> tuple[Tensor, Tensor]:
    """Run the recurrence or its adjoint along the last but one axis; return all values and the last carry."""
    time = x.shape[-2]
    a = a.expand(*a.shape[:-2], time, a.shape[-1])
    if not blocked or time <= 2 * BLOCK:
        return _walk(a, x, cut, carry, reverse, adjoint)
    count, rest = time // BLOCK, time % BLOCK
    # in the order of travel the incomplete block comes last
    body = slice(rest, None) if reverse else slice(time - rest)
    tail = slice(rest) if reverse else slice(time - rest, None)
    a_blocks = a[..., body, :].unflatten(-2, (count, BLOCK))
    x_blocks = x[..., body, :].unflatten(-2, (count, BLOCK))
    cut_blocks = None if cut is None else cut[..., body].unflatten(-1, (count, BLOCK))
    through, added = _transfer(a_blocks, x_blocks, cut_blocks, reverse, adjoint)
    cut_between = None if cut_blocks is None else cut_blocks.any(-1)
    leaving, _ = _run(through, added, cut_between, carry, reverse, False, True)
    entering = (
        [leaving[..., 1:, :], carry.unsqueeze(-2)] if reverse else [carry.unsqueeze(-2), leaving[..., :-1, :]]
    )
    values, carries = _walk(a_blocks, x_blocks, cut_blocks, torch.cat(entering, dim=-2), reverse, adjoint)
    values = values.flatten(-3, -2)
    # to the bit the last value, which A and B give only to rounding
    last = carries[..., 0 if reverse else -1, :].clone()
    if rest:
        cut_tail = None if cut is None else cut[..., tail]
        remaining, last = _walk(a[..., tail, :], x[..., tail, :], cut_tail, last, reverse, adjoint)
        values = torch.cat([remaining, values] if reverse else [values, remaining], dim=-2)
    return values, last


def _transfer(
    a: Tensor, x: Tensor, cut: Tensor | None, reverse: bool, adjoint: bool
) -> tuple[Tensor, Tensor]:
    """Return A and B of `leaving = A * entering + B` for every block (axes: ..., blocks, steps, channels)."""
    steps = _in_order(a, x, cut, reverse)
    through, added, cut_t = steps[0]
    if adjoint:
        added = _cleared(through * added, cut_t)
    for a_t, x_t, cut_t in steps[1:]:
        if adjoint:
            added = _cleared(a_t * (added + x_t), cut_t)
        else:
            added = torch.addcmul(x_t, a_t, _cleared(added, cut_t))
        through = a_t * through
    return _cleared(through, None if cut is None else cut.any(-1)), added


def _walk(
    a: Tensor, x: Tensor, cut: Tensor | None, carry: Tensor, reverse: bool, adjoint: bool
) -> tuple[Tensor, Tensor]:
    values = []
    for a_t, x_t, cut_t in _in_order(a, x, cut, reverse):
        if adjoint:
            value = carry + x_t
            carry = _cleared(a_t * value, cut_t)
        else:
            carry = value = torch.addcmul(x_t, a_t, _cleared(carry, cut_t))
        values.append(value)
    if reverse:
        values.reverse()
    return torch.stack(values, dim=-2), carry


def _in_order(
    a: Tensor, x: Tensor, cut: Tensor | None, reverse: bool
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    cuts = [None] * a.shape[-2] if cut is None else cut.unbind(-1)
    steps = list(zip(a.unbind(-2), x.unbind(-2), cuts, strict=True))
    return steps[::-1] if reverse else steps
