"""The nonlinear recurrence as a loop over time in torch operations."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from linrec.ops.core.checks import State
from linrec.ops.core.isolation import beside
from linrec.ops.core.loop import Step, Tensors, loop
from linrec.ops.core.precision import wide
from linrec.ops.nonlinear_scan.options import NewtonOptions
from linrec.rules import require

Values = tuple[Tensor, Tensor]
Cell = Callable[..., Tensor]


class NonlinearScan(NamedTuple):
    """Canonical inputs of the backends.

    Attributes:
        cell: returns h_t from h_{t-1}, x_t and the parameters.
        x: (b, t, ..).
        parameters: tensors that the cell shares over time.
        state: h_0 (b, .., n).
        reset: (b, t); true at steps that start from h = 0.
        guess: (b, t, .., n), where Newton's iterations start; None for zeros.
        newton: the options of Newton's method.
        gradient: of the mode "recurrent": "adjoint", "autograd", or "auto".
        fused: whether the adjoint loop compiles its steps.
    """

    cell: Cell
    x: Tensor
    parameters: tuple[Tensor, ...]
    state: State
    reset: Tensor | None
    guess: Tensor | None
    newton: NewtonOptions
    gradient: str
    fused: bool


def recurrent(given: NonlinearScan) -> Values:
    """Compute h_t = cell(h_{t-1}, x_t) step by step, with gradients by autograd."""
    parameters = tuple(map(wide, given.parameters))
    return looped(given.cell, (given.x,), parameters, given.state, given.reset)


def looped(cell: Cell, x: Tensors, parameters: Tensors, state: Tensor, reset: Tensor | None) -> Values:
    """Return the states of all steps, and the last state; `cell` takes h, the tensors x_t and parameters."""

    def step(states: Tensors, cut: Tensor | None, *now: Any) -> Step:
        (before,) = states
        if cut is not None:
            before = before.masked_fill(beside(cut, before), 0)
        h = cell(before, *now, *parameters)
        check_result(h, before)
        return (h,), (h,)

    (last,), (h,) = loop(step, (state,), [reset, *x])
    return h, last


def check_result(h: Tensor, state: Tensor) -> None:
    """Raise unless a result of the cell is a tensor of the shape and the dtype of the state."""
    if not isinstance(h, Tensor):
        raise TypeError(f"`cell` must return h alone, a tensor; got {type(h).__name__}.")
    require(
        h.shape == state.shape and h.dtype == state.dtype,
        f"`cell` must return h of shape {tuple(state.shape)} in {state.dtype}, as its first argument; got "
        f"{tuple(h.shape)} in {h.dtype}.",
    )
