"""Options of Newton's iterations, and a context that sets them for calls of mixers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from linrec.ops.core.ambient import Ambient
from linrec.rules import at_least, choice, positive, typed

__all__ = ["OPTIONS", "NewtonOptions", "newton_options"]


@dataclass(frozen=True)
class NewtonOptions:
    """Options of `linrec.ops.nonlinear_scan` by the names of its arguments.

    Raises:
        ValueError: a number is out of range, or there is no such choice; the message names the nearest.
    """

    tolerance: float | None = None
    max_iterations: int | None = None
    damping: float = 0.001
    otherwise: str = "error"

    def __post_init__(self) -> None:
        typed(self.__annotations__, **vars(self))
        positive(tolerance=self.tolerance, or_none=True)
        at_least(1, max_iterations=self.max_iterations, or_none=True)
        positive(damping=self.damping)
        choice(("error", "recurrent"), otherwise=self.otherwise)

    def but(self, **given: Any) -> "NewtonOptions":
        """Return these options, replaced by the given ones that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


OPTIONS = Ambient("options of Newton's method", NewtonOptions())


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

    Raises:
        ValueError: a number is out of range, or there is no such choice.

    Example:
        >>> import torch
        >>> from linrec.mixers import build
        >>> mixer = build("elman", 8, mode="newton")
        >>> with newton_options(max_iterations=1, otherwise="recurrent"):
        ...     y, state = mixer(torch.randn(1, 50, 8))
    """
    given = {"tolerance": tolerance, "max_iterations": max_iterations, "damping": damping}
    with OPTIONS.set(OPTIONS.get().but(**given, otherwise=otherwise)):
        yield
