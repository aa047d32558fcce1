"""Layer normalisation of each head."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["HeadNorm"]


class HeadNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the channels of each head.

    That is GroupNorm with a group per head, at each step alone: every channel of every head has a weight, and
    a bias where asked for. Computed in the weight's dtype.

    Args:
        n_heads: heads h.
        d_head: channels of a head.
        eps: added to the variance.
        bias: whether there is a bias.

    Source:
        xLSTM (Beck and others, 2024), the figures of its blocks; with a bias, Eagle and Finch (Peng and
        others, 2024).

    Example:
        >>> import torch
        >>> HeadNorm(2, 2)(torch.tensor([[1.0, 3.0], [50.0, 10.0]])).detach().round()
        tensor([[-1.,  1.],
                [ 1., -1.]])
    """

    def __init__(self, n_heads: int, d_head: int, *, eps: float = 1e-5, bias: bool = False) -> None:
        super().__init__()
        self.n_heads, self.eps = n_heads, eps
        # vectors, which weight decay leaves alone
        self.weight = nn.Parameter(torch.ones(n_heads * d_head))
        self.bias = nn.Parameter(torch.zeros(n_heads * d_head)) if bias else None

    def forward(self, x: Float[Tensor, "*batch h d"]) -> Float[Tensor, "*batch h d"]:
        """Normalise `x` (..., h, d)."""
        y = functional.layer_norm(x.to(self.weight.dtype), x.shape[-1:], eps=self.eps)
        y = y * self.weight.unflatten(0, (self.n_heads, -1))
        return y if self.bias is None else y + self.bias.unflatten(0, (self.n_heads, -1))

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        d_head = len(self.weight) // self.n_heads
        return f"n_heads={self.n_heads}, d_head={d_head}, eps={self.eps}, bias={self.bias is not None}"
