"""HiPPO's matrices as products and inverses of diagonal and tridiagonal ones, which LSSL learns."""

import torch
from torch import Tensor

from linrec.hippo import Measure, StateSpace, matrices
from linrec.nn.parameters import Float32Module
from linrec.nn.state_space import add_transition
from linrec.rules import choice

__all__ = ["QuasiSeparable"]

MEASURES = ("legs", "legt", "lagt")


class QuasiSeparable(Float32Module):
    """A = -diag(p) (T^-1 + diag(c)) diag(q) and B = p * b, with T tridiagonal: 7 N - 2 numbers.

    It starts as HiPPO's A and B. Nothing keeps a learned A stable.

    Args:
        measure: "legs", "legt" or "lagt", where A and B start.
        d_state: N.
        learn: whether all of the numbers are learned, in group "transition" without weight decay.

    Raises:
        ValueError: an unknown measure, or one whose matrix is not of this form.

    Source:
        LSSL (Gu, Johnson, Goel, Saab, Dao, Rudra and Ré, 2021), its quasiseparable matrices; they start as in
        the released code.

    Example:
        >>> A, B = QuasiSeparable("lagt", 3)()
        >>> A[:, 0].tolist(), B.tolist()
        ([-0.5, -1.0, -1.0], [1.0, 1.0, 1.0])
    """

    lower: Tensor
    diagonal: Tensor
    upper: Tensor
    c: Tensor
    p: Tensor
    q: Tensor
    b: Tensor

    def __init__(self, measure: Measure, d_state: int, *, learn: bool = True) -> None:
        super().__init__()
        choice(MEASURES, measure=measure)
        A, p = matrices(measure, d_state)
        one = torch.ones_like(p)
        if measure == "legt":
            # the inverse has ones below the diagonal, and signs in turn above it
            diagonal, lower, upper = torch.zeros_like(p), -one[1:] / 2, one[1:] / 2
            diagonal[0] += 0.5
            diagonal[-1] += 0.5
        else:
            # the inverse has ones below the diagonal
            diagonal, lower, upper = one, -one[1:], torch.zeros_like(p[1:])
        start = {"lower": lower, "diagonal": diagonal, "upper": upper, "p": p, "q": p, "b": one}
        start["c"] = -A.diagonal() / p**2 - 1
        dtype = torch.get_default_dtype()
        add_transition(self, learn=learn, **{name: part.to(dtype, copy=True) for name, part in start.items()})

    def forward(self) -> StateSpace:
        """Return A (N, N) and B (N,), in float32 or better."""
        T = self.diagonal.diag() + self.lower.diag(-1) + self.upper.diag(1)
        # without the check that waits for a GPU
        inverse, _ = torch.linalg.inv_ex(T)
        return StateSpace(-self.p[:, None] * (inverse + self.c.diag()) * self.q, self.p * self.b)
