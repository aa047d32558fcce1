"""Newton's method for a nonlinear recurrence: each iteration is a linear recurrence over all steps.

    f_t = cell(h_{t-1}, x_t)    A_t = d f_t / d h_{t-1}
    h'_t = A_t h'_{t-1} + f_t - A_t h_{t-1}

h are the states of one iteration, and h' of the next. With the diagonal in place of A_t, the solution is the
same. But for rounding, the first i states are exact after i iterations that are not damped.

The gradient is a linear recurrence backwards in time, l_t = g_t + A_{t+1}^T l_{t+1}, with g_t the gradient of
the loss by h_t as an output. Whole Jacobians solve it at once. With diagonals, the same iterations solve it,
with products A^T l; a diagonal alone would give a wrong gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from linrec.ops.core.isolation import Isolation, beside, documents, entering
from linrec.ops.core.kernel import differentiated
from linrec.ops.core.loop import Tensors
from linrec.ops.core.precision import wide
from linrec.ops.nonlinear_scan.convergence import Convergence, not_converged
from linrec.ops.nonlinear_scan.linear import diagonal, smoothed, whole
from linrec.ops.nonlinear_scan.torch import Cell, NonlinearScan, Values, check_result, looped
from linrec.rules import require

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-11}
MAX_ITERATIONS = 100
# a compiled call runs all its iterations
MAX_COMPILED = {"newton": 12, "quasi_newton": 30, "damped": 30}
# directions of a Jacobian at a time, where the diagonal alone is kept
CHUNK = 8


def newton(kind: str) -> Callable[[NonlinearScan], Values]:
    """Return the backend of a mode: "newton", "quasi_newton" or "damped"."""

    def run(given: NonlinearScan) -> Values:
        x, state, reset = given.x, given.state, given.reset
        steps = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if reset is None else reset
        # the initial state is a step before the first
        isolation = Isolation(documents(steps, past=1))
        state = isolation.enter(entering(state, reset)[:, None], begin=0)[:, 0]
        x = isolation.enter(x, begin=1)
        blind = torch.compiler.is_compiling() or x.is_meta
        limit = MAX_COMPILED[kind] if blind else MAX_ITERATIONS
        solver = Solver(
            # a Jacobian of one entry is its diagonal
            "quasi_newton" if kind == "newton" and state.shape[-1] == 1 else kind,
            given.diagonal,
            TOLERANCE[state.dtype] if given.tolerance is None else given.tolerance,
            limit if given.max_iterations is None else given.max_iterations,
            given.damping,
            given.otherwise,
            given.convergence,
        )
        if given.convergence is not None and not blind:
            given.convergence.check()
        guess = state.new_zeros(*x.shape[:2], *state.shape[1:])
        if given.guess is not None:
            guess = given.guess.detach().to(state.dtype).nan_to_num(0.0, 0.0, 0.0)
        parameters = tuple(map(wide, given.parameters))
        _check_cell(given.cell, x, parameters, state)
        h = solved(solver, given.cell, (x,), parameters, state, reset, guess)
        h = isolation.leave(h, begin=1)
        # a view would keep all states
        return h, h[:, -1].clone()

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
        # no values can be read in a graph or without data
        blind = torch.compiler.is_compiling() or h.is_meta
        step = torch.full((), torch.inf, dtype=h.dtype, device=h.device)
        for count in range(self.max_iterations + 1):
            before = _before(h, state, cut)
            f, A = self._linearised(cell, before, x, parameters, cut)
            # the rounding error of an entry is that of the largest entry of its step
            scale = self.tolerance * (1 + f.abs().amax(-1, keepdim=True))
            # a slow cell has small residuals far from the solution, but large steps
            wrong = torch.maximum((f - h).abs(), step) / scale
            # the look at the values waits for the device
            if count == self.max_iterations or (not blind and bool(wrong.amax() <= 1)):
                break
            following = self._next(A, f, before, h, state)
            # steps that overflow start again
            following = torch.where(following.isfinite(), following, 0.0)
            h, step = following, (following - h).abs()
        if self.convergence is not None:
            self.convergence.write(count, wrong.amax(), pending=blind)
        if blind:
            failed = ~(wrong.flatten(1).amax(1) <= 1)
            return f.masked_fill(beside(failed, f), torch.nan)
        if bool(wrong.amax() <= 1):
            return f
        if self.otherwise == "error":
            raise not_converged(count, float(wrong.amax()))
        return looped(cell, x, parameters, state, cut)[0]

    def _linearised(
        self, cell: Cell, before: Tensor, x: Tensors, parameters: Tensors, cut: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return f, and A (b, t, .., n, n) or its diagonal (b, t, .., n), zero at a cut."""
        if self.kind != "newton" and self.diagonal is not None:
            f = _everywhere(cell, before, x, parameters)
            A = _everywhere(self.diagonal, before, x, parameters)
        else:
            f, pull = vjp(lambda h: _everywhere(cell, h, x, parameters), before)[:2]
            n = before.shape[-1]
            eye = torch.eye(n, dtype=before.dtype, device=before.device)
            if self.kind == "newton":
                A = vmap(lambda e: pull(e.expand_as(before))[0])(eye).movedim(0, -2)
            else:
                entry = vmap(
                    lambda e: (pull(e.expand_as(before))[0] * e).sum(-1),
                    chunk_size=None if torch.compiler.is_compiling() else CHUNK,
                )
                A = entry(eye).movedim(0, -1)
        return f, A if cut is None else A.masked_fill(beside(cut, A), 0)

    def _next(self, A: Tensor, f: Tensor, before: Tensor, h: Tensor, state: Tensor) -> Tensor:
        """Return the states of the next iteration."""
        if self.kind == "newton":
            return whole(A, f - (A @ before[..., None])[..., 0], state)
        b = f - A * before
        return smoothed(A, b, state, h, self.damping) if self.kind == "damped" else diagonal(A, b, state)

    def adjoint(
        self, cell: Cell, x: Tensors, parameters: Tensors, before: Tensor, cut: Tensor | None, g: Tensor
    ) -> Tensor:
        """Return l_t = g_t + A_{t+1}^T l_{t+1}; A is zero at a cut, and after the last step."""
        start = torch.zeros_like(g[:, 0])
        _, A = self._linearised(cell, before, x, parameters, cut)
        if self.kind == "newton":
            return whole(_following(A).mT, g.flip(1), start).flip(1)
        # the recurrence is linear: the largest entry of a row is 1, so that the tolerance is relative
        size = g.detach().flatten(1).abs().amax(1).clamp(min=torch.finfo(g.dtype).tiny)
        g = g / beside(size, g)
        ends = None if cut is None else _following(cut)
        # after the last step A is zero, and the cell gets arguments of the last step
        cells = (part[:, [*range(1, part.shape[1]), -1]].flip(1) for part in (before, *x))
        given = (g.flip(1), _following(A), *cells)
        solver = replace(self, kind="quasi_newton", diagonal=_given_diagonal, convergence=None)
        backwards = partial(_backwards, cell)
        found = solved(solver, backwards, given, parameters, start, ends, g.flip(1)).flip(1)
        return found * beside(size, found)


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
        return solver.solve(cell, *_split(tensors, n), state, cut, guess)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solver, ctx.cell, ctx.n, cut, _, *tensors = inputs
        ctx.save_for_backward(output, cut, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, cut, state, *tensors = ctx.saved_tensors
        x, parameters = _split(tensors, ctx.n)
        before = _before(h, state, cut)
        adjoint = ctx.solver.adjoint(ctx.cell, x, parameters, before, cut, g)

        given = [before, *tensors]
        # the state's gradient is that of `before` at the first step
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[5:]) if needed]

        def applied(*some: Tensor) -> Tensor:
            parts = dict(enumerate(given)) | dict(zip(wanted, some, strict=True))
            return _everywhere(ctx.cell, parts[0], *_split([*parts.values()][1:], ctx.n))

        pull = vjp(applied, *(given[place] for place in wanted))[1]
        gradients: list[Tensor | None] = [None] * len(given)
        for place, gradient in zip(wanted, pull(adjoint), strict=True):
            gradients[place] = gradient
        if gradients[0] is not None:
            of_state = gradients[0][:, 0]
            gradients[0] = of_state if cut is None else of_state.masked_fill(beside(cut[:, 0], of_state), 0)
        return None, None, None, None, None, *gradients


def _split(tensors: Sequence[Tensor], n: int) -> tuple[Tensors, Tensors]:
    """Return the tensors of x, which are the first n, and the parameters."""
    return tuple(tensors[:n]), tuple(tensors[n:])


def _check_cell(cell: Cell, x: Tensor, parameters: Tensors, state: Tensor) -> None:
    """Raise if a result of the cell is no state, or needs a gradient of tensors that are no arguments."""
    h = cell(state.detach(), x[:, 0].detach(), *(parameter.detach() for parameter in parameters))
    check_result(h, state)
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
    return before if cut is None else before.masked_fill(beside(cut, before), 0)


def _following(x: Tensor) -> Tensor:
    """Return x_{t+1} in reversed time, zeros after the last step."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1).flip(1)


def _everywhere(cell: Cell, before: Tensor, x: Tensors, parameters: Tensors) -> Tensor:
    """Apply the cell to all steps at once."""
    flat = (part.flatten(0, 1) for part in x)
    return cell(before.flatten(0, 1), *flat, *parameters).unflatten(0, before.shape[:2])
