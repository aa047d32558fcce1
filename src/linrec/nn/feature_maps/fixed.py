"""The interface of all feature maps, and the maps without randomness."""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.rules import at_least

__all__ = ["DPFP", "ELU", "CosFormer", "FeatureMap", "Identity", "ReLU", "SiLU", "Softmax", "Taylor"]


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
        """
        raise NotImplementedError(f"features of {type(self).__name__} are not exponentials")

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"d_head={self.d_head}, d_features={self.d_features}"


class Identity(FeatureMap):
    """phi(x) = x: sim(q, k) = q . k, which may be negative.

    Source:
        The Devil in Linear Transformer (Qin and others, 2022), whose NormAttention has a norm in place of
        the normaliser.
    """

    positive = False

    def __init__(self, d_head: int) -> None:
        super().__init__(d_head, d_head)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """`x` itself."""
        return x


class ELU(FeatureMap):
    """phi(x) = elu(x) + 1, that is, x + 1 above zero and exp(x) below.

    Source:
        Linear transformer (Katharopoulos and others, 2020), eq. 7.
    """

    def __init__(self, d_head: int) -> None:
        super().__init__(d_head, d_head)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """elu(x) + 1 of (..., d_head)."""
        # elu's exp(x) - 1 would round to -1, and the feature to 0
        # on GPUs, autocast computes exponentials in float32
        return functional.relu(x) + x.clamp(max=0).exp().to(x.dtype)


class ReLU(FeatureMap):
    """phi(x) = ReLU(x) + epsilon.

    Args:
        d_head: channels of a query or key.
        epsilon: added to every feature, so that a query's features never vanish together. The released code
            of Performer has 0.001 in its generalized attention without random directions.

    Source:
        cosFormer (Qin and others, 2022), without its cosine; Performer (Choromanski and others, 2021), for
        epsilon.
    """

    def __init__(self, d_head: int, *, epsilon: float = 0.0) -> None:
        super().__init__(d_head, d_head)
        at_least(0, epsilon=epsilon)
        self.epsilon = epsilon

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """ReLU(x) + epsilon of (..., d_head)."""
        rectified = functional.relu(x)
        return rectified + self.epsilon if self.epsilon else rectified


class SiLU(FeatureMap):
    """phi(x) = x sigmoid(x): sim(q, k) may be negative.

    Source:
        Parallelizing Linear Transformers with the Delta Rule over Sequence Length (Yang and others, 2024).
    """

    positive = False

    def __init__(self, d_head: int) -> None:
        super().__init__(d_head, d_head)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """x sigmoid(x) of (..., d_head)."""
        return functional.silu(x)


class CosFormer(FeatureMap):
    """phi(x) = ReLU(x), and sim(q_n, k_m) = ReLU(q_n) . ReLU(k_m) cos(pi (n - m) / (2 M)).

    The cosine is Re(exp(i pi (n - m) / (2 M))), a phase of pi / (2 M) per step: the recurrence needs no
    positions, and a stream may start anywhere. Keys more than M steps back get negative weights, so M should
    be at least the length of the longest sequence, as the paper requires. Its released code takes M as the
    length of each input. M is a constant here. With the length of the input, an output would depend on the
    number of later steps, and a stream on the positions of its cuts. For inputs of one length n,
    `max_length=n` is the released code. With M far above the length all cosines are near 1, and positions
    weigh little.

    Args:
        d_head: channels of a query or key.
        max_length: M, in steps: the length of the longest sequence. The default of 4096 is not the paper's.

    Source:
        cosFormer: Rethinking Softmax in Attention (Qin and others, 2022).
    """

    def __init__(self, d_head: int, *, max_length: int = 4096) -> None:
        super().__init__(d_head, d_head)
        if max_length < 1:
            raise ValueError(f"`max_length` of cosFormer must be at least 1 step; got {max_length}.")
        self.phase = math.pi / (2 * max_length)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """ReLU(x) of (..., d_head)."""
        return functional.relu(x)


class Softmax(FeatureMap):
    """phi(x) = softmax(x) over the channels: exponentials, less their maximum, which cancels.

    Source:
        Efficient attention (Shen and others, 2021), its softmax of queries; keys, whose softmax over time
        would see the future, have the same one here.
    """

    def __init__(self, d_head: int) -> None:
        super().__init__(d_head, d_head)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """softmax(x) of (..., d_head), in the dtype of `x`."""
        return x.softmax(-1).to(x.dtype)


class DPFP(FeatureMap):
    """phi(x)_(i, j) = r_i r_(i + j) with r = ReLU([x, -x]), for i = 1 .. 2d and j = 1 .. nu.

    Indices go around. The features are sparse and orthogonal for inputs that differ enough, so that more keys
    than channels can be told apart.

    Args:
        d_head: channels d of a query or key.
        nu: shifts, in 1 .. 2d - 1.

    Source:
        Linear Transformers Are Secretly Fast Weight Programmers (Schlag, Irie and Schmidhuber, 2021), its
        deterministic parameter-free projection.
    """

    def __init__(self, d_head: int, *, nu: int = 1) -> None:
        super().__init__(d_head, 2 * d_head * nu)
        if not 1 <= nu <= 2 * d_head - 1:
            raise ValueError(f"`nu` of DPFP must be in 1 .. 2 d_head - 1 = {2 * d_head - 1}; got {nu}.")
        self.nu = nu

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """The products (..., 2 d_head nu): all i for the first j, then all i for the next."""
        r = functional.relu(torch.cat([x, -x], -1))
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.nu + 1)], -1)


class Taylor(FeatureMap):
    """phi(x) = [1 | y | y_i^2 / sqrt(2) | y_i y_j for i < j], y = x / d^(1/4).

        phi(q) . phi(k) = 1 + s + s^2 / 2,    s = q . k / sqrt(d)

    This is the Taylor series of exp(s), the kernel of softmax attention, up to the second power. It is at
    least 1/2.

    Args:
        d_head: channels d of a query or key.

    Source:
        Simple linear attention language models balance the recall-throughput tradeoff (Arora and others,
        2024), BASED, section 4.1. The released code has all d^2 products, y_i y_j / sqrt(2), of which those
        of i < j and of j < i are equal.
    """

    def __init__(self, d_head: int) -> None:
        super().__init__(d_head, 1 + d_head + d_head * (d_head + 1) // 2)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """The features (..., 1 + d + d (d + 1) / 2)."""
        y = x * self.d_head**-0.25
        i, j = torch.triu_indices(self.d_head, self.d_head, 1, device=x.device)
        squares = y.square() * math.sqrt(0.5)
        return torch.cat([torch.ones_like(y[..., :1]), y, squares, y[..., i] * y[..., j]], -1)
