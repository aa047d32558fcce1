"""Normalisation layers by name."""

from typing import TYPE_CHECKING, Literal

from jaxtyping import Float
from torch import Tensor, nn

from linrec.errors import unknown

__all__ = ["LayerNorm", "Norm", "RMSNorm", "make_norm"]

Norm = Literal["layer", "rms", "none"]


class LayerNorm(nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis, in the dtype of the weight.

    torch's own LayerNorm refuses a float32 input beside weights in half precision.

    Example:
        >>> import torch
        >>> LayerNorm(2).bfloat16()(torch.tensor([3.0, 5.0]))
        tensor([-1.,  1.], dtype=torch.bfloat16, grad_fn=<NativeLayerNormBackward0>)
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
