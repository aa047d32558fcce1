"""Norms by name, of heads and of groups of channels, and the gate that follows a norm."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown

__all__ = ["GroupRMSNorm", "HeadNorm", "LayerNorm", "Norm", "RMSNorm", "gated", "make_norm"]

Norm = Literal["layer", "rms", "none"]


class LayerNorm(nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis, in the dtype of the weight.

    torch's own LayerNorm refuses a float32 input beside weights in half precision.
    """

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise `x` (..., d)."""
        return super().forward(x if self.weight is None else x.to(self.weight.dtype))


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis, computed in the weight's dtype, if any.

    Under autocast torch's own RMSNorm meets a bfloat16 input with a float32 weight, warns and leaves its
    fused kernel; this one computes in float32 there, as LayerNorm does.

    Example:
        >>> import torch
        >>> RMSNorm(2)(torch.tensor([3.0, 4.0])).square().sum().round().item()
        2.0
    """

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise `x` (..., d)."""
        return super().forward(x if self.weight is None else x.to(self.weight.dtype))

    if TYPE_CHECKING:
        __call__ = forward


def make_norm(kind: Norm, d: int, *, eps: float = 1e-5, affine: bool = True) -> nn.Module:
    """Return the norm over the last axis of size `d` that `kind` names: "layer", "rms" or "none".

    Unless `affine` is False, the first two have a learned weight, LayerNorm a learned bias too. `eps` is
    added to the variance or the mean square.

    Raises:
        ValueError: an unknown `kind`; the message names the nearest.

    Example:
        >>> make_norm("layer", 8).normalized_shape
        (8,)
    """
    if kind == "layer":
        return LayerNorm(d, eps=eps, elementwise_affine=affine)
    if kind == "rms":
        return RMSNorm(d, eps=eps, elementwise_affine=affine)
    if kind == "none":
        return nn.Identity()
    raise unknown("norm", kind, ["layer", "rms", "none"])


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


class GroupRMSNorm(nn.Module):
    """y = x / sqrt(mean_g(x^2) + eps) * weight, the mean over the channels of x's group.

    Computed in the weight's dtype. Groups that lie on different devices need no sum between them.

    Args:
        d: width of the last axis.
        n_groups: groups of d / n_groups neighbouring channels; 1 is RMSNorm.
        eps: added to the mean square.

    Source:
        Dao and Gu, Transformers are SSMs (2024), the norm for tensor parallelism.
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


def gated(
    y: Float[Tensor, "*batch d"],
    g: Float[Tensor, "*batch d"] | None,
    activation: Callable[[Tensor], Tensor] = functional.silu,
) -> Float[Tensor, "*batch d"]:
    """Return activation(g) * y, or y without a gate."""
    return y if g is None else activation(g) * y
