"""Random feature maps: averages over random directions that estimate a kernel."""

import math
from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.feature_maps.fixed import FeatureMap
from linrec.nn.parameters import mark
from linrec.ops.core.precision import without_autocast
from linrec.rules import at_least, positive

__all__ = ["ArcCosine", "FourierFeatures", "PositiveFeatures", "RandomFeatures", "TrigonometricFeatures"]


class RandomFeatures(FeatureMap):
    """phi(x) = h(x) [f_1(W x), .., f_l(W x)] / sqrt(m), the rows of W drawn from a normal distribution.

    W is a buffer that `state_dict` holds. `redraw` replaces it, in place, so that a training run can average
    over draws. Features are formed in float32 or better, under autocast too: most are exponentials, which
    turn an absolute error into a relative error.

    Args:
        d_head: channels d of a query or key.
        functions: l, how many functions f there are.
        n_features: rows m of W. None is d_head.
        orthogonal: whether the rows are orthogonal in blocks of d, with the lengths of independent ones: each
            row is distributed as before, and the estimate varies less.
        n_heads: draws of W, one for each head, or 1 for all heads together.

    Source:
        Performer (Choromanski and others, 2021), eq. 5 and section 2.4.
    """

    projection: Tensor

    def __init__(
        self, d_head: int, functions: int, *, n_features: int | None, orthogonal: bool, n_heads: int
    ) -> None:
        n_features = d_head if n_features is None else n_features
        super().__init__(d_head, functions * n_features)
        if n_features < 1 or n_heads < 1:
            raise ValueError(
                f"`n_features` and `n_heads` must be at least 1; got {n_features} and {n_heads}."
            )
        self.n_features, self.orthogonal, self.n_heads = n_features, orthogonal, n_heads
        self.register_buffer("projection", torch.empty(n_heads, n_features, d_head))
        self.redraw()

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw W anew, in place.

        A state that was made with the old W is useless with the new W: redraw between sequences.

        Args:
            generator: on the CPU, where W is drawn; None is torch's own.
        """
        heads = [self._draw(generator) for _ in range(self.n_heads)]
        self.projection.copy_(torch.stack(heads))

    def forward(self, x: Float[Tensor, "*batch h d"]) -> Float[Tensor, "*batch h m"]:
        """phi(x) (..., h, d_features) of (..., h, d_head), in the dtype of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device.type):
            return (self._features(wide) / math.sqrt(self.n_features)).to(x.dtype)

    @abstractmethod
    def _features(self, x: Tensor) -> Tensor:
        """h(x) [f_1(W x), ..] of a wide `x`."""

    def _projected(self, x: Tensor) -> Tensor:
        w = self.projection.to(x.dtype)
        return functional.linear(x, w[0]) if self.n_heads == 1 else torch.einsum("...hd,hmd->...hm", x, w)

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        rows, d = self.n_features, self.d_head
        # double precision, so that a draw does not depend on the module's dtype
        normal = torch.randn(rows, d, generator=generator, dtype=torch.float64)
        if not self.orthogonal:
            return normal
        blocks = torch.randn(math.ceil(rows / d), d, d, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(blocks)
        # signs that make q uniform; without them the first entry of each column has one sign
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        return q.mT.flatten(0, 1)[:rows] * normal.norm(dim=-1, keepdim=True)


class _ExponentialFeatures(RandomFeatures):
    """Random features that are products with exponentials."""

    exponential = True

    def queries(self, q: Float[Tensor, "*batch h d"]) -> Float[Tensor, "*batch h m"]:
        """phi(q) over the largest of its exponentials; see `FeatureMap.queries`."""
        factors, exponents = self.logarithms(q)
        # the maximum is a constant of each row, so no gradient passes it
        return (factors * (exponents - exponents.detach().amax(-1, keepdim=True)).exp()).to(q.dtype)

    def logarithms(self, x: Float[Tensor, "*batch h d"]) -> tuple[Tensor, Tensor]:
        """Factors and exponents of phi(x); see `FeatureMap.logarithms`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device.type):
            factors, exponents = self._logarithms(wide)
            return factors / math.sqrt(self.n_features), exponents

    def _features(self, x: Tensor) -> Tensor:
        factors, exponents = self._logarithms(x)
        return factors * exponents.exp()

    @abstractmethod
    def _logarithms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Factors and exponents of h(x) [f_1(W x), ..] of a wide `x`."""


class PositiveFeatures(_ExponentialFeatures):
    """phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m), x' = x / d^(1/4).

    E phi(q) . phi(k) = exp(q . k / sqrt(d)), the kernel of softmax attention, from weights that are positive.

    Args:
        d_head: channels d of a query or key.
        n_features: rows m of W, None is d_head.
        orthogonal: whether the rows of W are orthogonal; see `RandomFeatures`.
        hyperbolic: exp(W x') and exp(-W x') side by side: twice the features and, for independent rows, at
            most half the variance.
        n_heads: draws of W, one for each head, or 1 for all heads.

    Source:
        Performer (Choromanski and others, 2021), lemma 1; lemma 2 for the variance of pairs.
    """

    def __init__(
        self,
        d_head: int,
        *,
        n_features: int | None = None,
        orthogonal: bool = True,
        hyperbolic: bool = False,
        n_heads: int = 1,
    ) -> None:
        super().__init__(
            d_head, 1 + hyperbolic, n_features=n_features, orthogonal=orthogonal, n_heads=n_heads
        )
        self.hyperbolic = hyperbolic

    def _logarithms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * self.d_head**-0.25
        exponent = self._projected(x)
        if self.hyperbolic:
            exponent = torch.cat([exponent, -exponent], -1) - math.log(2) / 2
        return torch.ones_like(exponent), exponent - x.square().sum(-1, keepdim=True) / 2


class TrigonometricFeatures(_ExponentialFeatures):
    """phi(x) = exp(|x'|^2 / 2) [sin(W x'), cos(W x')] / sqrt(m), x' = x / d^(1/4).

    E phi(q) . phi(k) = exp(q . k / sqrt(d)) as for `PositiveFeatures`, but an estimate may be negative, and
    varies most where the kernel is small. The paper shows that training with it is unstable; features of a
    norm of x above 13 d^(1/4) overflow in float32.

    Args:
        d_head: channels d of a query or key.
        n_features: rows m of W, None is d_head.
        orthogonal: whether the rows of W are orthogonal; see `RandomFeatures`.
        n_heads: draws of W, one for each head, or 1 for all heads.

    Source:
        Performer (Choromanski and others, 2021), section 2.3.
    """

    def __init__(
        self, d_head: int, *, n_features: int | None = None, orthogonal: bool = True, n_heads: int = 1
    ) -> None:
        super().__init__(d_head, 2, n_features=n_features, orthogonal=orthogonal, n_heads=n_heads)

    def _logarithms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * self.d_head**-0.25
        waves = _waves(self._projected(x))
        return waves, (x.square().sum(-1, keepdim=True) / 2).expand_as(waves)


class FourierFeatures(RandomFeatures):
    """phi(x) = [sin(W x'), cos(W x')] / sqrt(m) with x' = sigma * x / (tau |x|).

    E phi(q) . phi(k) = exp(-|sigma * (q / |q| - k / |k|)|^2 / (2 tau^2)); with equal sigma that is
    exp(sigma^2 cos(q, k) / tau^2) over a constant. sigma / tau is the standard deviation of the rows of W:
    sigma is learned per head and channel, tau is a constant.

    Args:
        d_head: channels d of a query or key.
        n_features: rows m of W, None is d_head.
        orthogonal: whether the rows of W are orthogonal; see `RandomFeatures`.
        n_heads: draws of W and vectors sigma, one for each head, or 1 for all heads.
        learn_sigma: whether sigma is a parameter; False keeps it at 1.
        tau: temperature of the kernel. A smaller tau concentrates the weights on similar keys.

    Source:
        Random feature attention (Peng and others, 2021), with the random features of Rahimi and Recht (2007).
        Norms are divided by after adding 0.001, as in its released code, where sigma starts at 1.
    """

    def __init__(
        self,
        d_head: int,
        *,
        n_features: int | None = None,
        orthogonal: bool = False,
        n_heads: int = 1,
        learn_sigma: bool = True,
        tau: float = 1.0,
    ) -> None:
        super().__init__(d_head, 2, n_features=n_features, orthogonal=orthogonal, n_heads=n_heads)
        positive(tau=tau)
        self.tau = tau
        self.sigma: nn.Parameter | None = None
        if learn_sigma:
            self.sigma = nn.Parameter(torch.ones(n_heads, d_head))
            mark(self, "sigma", group="channel", weight_decay=False)

    def _features(self, x: Tensor) -> Tensor:
        x = x / (self.tau * (x.norm(dim=-1, keepdim=True) + 1e-3))
        if self.sigma is not None:
            x = x * self.sigma.to(x.dtype)
        return _waves(self._projected(x))


class ArcCosine(RandomFeatures):
    """phi(x) = (ReLU(W x) + epsilon) / sqrt(m).

    With epsilon = 0, E phi(q) . phi(k) = |q| |k| (sin(t) + (pi - t) cos(t)) / (2 pi), t the angle between q
    and k: half the arc-cosine kernel of order 1. With orthogonal rows and epsilon = 0.001 this is the
    generalized attention of Performer-ReLU.

    Args:
        d_head: channels d of a query or key.
        n_features: rows m of W, None is d_head.
        orthogonal: whether the rows of W are orthogonal; see `RandomFeatures`.
        n_heads: draws of W, one for each head, or 1 for all heads.
        epsilon: added to every feature, so that a query's features never vanish together.

    Source:
        Random feature attention (Peng and others, 2021), RFA-arccos; Cho and Saul, Kernel Methods for Deep
        Learning (2009), for the kernel; Performer (Choromanski and others, 2021), its generalized attention
        with f = ReLU.
    """

    def __init__(
        self,
        d_head: int,
        *,
        n_features: int | None = None,
        orthogonal: bool = False,
        n_heads: int = 1,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__(d_head, 1, n_features=n_features, orthogonal=orthogonal, n_heads=n_heads)
        at_least(0, epsilon=epsilon)
        self.epsilon = epsilon

    def _features(self, x: Tensor) -> Tensor:
        rectified = functional.relu(self._projected(x))
        return rectified + self.epsilon if self.epsilon else rectified


def _waves(angle: Tensor) -> Tensor:
    return torch.cat([angle.sin(), angle.cos()], -1)
