"""Matrices between antisymmetric and symmetric ones."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["skewed"]


def skewed(M: Float[Tensor, "n n"], beta: float = 1.0, gamma: float = 0.0) -> Float[Tensor, "n n"]:
    """Return (1 - beta) (M + M^T) + beta (M - M^T) - gamma I.

    Args:
        M: any square matrix.
        beta: 1 for an antisymmetric matrix, whose eigenvalues are imaginary, and 0 for a symmetric one.
        gamma: by which the real parts of all eigenvalues are moved left.

    Example:
        >>> skewed(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), gamma=0.5)
        tensor([[-0.5000,  1.0000],
                [-1.0000, -0.5000]])
    """
    eye = torch.eye(len(M), dtype=M.dtype, device=M.device)
    return M + (1 - 2 * beta) * M.mT - gamma * eye
