"""Solvers of an autonomous differential equation h' = f(h) over a time of each row."""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.extras import import_extra
from linrec.rules import COUNT, at_least, choice, positive

__all__ = ["ADAPTIVE", "SOLVERS", "Fixed", "Solver", "solve"]

Fixed: TypeAlias = Literal["euler", "midpoint", "rk4"]
Adaptive: TypeAlias = Literal["dopri5", "bosh3", "dopri8"]
Solver: TypeAlias = Fixed | Adaptive

ADAPTIVE: tuple[str, ...] = get_args(Adaptive)
"""Solvers of torchdiffeq, which choose their steps."""
SOLVERS = (*get_args(Fixed), *ADAPTIVE)
"""All solvers."""


def solve(
    f: Callable[[Tensor], Tensor],
    h: Float[Tensor, "*b n"],
    time: Float[Tensor, "*b 1"],
    solver: Solver,
    *,
    n_steps: int = 1,
    rtol: float = 1e-3,
    atol: float = 1e-4,
) -> Float[Tensor, "*b n"]:
    """Return h(time) of h' = f(h), h(0) = `h`.

    | solver | steps |
    |---|---|
    | "euler", "midpoint", "rk4" | `n_steps` of equal length, of order 1, 2 and 4 |
    | "bosh3", "dopri5", "dopri8" | as many as the tolerances need, of order 3, 5 and 8, by torchdiffeq |

    Time is rescaled to [0, 1] for each row, so rows may have different times. The adaptive solvers choose the
    same steps for all rows.

    Args:
        f: function of h, of the shape of h.
        h: initial values.
        time: time of each row; a negative time runs backwards.
        solver: one of the names above.
        n_steps: number of equal steps.
        rtol: relative tolerance of adaptive solvers.
        atol: absolute tolerance of adaptive solvers.

    Raises:
        ValueError: the solver is unknown, or a number is out of range.
        MissingExtraError: an adaptive solver without torchdiffeq.

    Example:
        >>> import torch
        >>> solve(torch.neg, torch.ones(1), torch.ones(1), "rk4", n_steps=10)
        tensor([0.3679])
    """
    choice(SOLVERS, solver=solver)
    at_least(1, most=COUNT, n_steps=n_steps)
    positive(rtol=rtol, atol=atol)
    if solver in ADAPTIVE:
        torchdiffeq = import_extra("torchdiffeq", f'solver="{solver}"')
        ends = torch.arange(2, dtype=time.dtype, device=time.device)
        # a step ends at 1, because interpolation within a longer step is less accurate
        exact = {"step_t": ends[1:]}
        path = torchdiffeq.odeint(
            lambda _, h: time * f(h), h, ends, rtol=rtol, atol=atol, method=solver, options=exact
        )
        return path[-1]
    step = time / n_steps
    for _ in range(n_steps):
        h = h + step * _slope(f, h, step, solver)
    return h


def _slope(f: Callable[[Tensor], Tensor], h: Tensor, step: Tensor, solver: str) -> Tensor:
    """Return the mean slope over a step."""
    first = f(h)
    if solver == "euler":
        return first
    second = f(h + step / 2 * first)
    if solver == "midpoint":
        return second
    third = f(h + step / 2 * second)
    return (first + 2 * second + 2 * third + f(h + step * third)) / 6
