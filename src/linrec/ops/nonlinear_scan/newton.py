"""Newton's method for a nonlinear recurrence: each iteration is a linear recurrence over all steps.

    f_t = cell(h_{t-1}, x_t)    A_t = d f_t / d h_{t-1}
    h'_t = A_t h'_{t-1} + f_t - A_t h_{t-1}

h are the states of one iteration, and h' of the next. With the diagonal in place of A_t, the solution is the
same. After i iterations the first i states are exact, so t iterations are always enough, unless they are
damped.

The gradient is a linear recurrence backwards in time, l_t = g_t + A_{t+1}^T l_{t+1}, with g_t the gradient of
the loss by h_t as an output. Whole Jacobians solve it at once. With diagonals, the same iterations solve it,
with products A^T l; a diagonal alone would give a wrong gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from linrec.ops.core.isolation import Isolation, documents, entering
from linrec.ops.core.kernel import differentiated
from linrec.ops.core.loop import Tensors
from linrec.ops.core.precision import wide
from linrec.ops.nonlinear_scan.convergence import Convergence, not_converged
from linrec.ops.nonlinear_scan.linear import diagonal, smoothed, whole
from linrec.ops.nonlinear_scan.torch import Cell, NonlinearScan, Values, looped
from linrec.rules import require

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-11}
# a compiled call runs all its iterations
MAX_ITERATIONS, MAX_COMPILED = 100, 12


def newton(kind: str) -> Callable[[NonlinearScan], Values]:
    """Return the backend of a mode: "newton", "quasi_newton" or "damped"."""

    def run(given: NonlinearScan) -> Values:
        x, state, reset = given.x, given.state, given.reset
        steps = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if reset is None else reset
        # the initial state is a step before the first
        isolation = Isolation(documents(steps, past=1))
        state = isolation.enter(entering(state, reset)[:, None], begin=0)[:, 0]
        x = isolation.enter(x, begin=1)
        limit = MAX_COMPILED if torch.compiler.is_compiling() else MAX_ITERATIONS
        solver = Solver(
            kind,
            given.diagonal,
            TOLERANCE[state.dtype] if given.tolerance is None else given.tolerance,
            limit if given.max_iterations is None else given.max_iterations,
            given.damping,
            given.otherwise,
            given.convergence,
        )
        if given.convergence is not None and not torch.compiler.is_compiling():
            given.convergence.check()
        guess = state.new_zeros(*x.shape[:2], *state.shape[1:])
        if given.guess is not None:
            guess = given.guess.detach().to(state.dtype).nan_to_num(0.0, 0.0, 0.0)
        parameters = tuple(map(wide, given.parameters))
        _check_closure(given.cell, x, parameters, state)
        h = solved(solver, given.cell, (x,), parameters, state, reset, guess)
        h = isolation.leave(h, begin=1)
        return h, h[:, -1]

    return run


@dataclass(frozen=True)
class Solver:
    """Newton's iterations and their options; see `NonlinearScan`."""

    kind: str
    diagonal: Cell | None
    tolerance: float
    max_iterations: int
    damping: float
    otherwise: str
    convergence: Convergence | None

    def solve(
        self, cell: Cell, x: Tensors, parameters: Tensors, state: Tensor, cut: Tensor | None, h: Tensor
    ) -> Tensor:
        """Return the states of all steps. `cell` takes h, the tensors of x, and the parameters."""
        compiling = torch.compiler.is_compiling()
        for count in range(self.max_iterations + 1):
            before = _before(h, state, cut)
            f = _everywhere(cell, before, x, parameters)
            residual = (f - h).abs() / (self.tolerance * (1 + f.abs()))
            # the look at the residual waits for the device
            if count == self.max_iterations or (not compiling and bool(residual.amax() <= 1)):
                break
            h = self._next(cell, before, f, h, x, parameters, state, cut)
            # steps that overflow start again
            h = torch.where(h.isfinite(), h, 0.0)
        if self.convergence is not None:
            self.convergence.write(count, residual.amax())
        if compiling:
            failed = ~(residual.flatten(1).amax(1) <= 1)
            return f.masked_fill(_beside(failed, f), torch.nan)
        if bool(residual.amax() <= 1):
            return f
        if self.otherwise == "error":
            raise not_converged(count, float(residual.amax()))
        return looped(cell, x, parameters, state, cut)[0]

    def _next(
        self,
        cell: Cell,
        before: Tensor,
        f: Tensor,
        h: Tensor,
        x: Tensors,
        parameters: Tensors,
        state: Tensor,
        cut: Tensor | None,
    ) -> Tensor:
        """Return the states of the next iteration."""
        if self.kind == "newton":
            A = _jacobian(cell, before, x, parameters, cut)
            return whole(A, f - (A @ before[..., None])[..., 0], state)
        d = self._diagonal(cell, before, x, parameters, cut)
        b = f - d * before
        return smoothed(d, b, state, h, self.damping) if self.kind == "damped" else diagonal(d, b, state)

    def adjoint(
        self, cell: Cell, x: Tensors, parameters: Tensors, before: Tensor, cut: Tensor | None, g: Tensor
    ) -> Tensor:
        """Return l_t = g_t + A_{t+1}^T l_{t+1}; A is zero at a cut, and after the last step."""
        start = torch.zeros_like(g[:, 0])
        if self.kind == "newton":
            A = _jacobian(cell, before, x, parameters, cut)
            return whole(_following(A).mT, g.flip(1), start).flip(1)
        d = self._diagonal(cell, before, x, parameters, cut)
        ends = None if cut is None else _following(cut)
        given = (g.flip(1), _following(d), _following(before), *map(_following, x))
        solver = replace(self, diagonal=_given_diagonal, convergence=None)
        return solved(solver, partial(_backwards, cell), given, parameters, start, ends, g.flip(1)).flip(1)

    def _diagonal(
        self, cell: Cell, before: Tensor, x: Tensors, parameters: Tensors, cut: Tensor | None
    ) -> Tensor:
        if self.diagonal is None:
            return _jacobian(cell, before, x, parameters, cut).diagonal(dim1=-2, dim2=-1)
        d = _everywhere(self.diagonal, before, x, parameters)
        return d if cut is None else d.masked_fill(_beside(cut, d), 0)


