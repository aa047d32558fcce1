"""The elementwise recurrence in torch operations: step by step, or as a blocked parallel scan of O(t) work.

The scan divides time into blocks of `BLOCK` steps. A block maps its initial value to its final value by
`final = A * initial + B`. A first pass computes A and B of all blocks in parallel. The recurrence over blocks
is the same problem with t / BLOCK steps. A second pass runs all blocks in parallel from their initial values.
The scan neither divides nor takes logarithms, so a decay of 0 is as exact as any other.

At a reset, the previous value is replaced by zeros, because NaN times zero is NaN.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.ambient import exporting
from linrec.ops.core.kernel import Differentiable, Memory, Space, kernel_op, like
from linrec.ops.core.loop import recurrence
from linrec.ops.core.precision import accumulation, wide

BLOCK = 16


class Scan(NamedTuple):
    """Canonical inputs of the backends.

    Attributes:
        a: three axes, each of x's size or 1.
        x: (b, t, c).
        state: (b, c) in the accumulation dtype, or None for zeros.
        reset: (b, t); true at steps that ignore the value before them in the direction of travel.
        reverse: run from the last step to the first.
    """

    a: Tensor
    x: Tensor
    state: Tensor | None
    reset: Tensor | None
    reverse: bool


class Values(NamedTuple):
    """Outputs of the backends: y (b, t, c), and the last value (b, c) in the accumulation dtype."""

    y: Tensor
    last: Tensor


def promoted(a: torch.dtype, x: torch.dtype) -> torch.dtype:
    """Return the dtype of y: the dtype of x, or the dtype of `a` if that is complex."""
    return a if a.is_complex else x


def forward(given: Scan, keep: bool = False, *, blocked: bool = True) -> Values:
    """Run the recurrence, step by step or in blocks."""
    dtype = promoted(given.a.dtype, given.x.dtype)
    sums = accumulation(dtype)
    steps, start = _steps(given, wide(given.x)), entering(given.state, given.x, sums)
    if blocked and exporting():
        a, x = (y.flip(1) if given.reverse else y for y in (steps.a.expand_as(steps.x), steps.x.to(sums)))
        y = recurrence(a, x, start)
        return Values(_cast(y.flip(1) if given.reverse else y, dtype), y[:, -1])
    y, last = _run(steps, start, blocked)
    return Values(_cast(y, dtype), _cast(last, sums))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # torch 2.11 drops gradients when compiling an autograd.Function if `to` returns its input unchanged
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def adjoint(given: Scan, kept: Values, d: Values, needs: Sequence[bool], *, blocked: bool = True) -> Any:
    """Return the gradients of a (if it needs a gradient), x and the state, in the accumulation dtype.

    Let dy be the gradients of the outputs in y_t = a_t y_{t-1} + x_t, and dlast the gradient of the final
    state. The gradient of step t is g_t = dy_t + conj(a_{t+1}) g_{t+1}, plus dlast at the last step. Then

        dx_t = g_t        da_t = g_t conj(y_{t-1})        dstate = conj(a_1) g_1
    """
    y, sums = kept.y, accumulation(kept.y.dtype)
    # the adjoint runs in reverse: a step adds dy_t, outputs dx_t, and passes on conj(a_t) dx_t
    steps = _steps(given, d.y.to(sums), adjoint=True)
    dx, dstate = _run(steps, d.last, blocked)
    if not needs[0]:
        return None, dx, dstate, None, None
    da = _cleared(dx * _before(given, y, sums).conj(), steps.cut)
    return da.sum_to_size(given.a.shape), dx, dstate, None, None


def tangent(run: Callable[[Scan], Values], given: Scan, out: Values, d: Scan) -> Values:
    """Return the derivative in forward mode, which is a scan: dy_t = a_t dy_{t-1} + (da_t y_{t-1} + dx_t)."""
    y, sums = out.y, accumulation(out.y.dtype)
    cut = None if given.reset is None else given.reset.unsqueeze(-1)
    dx = _cleared(wide(d.a) * _before(given, y, sums), cut) + wide(d.x)
    dy, dlast = run(Scan(wide(given.a), dx, d.state, given.reset, given.reverse))
    return Values(_cast(dy, y.dtype), dlast)


def _before(given: Scan, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return y_{t-1} of every step, in the direction of travel."""
    first = entering(given.state, y, dtype).unsqueeze(1)
    before = [y[:, 1:].to(dtype), first] if given.reverse else [first, y[:, :-1].to(dtype)]
    return torch.cat(before, dim=1)


def memory(given: Scan, keep: bool) -> tuple[Space, Space]:
    """Return the memory of the outputs of a kernel."""
    dtype, (batch, _, channels) = promoted(given.a.dtype, given.x.dtype), given.x.shape
    return like(given.x, dtype), Memory((batch, channels), accumulation(dtype))


# the adjoint reads a and y, but not x
_SAVED = ("a", "state", "reset", "y")


