"""The head of a language model."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Head", "soft_cap"]


def soft_cap(x: Float[Tensor, "*n"], cap: float | None) -> Float[Tensor, "*n"]:
    """y = cap tanh(x / cap), within (-cap, cap) and near x where x is small; x itself where `cap` is None.

    Example:
        >>> soft_cap(torch.tensor([0.1, 100.0]), 30.0)
        tensor([ 0.1000, 29.9237])
    """
    return x if cap is None else cap * torch.tanh(x / cap)


class Head(nn.Linear):
    """logits = cap tanh((W x + b) / cap), or W x + b where `cap` is None.

    Args:
        d_model: width of the input.
        n_outputs: logits.
        bias: whether there is b.
        cap: bound of the magnitude of logits, or None.

    Raises:
        ValueError: `cap` is not positive.

    Example:
        >>> Head(64, 50, cap=30.0)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 50])
    """

    def __init__(self, d_model: int, n_outputs: int, *, bias: bool = True, cap: float | None = None) -> None:
        if cap is not None and not cap > 0:
            raise ValueError(f"`cap` must be above 0, or None; got {cap}.")
        super().__init__(d_model, n_outputs, bias=bias)
        self.cap = cap

    def forward(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n n_outputs"]:
        """Return the logits of `x` (..., d_model)."""
        return soft_cap(super().forward(x), self.cap)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"{super().extra_repr()}, cap={self.cap}"
