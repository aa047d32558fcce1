"""A matrix, or a product of two matrices of low rank, as a layer without bias."""

import functools
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.projections import matrix
from linrec.rules import at_least

__all__ = ["LowRank"]


class LowRank(nn.Sequential):
    """y = W x, or y = W_2 W_1 x with `rank` rows of W_1.

    Args:
        d_in: width of x.
        d_out: width of y.
        rank: None means a full matrix.
        std: standard deviation of the initial weights of every matrix, which are Gaussian.

    Raises:
        ValueError: the rank is below 1.

    Example:
        >>> import torch
        >>> LowRank(8, 8, 2, std=0.1)(torch.zeros(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(self, d_in: int, d_out: int, rank: int | None, *, std: float) -> None:
        at_least(1, rank=rank, or_none=True, cure="None means a full matrix.")
        sizes = [d_in, d_out] if rank is None else [d_in, rank, d_out]
        super().__init__(*(nn.Linear(m, n, bias=False) for m, n in itertools.pairwise(sizes)))
        self.sizes = sizes
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def weights(self, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Return the matrices, W or (W_1, W_2), for x on a device."""
        layers = zip(self, self.sizes[:-1], strict=True)
        return tuple(matrix(layer, width, device) for layer, width in layers)

    @staticmethod
    def product(x: Tensor, *weights: Tensor) -> Tensor:
        """Return y with the given matrices in place of the layer's."""
        return functools.reduce(functional.linear, weights, x)
