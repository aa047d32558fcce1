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
        residual: max |cell(h_{t-1}, x_t) - h_t| / (1 + |h_t|) relative to the tolerance: at most 1 if the
            iterations converged. float64, shape ().

    Example:
        >>> convergence = Convergence()
        >>> convergence.write(3, torch.tensor(2.5))
        >>> convergence.check()
        Traceback (most recent call last):
        ...
        linrec.ops.nonlinear_scan.convergence.ConvergenceError: ...
    """

    iterations: Tensor
    residual: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("iterations", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("residual", torch.zeros((), dtype=torch.float64), persistent=False)

    def write(self, iterations: int, residual: Tensor) -> None:
        """Keep the report of a call."""
        self.iterations.fill_(iterations)
        self.residual.copy_(residual)

    def check(self) -> None:
        """Raise ConvergenceError if the last call did not converge; this waits for the device."""
        residual = float(self.residual)
        if not residual <= 1:
            self.residual.zero_()
            raise not_converged(int(self.iterations), residual)


def not_converged(iterations: int, residual: float) -> ConvergenceError:
    """Return the error of iterations that did not converge."""
    return ConvergenceError(
        f"Newton's iterations must reach the tolerance; after {iterations} iterations the residual is "
        f"{residual:.3g} times the tolerance. Pass a larger `max_iterations`, `mode='damped'`, "
        "`otherwise='recurrent'` for the exact loop in its place, or `mode='recurrent'`."
    )
