"""The interface of all feature maps."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["FeatureMap"]


class FeatureMap(nn.Module, ABC):
    """phi of sim(q, k) = phi(q) . phi(k), from d_head channels to d_features.

    A subclass defines `forward`, and sets the attributes that differ from the defaults here.

    Args:
        d_head: channels d of a query or key.
        d_features: features that they are mapped to.

    Attributes:
        positive: whether sim(q, k), or the kernel that it estimates, is never negative. Weights that may be
            negative cannot be divided by their running sum.
        exponential: whether features are products with exponentials, which `logarithms` returns.
        phase: radians that a key's features turn by at each step, the argument `phase` of `gate_loop`; None
            where they do not turn.

    Example:
        >>> import torch
        >>> from linrec.nn import feature_maps
        >>> phi = feature_maps.build("elu", 2)
        >>> phi(torch.tensor([0.0, 1.0]))
        tensor([1., 2.])
    """

    positive: bool = True
    exponential: bool = False
    phase: float | None = None

    def __init__(self, d_head: int, d_features: int) -> None:
        super().__init__()
        if d_head < 1:
            raise ValueError(f"`d_head` must be at least 1; got {d_head}.")
        self.d_head, self.d_features = d_head, d_features

    @abstractmethod
    def forward(self, x: Float[Tensor, "*batch h d"]) -> Float[Tensor, "*batch h m"]:
        """Return phi(x) (..., h, d_features) of queries or keys (..., h, d_head), in their dtype."""

    if TYPE_CHECKING:
        __call__ = forward

    def queries(self, q: Float[Tensor, "*batch h d"]) -> Float[Tensor, "*batch h m"]:
        """Return phi(q) times a positive number for each query, chosen such that nothing overflows.

        Normalised weights do not depend on this factor. Keys have no such factor: a factor that varies over
        the steps would weight the keys.
        """
        features: Tensor = self(q)
        return features

    def logarithms(self, x: Float[Tensor, "*batch h d"]) -> tuple[Tensor, Tensor]:
        """Return factors and exponents (..., h, d_features) with phi(x) = factors * exp(exponents).

        They are in float32 or better. Sums of features can so divide exponentials by the largest exponential.

        Raises:
            NotImplementedError: the features are not `exponential`.
        """
        raise NotImplementedError(f"features of {type(self).__name__} are not exponentials")

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"d_head={self.d_head}, d_features={self.d_features}"
