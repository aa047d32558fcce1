"""Newton's method for a nonlinear recurrence: each iteration is a linear recurrence over all steps.

    f_t = cell(h_{t-1}, x_t)    A_t = d f_t / d h_{t-1}
    h'_t = A_t h'_{t-1} + f_t - A_t h_{t-1}

h are the states of one iteration, and h' of the next. With the diagonal in place of A_t, the solution is the
same. But for rounding, the first i states are exact after i iterations that are not damped.

The gradient is a linear recurrence backwards in time, l_t = g_t + A_{t+1}^T l_{t+1}, with g_t the gradient of
the loss by h_t as an output. Whole Jacobians solve it at once. With diagonals, the same iterations solve it,
with products A^T l; a diagonal alone would give a wrong gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from linrec.ops.core.isolation import Isolation, beside, documents, entering
from linrec.ops.core.loop import Tensors
from linrec.ops.core.precision import wide
from linrec.ops.nonlinear_scan.adjoint import check_repeated
from linrec.ops.nonlinear_scan.linear import diagonal, smoothed, whole
from linrec.ops.nonlinear_scan.options import NewtonOptions, not_converged
from linrec.ops.nonlinear_scan.solved import (
    System,
    check_cell,
    everywhere,
    of_next_step,
    solved,
    states_before,
)
from linrec.ops.nonlinear_scan.torch import Cell, NonlinearScan, Values, looped
from linrec.torch_private import transforms_active

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-11}
MAX_ITERATIONS = 100
# a compiled call runs all its iterations
MAX_COMPILED = {"newton": 12, "quasi_newton": 30, "damped": 30}
# residual at which "damped" goes on without damping
NEAR = 2e-6
# iterations without damping at the end of a compiled call
UNDAMPED = 3
# directions of a Jacobian at a time, where the diagonal alone is kept
CHUNK = 8
# entries of the diagonal up to which it comes from a direction for each
DIRECTIONS = 64


def newton(kind: str) -> Callable[[NonlinearScan], Values]:
    """Return the backend of a mode: "newton", "quasi_newton" or "damped"."""

    def run(given: NonlinearScan) -> Values:
        x, state, reset, options = given.x, given.state, given.reset, given.newton
        steps = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if reset is None else reset
        parameters = tuple(map(wide, given.parameters))
        blind = torch.compiler.is_compiling() or x.is_meta
        if not blind and not transforms_active():
            x = _saturating(given.cell, x, parameters, state)
        # the initial state is a step before the first
        isolation = Isolation(documents(steps, past=1))
        state = isolation.enter(entering(state, reset)[:, None], begin=0)[:, 0]
        x = isolation.enter(x, begin=1)
        limit = MAX_COMPILED[kind] if blind else MAX_ITERATIONS
        solver = Newton(
            # a Jacobian of one entry is its diagonal
            "quasi_newton" if kind == "newton" and state.shape[-1] == 1 else kind,
            TOLERANCE[state.dtype] if options.tolerance is None else options.tolerance,
            limit if options.max_iterations is None else options.max_iterations,
            options,
        )
        if options.convergence is not None and not blind:
            options.convergence.check()
        guess = given.guess
        if guess is not None:
            guess = guess.detach().to(state.dtype).nan_to_num(0.0, 0.0, 0.0)
        check_cell(given.cell, x, parameters, state)
        check_repeated(given)
        h = solved(solver, System(given.cell, (x,), parameters, state, reset, guess))
        h = isolation.leave(h, begin=1)
        # a view would keep all states
        return h, h[:, -1].clone()

    return run


def _saturating(cell: Cell, x: Tensor, parameters: Tensors, state: Tensor) -> Tensor:
    """Return x with large numbers for infinities at which the cell is finite, as a gate is."""
    infinite = x.isinf()
    if not infinite.any():
        return x
    with torch.no_grad():
        start = state.new_zeros(*x.shape[:2], *state.shape[1:])
        h = everywhere(System(cell, (x,), parameters, state, None), start)
    finite = h.flatten(2).isfinite().all(-1)
    # its square is finite
    large = x.sign() * math.sqrt(torch.finfo(x.dtype).max) / 2
    return torch.where(infinite & beside(finite, x), large, x)


@dataclass(frozen=True)
class Newton:
    """Newton's iterations: with whole Jacobians, with diagonals, or damped; and their options."""

    kind: str
    tolerance: float
    max_iterations: int
    options: NewtonOptions

    def solve(self, system: System) -> Tensor:
        """Return the states of all steps."""
        state, h = system.state, system.guess
        if h is None:
            h = state.new_zeros(*system.x[0].shape[:2], *state.shape[1:])
        # no values can be read in a graph or without data
        blind = torch.compiler.is_compiling() or h.is_meta
        step = torch.full((), torch.inf, dtype=h.dtype, device=h.device)
        damped, near = self.kind == "damped", max(1.0, NEAR / self.tolerance)
        for count in range(self.max_iterations + 1):
            before = states_before(h, system)
            f, jacobian = self._linearised(system, before)
            # the rounding error of a product with a matrix is that of the norm of the state
            scale = self.tolerance * (1 + torch.linalg.vector_norm(f, dim=-1, keepdim=True))
            # a slow cell has small residuals far from the solution, but large steps
            residual = (f - h).abs() / scale
            wrong = torch.maximum(residual, step / scale)
            if count == self.max_iterations:
                break
            # a look at values waits for the device. Damping makes all steps small, so steps without it follow
            if damped and (
                count >= self.max_iterations - UNDAMPED if blind else bool(residual.amax() <= near)
            ):
                damped = False
            elif not damped and not blind and bool(wrong.amax() <= 1):
                break
            following = self._next(jacobian(), f, before, h, state, damped)
            # steps that overflow start again
            following = torch.where(following.isfinite(), following, 0.0)
            h, step = following, (following - h).abs()
        if self.options.convergence is not None:
            self.options.convergence.write(count, wrong.amax(), pending=blind)
        if blind:
            failed = ~(wrong.flatten(1).amax(1) <= 1)
            return f.masked_fill(beside(failed, f), torch.nan)
        if bool(wrong.amax() <= 1):
            return f
        if self.options.otherwise == "error":
            raise not_converged(count, float(wrong.amax()))
        return looped(*system[:5])[0]

    def _linearised(self, system: System, before: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return f, and a function that returns A (b, t, .., n, n) or its diagonal (b, t, .., n).

        A is zero at a cut.
        """
        if self.kind != "newton" and self.options.diagonal is not None:
            f = everywhere(system, before)
            of_entries = partial(everywhere, system._replace(cell=self.options.diagonal), before)
        else:
            f, pull = vjp(partial(everywhere, system), before)[:2]
            of_entries = partial(self._by_directions, pull, before)

        def jacobian() -> Tensor:
            A = of_entries()
            return A if system.cut is None else A.masked_fill(beside(system.cut, A), 0)

        return f, jacobian

    def _by_directions(self, pull: Callable[..., Any], before: Tensor) -> Tensor:
        eye = torch.eye(before.shape[-1], dtype=before.dtype, device=before.device)
        if self.kind == "newton":
            return vmap(lambda e: pull(e.expand_as(before))[0])(eye).movedim(0, -2)
        entry = vmap(
            lambda e: (pull(e.expand_as(before))[0] * e).sum(-1),
            chunk_size=None if torch.compiler.is_compiling() else CHUNK,
        )
        return entry(eye).movedim(0, -1)

    def _next(self, A: Tensor, f: Tensor, before: Tensor, h: Tensor, state: Tensor, damped: bool) -> Tensor:
        """Return the states of the next iteration."""
        if self.kind == "newton":
            return whole(A, f - (A @ before[..., None])[..., 0], state)
        b = f - A * before
        return smoothed(A, b, state, h, self.options.damping) if damped else diagonal(A, b, state)

    def adjoint(self, system: System, before: Tensor, g: Tensor) -> Tensor:
        """Return l_t = g_t + A_{t+1}^T l_{t+1}; A is zero at a cut, and after the last step."""
        start = torch.zeros_like(g[:, 0])
        A = self._linearised(system, before)[1]()
        if self.kind == "newton":
            return whole(_following(A).mT, g.flip(1), start).flip(1)
        # the recurrence is linear: the largest entry of a row is 1, so that the tolerance is relative
        size = g.detach().flatten(1).abs().amax(1).clamp(min=torch.finfo(g.dtype).tiny)
        g = g / beside(size, g)
        ends = None if system.cut is None else _following(system.cut)
        # after the last step A is zero
        given = (g.flip(1), _following(A), *map(of_next_step, (before, *system.x)))
        options = replace(self.options, diagonal=_given_diagonal, convergence=None)
        solver = replace(self, kind="quasi_newton", options=options)
        backwards = System(partial(_backwards, system.cell), given, system.parameters, start, ends, g.flip(1))
        found = solved(solver, backwards).flip(1)
        return found * beside(size, found)


def _backwards(cell: Cell, later: Tensor, g: Tensor, d: Tensor, before: Tensor, *rest: Tensor) -> Tensor:
    """Return l_t from l_{t+1}, with the cell's arguments at step t + 1."""
    pull = vjp(lambda h: cell(h, *rest), before)[1]
    return g + pull(later)[0]


def _given_diagonal(later: Tensor, g: Tensor, d: Tensor, *rest: Tensor) -> Tensor:
    return d


def _following(x: Tensor) -> Tensor:
    """Return x_{t+1} in reversed time, zeros after the last step."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1).flip(1)
