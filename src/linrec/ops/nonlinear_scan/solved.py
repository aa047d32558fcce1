"""The states of a nonlinear recurrence as a function with gradients of any order.

The gradient is a linear recurrence backwards in time, l_t = g_t + A_{t+1}^T l_{t+1}, with g_t the gradient of
the loss by h_t as an output and A_t the Jacobian of step t. The gradients of x, of the parameters and of the
initial state are then the products of l with the derivatives of all steps, which is one call of the cell.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import vjp

from linrec.ops.core.isolation import beside
from linrec.ops.core.kernel import differentiated
from linrec.ops.core.loop import Tensors
from linrec.ops.nonlinear_scan.torch import Cell, check_result
from linrec.rules import require


class System(NamedTuple):
    """The recurrence h_t = cell(h_{t-1}, *x_t, *parameters) for all steps.

    Attributes:
        cell: takes h, the tensors of x at a step, and the parameters.
        x: tensors (b, t, ..).
        parameters: tensors that the cell shares over time.
        state: h_0.
        cut: None, or (b, t), true at steps that start from h = 0.
        guess: None, or (b, t, ..), where iterations start.
    """

    cell: Cell
    x: Tensors
    parameters: Tensors
    state: Tensor
    cut: Tensor | None
    guess: Tensor | None = None


@runtime_checkable
class Solver(Protocol):
    """A way to compute the states, and the recurrence of the gradient."""

    def solve(self, system: System) -> Tensor:
        """Return the states of all steps."""

    def adjoint(self, system: System, before: Tensor, g: Tensor) -> Tensor:
        """Return l_t = g_t + A_{t+1}^T l_{t+1}; A is zero at a cut, and after the last step."""


def solved(solver: Solver, system: System) -> Tensor:
    """Return the states of all steps, with gradients of any order."""
    cell, x, parameters, state, cut, guess = system
    if not differentiated(*x, *parameters, state):
        return solver.solve(system)
    guess = None if guess is None else guess.detach()
    return _Solved.apply(solver, cell, len(x), cut, guess, state, *x, *parameters)


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(
        solver: Solver,
        cell: Cell,
        n: int,
        cut: Tensor | None,
        guess: Tensor | None,
        state: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        return solver.solve(System(cell, tensors[:n], tensors[n:], state, cut, guess))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solver, ctx.cell, ctx.n, cut, _, *tensors = inputs
        ctx.save_for_backward(output, cut, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, cut, state, *tensors = ctx.saved_tensors
        system = System(ctx.cell, tuple(tensors[: ctx.n]), tuple(tensors[ctx.n :]), state, cut)
        before = states_before(h, system)
        adjoint = ctx.solver.adjoint(system, before, g)

        given = [before, *tensors]
        # the state's gradient is that of `before` at the first step
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[5:]) if needed]

        def applied(*some: Tensor) -> Tensor:
            parts = dict(enumerate(given)) | dict(zip(wanted, some, strict=True))
            first, *rest = parts.values()
            x, parameters = tuple(rest[: ctx.n]), tuple(rest[ctx.n :])
            return everywhere(system._replace(x=x, parameters=parameters), first)

        pull = vjp(applied, *(given[place] for place in wanted))[1]
        gradients: list[Tensor | None] = [None] * len(given)
        for place, gradient in zip(wanted, pull(adjoint), strict=True):
            gradients[place] = gradient
        if gradients[0] is not None:
            of_state = gradients[0][:, 0]
            gradients[0] = of_state if cut is None else of_state.masked_fill(beside(cut[:, 0], of_state), 0)
        return None, None, None, None, None, *gradients

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *given: Any) -> tuple[Tensor, int]:
        # solvers stop when all rows converge, and a cell takes one set of parameters
        each = [
            _Solved.apply(
                *(x if dim is None else x.select(dim, i) for x, dim in zip(given, in_dims, strict=True))
            )
            for i in range(info.batch_size)
        ]
        return torch.stack(each), 0


def check_cell(cell: Cell, x: Tensor, parameters: Tensors, state: Tensor) -> None:
    """Raise if a result of the cell is no state, or needs a gradient of tensors that are no arguments."""
    h = cell(state.detach(), x[:, 0].detach(), *(parameter.detach() for parameter in parameters))
    check_result(h, state)
    require(
        not h.requires_grad,
        "`cell` must get all tensors that need a gradient as `parameters`; got a cell whose result needs a "
        "gradient without them. Pass the weights of a module as `parameters`, not in the cell.",
    )


def states_before(h: Tensor, system: System) -> Tensor:
    """Return h_{t-1} of every step, zeros at a cut."""
    before = torch.cat([system.state[:, None], h[:, :-1]], 1)
    return before if system.cut is None else before.masked_fill(beside(system.cut, before), 0)


def everywhere(system: System, before: Tensor) -> Tensor:
    """Apply the cell to all steps at once."""
    flat = (part.flatten(0, 1) for part in system.x)
    return system.cell(before.flatten(0, 1), *flat, *system.parameters).unflatten(0, before.shape[:2])


def of_next_step(part: Tensor) -> Tensor:
    """Return the part of step t + 1 in reversed time; after the last step, of the last step."""
    return torch.cat([part[:, 1:], part[:, -1:]], 1).flip(1)
