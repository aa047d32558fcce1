"""Orthogonal matrices as functions of skew-symmetric ones, and differential equations of nearly skew ones."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.cells import NonlinearMixer
from linrec.nn.parameters import Float32Module, mark
from linrec.ops.core.precision import in_double, without_autocast
from linrec.rules import at_least, choice, require

__all__ = [
    "Base",
    "MatrixMap",
    "Orthogonal",
    "SkewFieldMixer",
    "SkewInit",
    "cayley",
    "exponential",
    "field",
    "skewed",
]

MatrixMap = Literal["exp", "cayley"]
SkewInit = Literal["henaff", "cayley"]
Base = Literal["identity", "start"]

SQUARINGS = 16
TERMS = 18
"""Terms of exp(X) with row sums of |X| up to 1; the next is at most 1 / 19!, 8e-18."""


def cayley(A: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return (I + A)^-1 (I - A), orthogonal for a skew-symmetric A, without the eigenvalue -1."""
    one = torch.eye(len(A), dtype=A.dtype, device=A.device)
    # I + A is never singular, and the check for that waits for a GPU
    solution: Tensor = torch.linalg.solve_ex(one + A, one - A)[0]
    return solution


def exponential(A: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return exp(A) by a fixed number of products, for row sums of |A| up to 2^16.

        exp(A) = exp(A / 2^s)^(2^s)    with row sums of |A| / 2^s at most 1

    `torch.matrix_exp` needs fewer products, but chooses their number by values. So it waits for a GPU, and
    CUDA graphs cannot capture it.

    Source:
        Higham, The Scaling and Squaring Method for the Matrix Exponential Revisited (2005), with Taylor
        polynomials.
    """
    s = A.detach().abs().sum(-1).amax().log2().ceil().clamp(0, SQUARINGS)
    X, one = A * torch.exp2(-s), torch.eye(len(A), dtype=A.dtype, device=A.device)
    power = one
    for k in range(TERMS, 0, -1):
        power = one + X @ power / k
    for squaring in range(SQUARINGS):
        power = torch.where(s > squaring, power @ power, power)
    return power


def _exp(A: Tensor) -> Tensor:
    return torch.matrix_exp(A) if A.is_cpu else exponential(A)


MAPS: Mapping[str, Callable[[Tensor], Tensor]] = {"exp": _exp, "cayley": cayley}


class Orthogonal(Float32Module):
    """An orthogonal matrix map(A - A^T), or B_0 map(A - A^T), of a learned A above the diagonal.

    The matrix stays orthogonal under every update of A. The n (n - 1) / 2 numbers of A stay in float32, in
    the group "transition" without weight decay.

    A starts in blocks [[0, s], [-s, 0]] along the diagonal, which give rotations of pairs of channels. The
    last channel of an odd n starts alone, with eigenvalue 1.

    Args:
        n: size of the matrix.
        matrix_map: "exp", the matrix exponential, which reaches all matrices of determinant 1, or "cayley".
        init: "henaff", s uniform in [-pi, pi], or "cayley", s = -tan(u / 2) with u uniform in [0, pi / 2]:
            Cayley's map gives rotations by u.
        base: "identity", B_0 = I; or "start", B_0 is the initial matrix, and A starts at zero.
        rebase_every: number of updates K after which `linrec train` moves B_0 to the matrix, and A to zero;
            None keeps B_0.

    Source:
        Lezcano-Casado and Martinez-Rubio (2019), and Lezcano-Casado (2019) for B_0; the initial A of Henaff,
        Szlam and LeCun (2016), and of Helfrich, Willmott and Ye (2018).
    """

    base: Tensor | None

    def __init__(
        self,
        n: int,
        *,
        matrix_map: MatrixMap = "exp",
        init: SkewInit = "cayley",
        base: Base = "identity",
        rebase_every: int | None = None,
    ) -> None:
        super().__init__()
        at_least(1, rebase_every=rebase_every, or_none=True)
        require(
            rebase_every is None or base == "start",
            f"`rebase_every` = {rebase_every} needs `base` = 'start'; got {base!r}.",
        )
        choice(MatrixMap, matrix_map=matrix_map)
        choice(SkewInit, init=init)
        choice(Base, base=base)
        self.n, self.matrix_map, self.rebase_every = n, matrix_map, rebase_every
        if init == "henaff":
            s = torch.empty(n // 2).uniform_(-math.pi, math.pi)
        else:
            s = -torch.tan(torch.empty(n // 2).uniform_(0, math.pi / 2) / 2)
        A = torch.zeros(n, n)
        A.diagonal(1)[::2] = s
        rows, columns = torch.triu_indices(n, n, 1)
        self.A = nn.Parameter(A[rows, columns])
        self.register_buffer("base", None)
        mark(self, "A", float32=True)
        if base == "start":
            self.base = self().detach()
            self.keep_float32("base")
            nn.init.zeros_(self.A)

    def forward(self) -> Float[Tensor, "n n"]:
        """Return the matrix, in float32 or better."""
        with without_autocast(self.A.device.type):
            rows, columns = torch.triu_indices(self.n, self.n, 1, device=self.A.device)
            # errors of float32 in the exponential would add up over long sequences
            upper = in_double(self.A.new_zeros(self.n, self.n).index_put((rows, columns), self.A))
            B = MAPS[self.matrix_map](upper - upper.mT)
            B = B if self.base is None else in_double(self.base) @ B
            return B.to(self.A.dtype)

    def after_update(self, updates: int) -> None:
        """Move B_0 to the matrix and A to zero after every K updates; the matrix stays as it is."""
        if self.rebase_every is None:
            return
        require(
            # of a DTensor, whose import takes seconds
            not hasattr(self.A, "full_tensor"),
            "`rebase_every` must be None where A is split over processes; choose --loop.strategy ddp.",
        )
        if updates % self.rebase_every == 0:
            with torch.no_grad():
                assert self.base is not None
                self.base.copy_(self())
                self.A.zero_()


def skewed(M: Float[Tensor, "n n"], beta: float = 1.0, gamma: float = 0.0) -> Float[Tensor, "n n"]:
    """Return (1 - beta) (M + M^T) + beta (M - M^T) - gamma I.

    Args:
        M: any square matrix.
        beta: 1 for an antisymmetric matrix, whose eigenvalues are imaginary, and 0 for a symmetric one.
        gamma: by which the real parts of all eigenvalues are moved left.
    """
    eye = torch.eye(len(M), dtype=M.dtype, device=M.device)
    return M + (1 - 2 * beta) * M.mT - gamma * eye


def field(
    h: Float[Tensor, "*b n"], Ux: Float[Tensor, "*b n"], A: Float[Tensor, "n n"], W: Float[Tensor, "n n"]
) -> Float[Tensor, "*b n"]:
    """Return A h + tanh(W h + U x + b).

    Args:
        h: the state.
        Ux: U x + b.
        A: matrix of the linear part, alpha included.
        W: matrix in the tanh.
    """
    return h @ A.mT + torch.tanh(h @ W.mT + Ux)


class SkewFieldMixer(NonlinearMixer):
    """A mixer of h' = alpha A h + tanh(W h + U x + b), with A and W between symmetric and antisymmetric.

    A subclass defines `mix` with `field` and `matrices`.

    Args:
        d_model: width of the sequence and of the state.
        beta: from 0 for symmetric to 1 for antisymmetric matrices.
        gamma: damping of A.
        gamma_w: damping of W.
        alpha: factor of A h.
        init_std: scale of the initial M_A and M_W, normal with standard deviation `init_std` / d_model.
        mode: mode of `linrec.ops.nonlinear_scan`.
    """

    def __init__(
        self,
        d_model: int,
        *,
        beta: float,
        gamma: float,
        gamma_w: float,
        alpha: float,
        init_std: float,
        mode: str,
    ) -> None:
        super().__init__(d_model, mode)
        at_least(0, gamma=gamma, gamma_w=gamma_w, alpha=alpha, init_std=init_std)
        require(0 <= beta <= 1, f"`beta` must be in [0, 1]; got {beta}.")
        self.beta, self.gamma, self.gamma_w, self.alpha = beta, gamma, gamma_w, alpha

        self.U = nn.Linear(d_model, d_model)
        std = init_std / d_model
        self.M_A = nn.Parameter(std * torch.randn(d_model, d_model))
        self.M_W = nn.Parameter(std * torch.randn(d_model, d_model))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return alpha A and W, in the dtype of the state."""
        dtype = self.state_dtype
        A = self.alpha * skewed(self.M_A.to(dtype), self.beta, self.gamma)
        return A, skewed(self.M_W.to(dtype), self.beta, self.gamma_w)