def solved(
    solver: Solver,
    cell: Cell,
    x: Tensors,
    parameters: Tensors,
    state: Tensor,
    cut: Tensor | None,
    guess: Tensor,
) -> Tensor:
    """Return the states of all steps, with gradients of any order."""
    if not differentiated(*x, *parameters, state):
        return solver.solve(cell, x, parameters, state, cut, guess)
    return _Solved.apply(solver, cell, len(x), cut, guess.detach(), state, *x, *parameters)


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(
        solver: Solver, cell: Cell, n: int, cut: Tensor | None, guess: Tensor, state: Tensor, *tensors: Tensor
    ) -> Tensor:
        return solver.solve(cell, tensors[:n], tensors[n:], state, cut, guess)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solver, ctx.cell, ctx.n, cut, _, *tensors = inputs
        ctx.save_for_backward(output, cut, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, cut, state, *tensors = ctx.saved_tensors
        x, parameters = tuple(tensors[: ctx.n]), tuple(tensors[ctx.n :])
        before = _before(h, state, cut)
        adjoint = ctx.solver.adjoint(ctx.cell, x, parameters, before, cut, g)

        def applied(before: Tensor, *tensors: Tensor) -> Tensor:
            return _everywhere(ctx.cell, before, tensors[: ctx.n], tensors[ctx.n :])

        pull = vjp(applied, before, *x, *parameters)[1]
        of_before, *of_tensors = pull(adjoint)
        of_state = of_before[:, 0]
        if cut is not None:
            of_state = of_state.masked_fill(_beside(cut[:, 0], of_state), 0)
        return None, None, None, None, None, of_state, *of_tensors


def _check_closure(cell: Cell, x: Tensor, parameters: Tensors, state: Tensor) -> None:
    """Raise if the cell has tensors that need a gradient beside its arguments: they would get none."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    h = cell(state.detach(), x[:, 0].detach(), *(parameter.detach() for parameter in parameters))
    require(
        not h.requires_grad,
        "`cell` must get all tensors that need a gradient as `parameters`; got a cell whose result needs a "
        "gradient without them. Pass the weights of a module as `parameters`, not in the cell.",
    )


def _backwards(cell: Cell, later: Tensor, g: Tensor, d: Tensor, before: Tensor, *rest: Tensor) -> Tensor:
    """Return l_t from l_{t+1}, with the cell's arguments at step t + 1."""
    pull = vjp(lambda h: cell(h, *rest), before)[1]
    return g + pull(later)[0]


def _given_diagonal(later: Tensor, g: Tensor, d: Tensor, *rest: Tensor) -> Tensor:
    return d


def _before(h: Tensor, state: Tensor, cut: Tensor | None) -> Tensor:
    """Return h_{t-1} of every step, zeros at a cut."""
    before = torch.cat([state[:, None], h[:, :-1]], 1)
    return before if cut is None else before.masked_fill(_beside(cut, before), 0)


def _following(x: Tensor) -> Tensor:
    """Return x_{t+1} in reversed time, zeros after the last step."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1).flip(1)


def _everywhere(cell: Cell, before: Tensor, x: Tensors, parameters: Tensors) -> Tensor:
    """Apply the cell to all steps at once."""
    flat = (part.flatten(0, 1) for part in x)
    return cell(before.flatten(0, 1), *flat, *parameters).unflatten(0, before.shape[:2])


def _jacobian(cell: Cell, before: Tensor, x: Tensors, parameters: Tensors, cut: Tensor | None) -> Tensor:
    """Return A (b, t, .., n, n), zero at a cut."""

    def column(direction: Tensor) -> Tensor:
        applied = partial(_everywhere, cell, x=x, parameters=parameters)
        return jvp(lambda h: applied(h), (before,), (direction.expand_as(before),))[1]

    n = before.shape[-1]
    A = vmap(column, out_dims=-1)(torch.eye(n, dtype=before.dtype, device=before.device))
    return A if cut is None else A.masked_fill(_beside(cut, A), 0)


def _beside(flags: Tensor, x: Tensor) -> Tensor:
    """Reshape flags to broadcast against the axes that follow theirs."""
    return flags.reshape(*flags.shape, *[1] * (x.dim() - flags.dim()))
