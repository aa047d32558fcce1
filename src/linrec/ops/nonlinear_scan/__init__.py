"""The nonlinear recurrence h_t = cell(h_{t-1}, x_t), step by step or in parallel by Newton's method."""

from jaxtyping import Bool, Float
from torch import Tensor
from torch.compiler import disable, is_compiling

from linrec.ops.core.ambient import exporting
from linrec.ops.core.backends import Backend, never
from linrec.ops.core.call import Operator, Space, documented
from linrec.ops.core.checks import check_dtype, check_supported, name_of
from linrec.ops.core.precision import REAL, accumulation
from linrec.ops.nonlinear_scan.adjoint import adjoint, pays, takes
from linrec.ops.nonlinear_scan.newton import DIRECTIONS, newton
from linrec.ops.nonlinear_scan.options import (
    AMBIENT_OPTIONS,
    Convergence,
    ConvergenceError,
    newton_options,
)
from linrec.ops.nonlinear_scan.reference import nonlinear_scan_reference
from linrec.ops.nonlinear_scan.torch import Cell, NonlinearScan, recurrent
from linrec.rules import choice, require

# steps of a loop that torch.compile unrolls
UNROLLED = 32

__all__ = ["OPERATOR", "Convergence", "ConvergenceError", "newton_options", "nonlinear_scan"]


def _canonical(given: NonlinearScan) -> NonlinearScan:
    """Check the arguments."""
    x = given.x
    require(x.ndim >= 3, f"`x` must have shape (b, t, ..), at least 3 axes; got {tuple(x.shape)}.")
    wide = accumulation(check_supported("x", x))
    # the cell gets them in the accumulation dtype
    allowed = [dtype for dtype in REAL if not dtype.is_complex and accumulation(dtype) == wide]
    for parameter in given.parameters:
        if parameter.is_floating_point():
            check_dtype("parameters", parameter, allowed, f" beside `x` in {name_of(x.dtype)}")
    if given.state is not None:
        require(
            given.state.ndim >= 2 and given.state.shape[0] == x.shape[0],
            f"`state` must have shape (b, .., n) with b = {x.shape[0]}; got {tuple(given.state.shape)}.",
        )
    shape = _steps(given)
    require(
        given.guess is None or given.guess.shape == shape,
        f"`guess` must have the shape of y, {shape}; got "
        f"{None if given.guess is None else tuple(given.guess.shape)}. Pass the y of an earlier call.",
    )
    choice(("auto", "adjoint", "autograd"), gradient=given.gradient)
    return given


def _steps(given: NonlinearScan) -> tuple[int, ...]:
    of_step = given.x if given.state is None else given.state[:, None]
    return *given.x.shape[:2], *of_step.shape[2:]


def _state(given: NonlinearScan) -> Space:
    shape = _steps(given)
    return (shape[0], *shape[2:]), accumulation(given.x.dtype)


def _newton(mode: str, about: str) -> Backend:
    def takes_state(given: NonlinearScan) -> bool:
        return mode == "newton" or given.newton.diagonal is not None or _steps(given)[-1] <= DIRECTIONS

    few = "" if mode == "newton" else f", and `diagonal` for states of over {DIRECTIONS} entries"
    # whether the iterations converge depends on values, so "auto" is the loop
    return Backend(
        mode,
        "torch",
        newton(mode),
        about,
        accepts=lambda given: given.gradient == "auto" and takes_state(given),
        requires=f"`gradient` 'auto'{few}",
        auto=never,
    )


OPERATOR = Operator(
    "nonlinear_scan",
    NonlinearScan,
    "x",
    _canonical,
    lambda given: (_steps(given), given.x.dtype),
    "(b, .., n)",
    _state,
    (
        Backend(
            "recurrent",
            "torch",
            adjoint,
            "a loop over time, whose gradient is a loop backwards in time; captured on CUDA",
            kernel="adjoint",
            accepts=takes,
            requires="`gradient` 'auto' or 'adjoint', and cells that can be repeated",
            auto=pays,
        ),
        Backend(
            "recurrent",
            "torch",
            recurrent,
            "a loop over time, with gradients by autograd",
            kernel="autograd",
            accepts=lambda given: given.gradient != "adjoint",
            requires="`gradient` 'auto' or 'autograd'",
        ),
        _newton("newton", "Newton's method with whole Jacobians over the last axis of the state (DEER)"),
        _newton("quasi_newton", "Newton's method with diagonals (quasi-DEER)"),
        _newton("damped", "quasi-Newton, near the last iteration: a Kalman smoother (quasi-ELK)"),
        Backend(
            "recurrent", "reference", nonlinear_scan_reference, "a loop over time: the oracle", auto=never
        ),
    ),
)
PAIRS = OPERATOR.pairs


def leaves_graph(x: Tensor, mode: str, otherwise: str = "error") -> bool:
    """Return whether a compiled call is a graph break: to unroll a long loop, or to choose one by values."""
    if not is_compiling() or exporting():
        return False
    if mode in ("auto", "recurrent"):
        return x.ndim > 1 and x.shape[1] > UNROLLED
    return otherwise == "recurrent"


