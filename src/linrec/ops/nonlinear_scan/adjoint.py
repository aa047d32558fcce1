"""The loop over time whose backward pass is the adjoint loop.

The forward pass runs without autograd and saves the states alone. The backward pass runs
l_t = g_t + A_{t+1}^T l_{t+1} step by step, where a step repeats the cell to differentiate it by h. The
gradients of x and of the parameters are then one call of the cell on all steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from linrec.ops.core.isolation import beside
from linrec.ops.core.kernel import needs_dispatcher
from linrec.ops.core.precision import wide, without_autocast
from linrec.ops.nonlinear_scan.captured import capturable, replayed
from linrec.ops.nonlinear_scan.solved import System, check_cell, of_next_step, solved
from linrec.ops.nonlinear_scan.torch import Cell, NonlinearScan, Values, looped
from linrec.rules import require
from linrec.torch_private import TorchDispatchMode, in_forward_mode

# operations of a cell that gives other values when it is repeated, or on more rows
CHANGING = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


def adjoint(given: NonlinearScan) -> Values:
    """Compute h_t = cell(h_{t-1}, x_t) step by step, with gradients by the adjoint loop."""
    if given.gradient == "adjoint":
        check_repeated(given)
    parameters = tuple(map(wide, given.parameters))
    h = solved(Looped(given.fused), System(given.cell, (given.x,), parameters, given.state, given.reset))
    # a view would keep all states
    return h, h[:, -1].clone()


def takes(given: NonlinearScan) -> bool:
    """Return whether the adjoint loop was chosen, or can replace the loop by autograd.

    Compilers, transforms of torch.func and forward-mode derivatives get the loop by autograd.
    """
    if given.gradient != "auto":
        return given.gradient == "adjoint"
    if torch.compiler.is_compiling() or in_forward_mode():
        return False
    if needs_dispatcher([given.x, given.state, *given.parameters]):
        return False
    try:
        check_repeated(given)
    except (RuntimeError, ValueError, TypeError, IndexError):
        # the loop by autograd has the result, or the error
        return False
    return True


def pays(given: NonlinearScan) -> bool:
    """Return whether the adjoint loop was chosen, or is faster: where its steps are captured or compiled."""
    if given.gradient != "auto":
        return given.gradient == "adjoint"
    return given.x.is_cuda and (given.fused or capturable([given.x]))


def check_repeated(given: NonlinearScan) -> None:
    """Raise unless the cell can be repeated, on rows of several steps at once."""
    if torch.compiler.is_compiling():
        _try(given)
        return
    tried = _Tried()
    with tried:
        _try(given)
    require(
        not tried.changes,
        "`cell` must give the same result again in Newton's method and for `gradient='adjoint'`; got a cell "
        "that draws random numbers or reads values. Pass random numbers in `x`, or choose the mode "
        "'recurrent' with the gradient 'autograd'.",
    )


def _try(given: NonlinearScan) -> None:
    """Call the cell on the rows of the first two steps."""
    x, parameters = wide(given.x[:, :2]), tuple(map(wide, given.parameters))
    state = x.new_zeros(x[:, 0].shape) if given.state is None else wide(given.state)
    with without_autocast(x.device.type):
        check_cell(given.cell, x.flatten(0, 1)[:, None], parameters, state.repeat_interleave(x.shape[1], 0))


class _Tried(TorchDispatchMode):
    """Sees whether an operation draws random numbers or depends on values."""

    changes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.changes = self.changes or _changes(func, args)
        return func(*args, **(kwargs or {}))


def _changes(func: Any, args: Any) -> bool:
    if func in INDEXING:
        # a mask reads values, places do not
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return not CHANGING.isdisjoint(func.tags)


@dataclass(frozen=True)
class Looped:
    """The loop over time, forwards and backwards; see `Solver`. A step is compiled if `fused`."""

    fused: bool

    def solve(self, system: System) -> Tensor:
        """Return the states of all steps."""
        cell, x, parameters, state, cut, _ = system
        if self.fused:
            cell = torch.compile(cell, dynamic=False)

        def run(state: Tensor, *steps: Tensor) -> Tensor:
            now, ends = (steps, None) if cut is None else (steps[:-1], steps[-1])
            return looped(cell, now, parameters, state, ends)[0]

        steps = x if cut is None else (*x, cut)
        return replayed(run, state, steps)

    def adjoint(self, system: System, before: Tensor, g: Tensor) -> Tensor:
        """Return l_t = g_t + A_{t+1}^T l_{t+1}."""
        cell, x, parameters, _, cut, _ = system
        if not torch.is_grad_enabled():
            x, parameters = (tuple(part.detach() for part in parts) for parts in (x, parameters))
        ends = torch.zeros(g.shape[:2], dtype=torch.bool, device=g.device) if cut is None else cut
        ends = torch.cat([ends[:, 1:], torch.ones_like(ends[:, :1])], 1)
        given = (g.flip(1), ends.flip(1), *map(of_next_step, (before, *x)))
        start = torch.zeros_like(g[:, 0])

        def backwards(later: Tensor, *rest: Tensor) -> Tensor:
            return _backwards(cell, later, *rest)

        return solved(self, System(backwards, given, parameters, start, None)).flip(1)


def _backwards(cell: Cell, later: Tensor, g: Tensor, ends: Tensor, before: Tensor, *rest: Tensor) -> Tensor:
    """Return l_t from l_{t+1}, with the cell's arguments at step t + 1, which does not see h_t if it ends."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        pulled = vjp(lambda h: cell(h, *rest), before)[1](later)[0]
    else:
        # the same in a third of the time, without second derivatives
        pulled = _pulled(cell, later, before, *rest)
    return g + pulled.masked_fill(beside(ends, pulled), 0)


def _pulled(cell: Cell, later: Tensor, before: Tensor, *rest: Tensor) -> Tensor:
    with torch.enable_grad():
        h = before.detach().requires_grad_()
        f = cell(h, *rest)
    if not f.requires_grad:
        return torch.zeros_like(later)
    return torch.autograd.grad(f, h, later, materialize_grads=True)[0]