def _forward_by_step(given: Scan, keep: bool) -> Values:
    return forward(given, blocked=False)


def _adjoint_by_step(given: Scan, kept: Values, d: Values, needs: Sequence[bool]) -> Any:
    return adjoint(given, kept, d, needs, blocked=False)


# plain functions, because torch.compile does not support `partial` here
recurrent = Differentiable(Scan, Values, _forward_by_step, _adjoint_by_step, saves=_SAVED, tangent=tangent)
in_blocks = Differentiable(Scan, Values, forward, adjoint, saves=_SAVED, tangent=tangent)
kernel = partial(
    kernel_op,
    inputs=Scan,
    outputs=Values,
    memory=memory,
    again=adjoint,
    batch="x",
    follows={"last": "state"},
    saves=_SAVED,
    tangent=tangent,
)
"""Returns the kernels of a backend as a function; see `linrec.ops.core.kernel.kernel_op`."""


def entering(state: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the initial value; None becomes zeros."""
    return x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if state is None else state


class _Steps(NamedTuple):
    """Steps to run: a and x (..., steps, channels) and resets (..., steps, 1), and the direction."""

    a: Tensor
    x: Tensor
    cut: Tensor | None
    reverse: bool
    adjoint: bool


def _steps(given: Scan, x: Tensor, adjoint: bool = False) -> _Steps:
    """Return the steps of the recurrence, or of its adjoint, which runs in the other direction."""
    cut = None if given.reset is None else given.reset.unsqueeze(-1)
    a = _cleared(wide(given.a), cut).expand(-1, x.shape[1], -1)
    return _Steps(a.conj() if adjoint else a, x, cut, given.reverse != adjoint, adjoint)


def _each(steps: _Steps, change: Callable[[Tensor], Tensor]) -> _Steps:
    cut = None if steps.cut is None else change(steps.cut)
    return steps._replace(a=change(steps.a), x=change(steps.x), cut=cut)


def _cleared(x: Tensor, cut: Tensor | None) -> Tensor:
    """Return x with zeros where the link is cut."""
    return x if cut is None else x.masked_fill(cut, 0)


def _run(steps: _Steps, carry: Tensor, blocked: bool) -> tuple[Tensor, Tensor]:
    """Run the recurrence or its adjoint along axis -2; return all values and the last carried value."""
    time, reverse = steps.x.shape[-2], steps.reverse
    if not blocked or time <= 2 * BLOCK:
        return _walk(steps, carry)
    count, rest = time // BLOCK, time % BLOCK
    # the incomplete block comes last in the direction of travel
    body, tail = (
        (slice(time - rest), slice(time - rest, None)) if not reverse else (slice(rest, None), slice(rest))
    )
    blocks = _each(steps, lambda x: x[..., body, :].unflatten(-2, (count, BLOCK)))
    leaving, _ = _run(_transfer(blocks), carry, True)
    first = carry.unsqueeze(-2)
    entering = [leaving[..., 1:, :], first] if reverse else [first, leaving[..., :-1, :]]
    values, carries = _walk(blocks, torch.cat(entering, dim=-2))
    values = values.flatten(-3, -2)
    # the last value of the walk, because A and B reproduce it only up to rounding
    last = carries[..., 0 if reverse else -1, :].clone()
    if rest:
        remaining, last = _walk(_each(steps, lambda x: x[..., tail, :]), last)
        values = torch.cat([remaining, values] if reverse else [values, remaining], dim=-2)
    return values, last


def _transfer(blocks: _Steps) -> _Steps:
    """Return A and B of `final = A * initial + B` for every block (axes: ..., blocks, steps, channels)."""
    steps = _in_order(blocks)
    through, added, cut_t = steps[0]
    if blocks.adjoint:
        added = _cleared(through * added, cut_t)
    for a_t, x_t, cut_t in steps[1:]:
        if blocks.adjoint:
            added = _cleared(a_t * (added + x_t), cut_t)
        else:
            added = torch.addcmul(x_t, a_t, _cleared(added, cut_t))
        through = a_t * through
    cut = None if blocks.cut is None else blocks.cut.any(-2)
    return _Steps(_cleared(through, cut), added, cut, blocks.reverse, False)


def _walk(steps: _Steps, carry: Tensor) -> tuple[Tensor, Tensor]:
    values = []
    for a_t, x_t, cut_t in _in_order(steps):
        if steps.adjoint:
            value = carry + x_t
            carry = _cleared(a_t * value, cut_t)
        else:
            carry = value = torch.addcmul(x_t, a_t, _cleared(carry, cut_t))
        values.append(value)
    return torch.stack(values[::-1] if steps.reverse else values, dim=-2), carry


def _in_order(steps: _Steps) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    a, x = steps.a.unbind(-2), steps.x.unbind(-2)
    cuts = [None] * len(x) if steps.cut is None else steps.cut.unbind(-2)
    ordered = list(zip(a, x, cuts, strict=True))
    return ordered[::-1] if steps.reverse else ordered
