"""The report of Newton's iterations, and their errors."""

import torch
from torch import Tensor, nn

__all__ = ["Convergence", "ConvergenceError"]


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
        linrec.ops.nonlinear_scan.convergence.ConvergenceError: ...
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
