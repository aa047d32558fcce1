"""Normalisation of a sequence's channels in groups."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GroupRMSNorm"]


class GroupRMSNorm(nn.Module):
    """y = x / sqrt(mean_g(x^2) + eps) * weight, the mean over the channels of x's group.

    Computed in the weight's dtype. Groups that lie on different devices need no sum between them.

    Args:
        d: width of the last axis.
        n_groups: groups of d / n_groups neighbouring channels; 1 is RMSNorm.
        eps: added to the mean square.

    Raises:
        ValueError: groups that do not divide the width.

    Source:
        Dao and Gu, Transformers are SSMs (2024), the norm for tensor parallelism.

    Example:
        >>> import torch
        >>> GroupRMSNorm(4, n_groups=2)(torch.tensor([3.0, 4.0, 30.0, 40.0])).square().sum().round().item()
        4.0
    """

    def __init__(self, d: int, *, n_groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        if n_groups < 1 or d % n_groups:
            raise ValueError(
                f"`n_groups` of a norm must be a positive divisor of its width {d}; got {n_groups}."
            )
        self.n_groups, self.eps = n_groups, eps
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise `x` (..., d)."""
        x = x.to(self.weight.dtype).unflatten(-1, (self.n_groups, -1))
        return functional.rms_norm(x, x.shape[-1:], eps=self.eps).flatten(-2) * self.weight

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"d={len(self.weight)}, n_groups={self.n_groups}, eps={self.eps}"
