"""Options of Newton's iterations, a context that sets them for mixers, and the report of convergence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from linrec.ops.core.ambient import Ambient
from linrec.rules import at_least, choice, positive, typed

__all__ = ["Convergence", "ConvergenceError", "NewtonOptions", "newton_options"]


class ConvergenceError(RuntimeError):
    """Newton's iterations did not reach the tolerance."""


class Convergence(nn.Module):
    """The iterations of the last call of `linrec.ops.nonlinear_scan` in a Newton mode.

    A compiled call cannot raise an error, so it writes its residual here. The next call with this object that
    is not compiled raises the error, and so does `check`.

    Attributes:
        iterations: number of iterations, int64, shape ().
        residual: the largest residual or last step of an iteration, relative to the tolerance: at most 1 if
            the iterations converged. float64, shape ().
        pending: whether a compiled call wrote the residual, which nobody has checked. Bool, shape ().

    Example:
        >>> convergence = Convergence()
        >>> convergence.write(3, torch.tensor(2.5), pending=True)
        >>> convergence.check()
        Traceback (most recent call last):
        ...
        linrec.ops.nonlinear_scan.options.ConvergenceError: ...
    """

    iterations: Tensor
    residual: Tensor
    pending: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("iterations", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("residual", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("pending", torch.zeros((), dtype=torch.bool), persistent=False)

    def write(self, iterations: int, residual: Tensor, *, pending: bool) -> None:
        """Keep the report of a call; `pending` says whether the call could not raise an error itself."""
        self.iterations.fill_(iterations)
        self.residual.copy_(residual)
        self.pending.fill_(pending)

    def check(self) -> None:
        """Raise ConvergenceError if a compiled call did not converge; this waits for the device."""
        if bool(self.pending):
            self.pending.fill_(False)
            if not float(self.residual) <= 1:
                raise not_converged(int(self.iterations), float(self.residual))


def not_converged(iterations: int, residual: float) -> ConvergenceError:
    """Return the error of iterations that did not converge."""
    return ConvergenceError(
        f"Newton's iterations must reach the tolerance; after {iterations} iterations the residual is "
        f"{residual:.3g} times the tolerance. Pass a larger `max_iterations`, another mode, or "
        "`otherwise='recurrent'` for the exact loop in its place; to the calls of mixers, by "
        "`linrec.ops.nonlinear_scan.newton_options`."
    )


@dataclass(frozen=True)
class NewtonOptions:
    """Options of `linrec.ops.nonlinear_scan` by the names of its arguments."""

    tolerance: float | None = None
    max_iterations: int | None = None
    damping: float = 0.001
    otherwise: str = "error"
    diagonal: Callable[..., Tensor] | None = None
    convergence: Convergence | None = None

    def __post_init__(self) -> None:
        typed(self.__annotations__, **vars(self))
        positive(tolerance=self.tolerance, or_none=True)
        at_least(1, max_iterations=self.max_iterations, or_none=True)
        positive(damping=self.damping)
        choice(("error", "recurrent"), otherwise=self.otherwise)
        if not (self.diagonal is None or callable(self.diagonal)):
            raise TypeError(f"`diagonal` must be a function like `cell`, or None; got {self.diagonal!r:.40}.")
        if not isinstance(self.convergence, Convergence | None):
            raise TypeError(f"`convergence` must be a Convergence or None; got {self.convergence!r:.40}.")

    def but(self, **given: Any) -> "NewtonOptions":
        """Return these options, replaced by the given ones that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


AMBIENT_OPTIONS = Ambient("options of Newton's method", NewtonOptions())
"""The options of calls that leave them out; `newton_options` sets them."""


@contextmanager
def newton_options(
    *,
    tolerance: float | None = None,
    max_iterations: int | None = None,
    damping: float | None = None,
    otherwise: str | None = None,
) -> Iterator[None]:
    """Set options of Newton's method for calls within that leave them out, such as those of mixers.

    They hold for this thread, and for layers that run again in the backward pass of a model with `recompute`.
    In compiled models, the calls are graph breaks. Contexts nest: an option that the inner context leaves out
    is that of the outer context.

    Args:
        tolerance: see `linrec.ops.nonlinear_scan`, also for the other arguments.
        max_iterations: the largest number of iterations.
        damping: weight of the distance to the last iteration in the mode "damped".
        otherwise: "error", or "recurrent" for the loop where the iterations do not converge.
    """
    given = {"tolerance": tolerance, "max_iterations": max_iterations, "damping": damping}
    with AMBIENT_OPTIONS.set(AMBIENT_OPTIONS.get().but(**given, otherwise=otherwise)):
        yield
