"""The elementwise recurrence in torch operations: step by step, or as a blocked parallel scan of O(t) work.

The scan cuts time into blocks of `BLOCK` steps. One block maps the value that enters it to the value that
leaves it by `leaving = A * entering + B`; a first pass makes A and B of all blocks at once, the recurrence
over blocks is the same problem with t / BLOCK steps, and a second pass walks all blocks at once from their
entering values. It neither divides nor takes logarithms, so a decay of 0 is as exact as any other.
"""

import torch
from torch import Tensor

from linrec.ops.scan.dtypes import accumulation, promoted

BLOCK = 16


def forward(
    a: Tensor, x: Tensor, state: Tensor | None, cut: Tensor | None, reverse: bool, blocked: bool
) -> tuple[Tensor, Tensor]:
    """Return (y, last value); `a` has three axes of full size or 1, `cut` says where it is taken as zero."""
    dtype = promoted(a.dtype, x.dtype)
    wide = accumulation(dtype)
    links, inputs = _links(a, cut), x.to(accumulation(x.dtype))
    y, last = _run(links, inputs, _entering(state, x, wide), reverse, False, blocked)
    return _cast(y, dtype), _cast(last, wide)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # torch 2.11, when it compiles an autograd.Function, drops the gradient of what `to` returned unchanged
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def backward(
    a: Tensor,
    y: Tensor,
    state: Tensor | None,
    cut: Tensor | None,
    dy: Tensor,
    dlast: Tensor,
    reverse: bool,
    needs_a: bool,
    blocked: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a (empty unless needed), x and the state, in the accumulation dtype."""
    wide = accumulation(y.dtype)
    # the adjoint runs against time: it adds dy_t, gives dx_t, and goes on multiplied with conj(a_t)
    dx, dstate = _run(_links(a, cut).conj(), dy.to(wide), dlast, not reverse, True, blocked)
    if not needs_a:
        return dx.new_empty(0), dx, dstate
    first = _entering(state, y, wide).unsqueeze(1)
    before = [y[:, 1:].to(wide), first] if reverse else [first, y[:, :-1].to(wide)]
    da = dx * torch.cat(before, dim=1).conj()
    if cut is not None:
        da = da.masked_fill(cut.unsqueeze(-1), 0)
    return da.sum_to_size(a.shape), dx, dstate


def _links(a: Tensor, cut: Tensor | None) -> Tensor:
    a = a.to(accumulation(a.dtype))
    return a if cut is None else a.masked_fill(cut.unsqueeze(-1), 0)


def _entering(state: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if state is None else state


def _run(
    a: Tensor, x: Tensor, carry: Tensor, reverse: bool, adjoint: bool, blocked: bool
) -> tuple[Tensor, Tensor]:
    """Run the recurrence or its adjoint along the last but one axis; return all values and the last carry."""
    time = x.shape[-2]
    a = a.expand(*a.shape[:-2], time, a.shape[-1])
    if not blocked or time <= 2 * BLOCK:
        return _walk(a, x, carry, reverse, adjoint)
    count, rest = time // BLOCK, time % BLOCK
    # in the order of travel the incomplete block comes last
    body = slice(rest, None) if reverse else slice(time - rest)
    tail = slice(rest) if reverse else slice(time - rest, None)
    a_blocks = a[..., body, :].unflatten(-2, (count, BLOCK))
    x_blocks = x[..., body, :].unflatten(-2, (count, BLOCK))
    through, added = _transfer(a_blocks, x_blocks, reverse, adjoint)
    leaving, _ = _run(through, added, carry, reverse, False, True)
    entering = (
        [leaving[..., 1:, :], carry.unsqueeze(-2)] if reverse else [carry.unsqueeze(-2), leaving[..., :-1, :]]
    )
    values, carries = _walk(a_blocks, x_blocks, torch.cat(entering, dim=-2), reverse, adjoint)
    values = values.flatten(-3, -2)
    # to the bit the last value, which A and B give only to rounding
    last = carries[..., 0 if reverse else -1, :].clone()
    if rest:
        remaining, last = _walk(a[..., tail, :], x[..., tail, :], last, reverse, adjoint)
        values = torch.cat([remaining, values] if reverse else [values, remaining], dim=-2)
    return values, last


def _transfer(a: Tensor, x: Tensor, reverse: bool, adjoint: bool) -> tuple[Tensor, Tensor]:
    """Return A and B of `leaving = A * entering + B` for every block (axes: ..., blocks, steps, channels)."""
    steps = _in_order(a, x, reverse)
    through, added = steps[0]
    if adjoint:
        added = through * added
    for a_t, x_t in steps[1:]:
        added = a_t * (added + x_t) if adjoint else torch.addcmul(x_t, a_t, added)
        through = a_t * through
    return through, added


def _walk(a: Tensor, x: Tensor, carry: Tensor, reverse: bool, adjoint: bool) -> tuple[Tensor, Tensor]:
    values = []
    for a_t, x_t in _in_order(a, x, reverse):
        value = carry + x_t if adjoint else torch.addcmul(x_t, a_t, carry)
        carry = a_t * value if adjoint else value
        values.append(value)
    if reverse:
        values.reverse()
    return torch.stack(values, dim=-2), carry


def _in_order(a: Tensor, x: Tensor, reverse: bool) -> list[tuple[Tensor, Tensor]]:
    steps = list(zip(a.unbind(-2), x.unbind(-2), strict=True))
    return steps[::-1] if reverse else steps