@documented(OPERATOR)
def nonlinear_scan(
    cell: Cell,
    x: Float[Tensor, "b t *d"],
    parameters: Tensor | tuple[Tensor, ...] | list[Tensor] = (),
    *,
    state: Float[Tensor, "b *n"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    guess: Float[Tensor, "b t *n"] | None = None,
    diagonal: Cell | None = None,
    tolerance: float | None = None,
    max_iterations: int | None = None,
    damping: float | None = None,
    otherwise: str | None = None,
    convergence: Convergence | None = None,
    gradient: str = "auto",
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t *n"], Float[Tensor, "b *n"]]:
    """Run a nonlinear recurrence over time.

        h_t = cell(h_{t-1}, x_t, *parameters)    h_0 = state    y_t = h_t

    {backends}

    The mode "auto" is the loop. The modes of Newton's method evaluate the cell at all steps at once, and each
    iteration is a scan. They pay for long sequences if they need few iterations, as they do if the cell
    contracts. All modes have the same result and the same gradients, of any order, to the tolerance.

    The cell treats the entries of all axes but the last as independent, the batch included: entry i of
    h_t[:, j] depends on h_{t-1}[:, j] alone. A state (b, n) has Jacobians (n, n), a state (b, m, 2) has m
    Jacobians (2, 2). A Jacobian costs n evaluations of the cell in memory and time, so keep n small in
    "newton".

    The loop has two kernels. With "autograd", autograd records every step. With "adjoint", the states alone
    are saved, the backward pass is a loop too, which repeats the cell, and the gradients of the parameters
    are one product. On CUDA, eager calls of many steps with "adjoint" capture a few steps as a CUDA graph and
    replay them, so a step costs its kernels and not Python. On the CPU, gradients take longer with
    "adjoint".

    `torch.compile` unrolls loops of up to 32 steps. A longer loop is a graph break: it runs as in eager mode,
    with a compiled step in "adjoint", and `fullgraph=True` refuses it. So is a call of Newton's method with
    `otherwise="recurrent"`, which chooses by values.

    The modes of Newton's method and the gradient "adjoint" have no forward-mode derivatives and no
    `torch.export`, and `vmap` runs row by row. `newton_options` sets the options of Newton's method that a
    call leaves out, such as the call of a mixer. A call of Newton's method under `torch.compile` runs
    `max_iterations` iterations. Rows that do not converge are NaN, and `convergence` has the residual.

    Args:
        cell: function of h (b, .., n), x_t (b, ..) and the parameters, which returns the next h. It must be
            differentiable. For Newton's method and the gradient "adjoint", it must have no other tensors that
            need a gradient and draw no random numbers, because it is repeated and called with b times t rows.
        x: inputs (b, t, ..) in float32, float64, bfloat16 or float16; the cell gets the accumulation dtype.
        parameters: tensors that all steps share, or one tensor.
        state: h_0 (b, .., n); None means zeros in the shape of x_t.
        reset: (b, t) bool; true at t starts step t from h = 0.
        guess: where the iterations start, such as the y of the last training step; None means zeros.
        diagonal: function of the cell's arguments that returns the diagonal of the Jacobian, in the shape of
            h. It saves the n evaluations in "quasi_newton" and "damped", which refuse states of over 64
            entries without it. An approximation needs more iterations, for the same result.
        tolerance: largest |cell(h_{t-1}, x_t) - h_t| of the result, and largest last step of the iterations,
            relative to 1 + |h_t|, with |h_t| the norm over the last axis. None means 2e-6 in float32 and
            1e-11 in float64. After convergence, "damped" goes on without damping until it holds for these
            steps too.
        max_iterations: None means 100. Under `torch.compile`, it means 12 with "newton" and 30 otherwise.
        damping: weight of the distance to the last iteration in "damped". None means 0.001.
        otherwise: if the iterations do not converge, "error", or "recurrent" for the loop. None means
            "error".
        convergence: takes the number of iterations and the residual of the call.
        gradient: of the loop: "adjoint", "autograd", or "auto", which is "adjoint" for long sequences on CUDA
            if a trial on two steps accepts the cell, and "autograd" otherwise.
        mode: "auto", "recurrent", "newton", "quasi_newton" or "damped".
        backend: "auto", "torch" or "reference".

    Returns:
        y (b, t, .., n) in the dtype of x, and h after the last step, in the accumulation dtype.

    Raises:
        TypeError: a dtype is not supported, or a parameter is not a tensor.
        ValueError: shapes or devices do not match, a number is out of range, or (mode, backend) is unknown.
        ConvergenceError: the iterations did not converge.

    Source:
        Lim and others, Parallelizing non-linear sequential models over the sequence length (DEER, 2023);
        Gonzalez and others, Towards scalable and stable parallelization of nonlinear RNNs (ELK, 2024).

    Example:
        >>> import torch
        >>> def elman(h, x, W):
        ...     return torch.tanh(x + h @ W.T)
        >>> x, W = torch.randn(2, 100, 8), 0.1 * torch.randn(8, 8)
        >>> y, state = nonlinear_scan(elman, x, W)
        >>> parallel, _ = nonlinear_scan(elman, x, W, mode="newton")
        >>> bool((y - parallel).abs().max() < 1e-5)
        True
    """
    options = AMBIENT_OPTIONS.get().but(
        tolerance=tolerance,
        max_iterations=max_iterations,
        damping=damping,
        otherwise=otherwise,
        diagonal=diagonal,
        convergence=convergence,
    )
    apart = leaves_graph(x, mode, options.otherwise)
    shared = tuple(parameters) if isinstance(parameters, (tuple, list)) else (parameters,)
    given = NonlinearScan(cell, x, shared, state, reset, guess, options, gradient, apart)
    # the decorator imports the compiler, which takes seconds
    call = disable(OPERATOR.__call__) if apart else OPERATOR
    return call(given, mode, backend)
