"""Parts of the layers of the delta rule: queries and keys of norm 1, and how strongly a step writes."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn import feature_maps
from linrec.nn.gates import GateLinear
from linrec.ops.core.kernel import Differentiable
from linrec.rules import choice, require

__all__ = ["CHANNELS_PER_HEAD", "FeatureNorm", "Strength", "UnitFeatures", "WriteStrength", "written"]

FeatureNorm = Literal["l2", "l1", "none"]
Strength = Literal["sigmoid", "double_sigmoid", "one"]

# of language models of fast weight programmers (Irie and others, 2021): 8 heads in a width of 128
CHANNELS_PER_HEAD = 16

_SCALES = {"sigmoid": 1.0, "double_sigmoid": 2.0}
# features shorter than this stay shorter than 1: gradients are at most its inverse
_SHORTEST = 1e-6


class UnitFeatures(nn.Module):
    """u = phi(x) / |phi(x)| for each head, formed in float32 or better.

    The transition I - beta k k^T has the eigenvalue 1 - beta |k|^2 at each step that meets the same key. In
    half precision |k| exceeds 1 now and then. With beta <= 1 that does no harm. With beta = 2 the state would
    grow, so `strength` "double_sigmoid" keeps u in float32.

    Args:
        d_head: channels of a query or key.
        feature_map: phi, a name of `linrec.nn.feature_maps` whose features do not turn.
        norm: "l2"; "l1", the sum of magnitudes; or "none", for features that are normalised already.
        nu: shifts of the feature map "dpfp"; None is its default.
        eps: as released code does, added to the squared norm with "l2", and to the sum with "l1"; 0 keeps
            features of all sizes but the smallest at norm 1.
        strength: of the steps that write u, as in `WriteStrength`; decides the dtype.

    Attributes:
        d_features: channels of u.

    Raises:
        ValueError: an unknown norm or feature map, or one whose features turn.

    Source:
        "l2" with SiLU: Yang and others, DeltaNet (2024). "l1": the sum normalisation of Schlag, Irie and
        Schmidhuber (2021), for features >= 0.

    Example:
        >>> import torch
        >>> UnitFeatures(2, feature_map="relu")(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    def __init__(
        self,
        d_head: int,
        *,
        feature_map: str = "silu",
        norm: FeatureNorm = "l2",
        nu: int | None = None,
        eps: float = 0.0,
        strength: Strength = "sigmoid",
    ) -> None:
        super().__init__()
        require(eps >= 0, f"`qk_eps` must be at least 0; got {eps}. flash-linear-attention's is 1e-6.")
        choice(FeatureNorm, qk_norm=norm)
        arguments: dict[str, Any] = {} if nu is None else {"nu": nu}
        self.phi = feature_maps.build_without_phase(feature_map, d_head, of="the delta rule", **arguments)
        self.norm, self.eps, self.d_features = norm, eps, self.phi.d_features
        self.is_wide = strength == "double_sigmoid"

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """Return the features (..., d_features) of `x` (..., d_head)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        features, dtype = self.phi(x.to(wide)), wide if self.is_wide else x.dtype
        if self.norm == "l2":
            return _unit(_Features(features, self.eps, dtype)).unit
        return self._normalised(features).to(dtype)

    def _normalised(self, features: Tensor) -> Tensor:
        if self.norm == "none":
            return features
        if self.eps:
            return features / (features.abs().sum(-1, keepdim=True) + self.eps)
        return functional.normalize(features, p=1, dim=-1, eps=_SHORTEST)

    def extra_repr(self) -> str:
        """Return the norm, which `print` shows beside the feature map."""
        return f"norm={self.norm!r}"


class _Features(NamedTuple):
    x: Tensor
    eps: float
    dtype: torch.dtype


class _Unit(NamedTuple):
    unit: Tensor
    norm: Tensor


def _unit_forward(given: _Features, keep: bool) -> _Unit:
    x, eps, dtype = given
    if eps:
        norm = torch.sqrt(x.square().sum(-1, keepdim=True) + eps)
    else:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=_SHORTEST)
    return _Unit((x / norm).to(dtype), norm)


def _unit_adjoint(given: _Features, kept: _Unit, d: _Unit, needs: Sequence[bool]) -> list[Tensor | None]:
    """With u = x / n and n = |x|, dx = (du - (u . du) u) / n + dn u."""
    u, n = kept.unit.to(kept.norm.dtype), kept.norm
    along = d.norm - (u * d.unit).sum(-1, keepdim=True) / n
    if not given.eps:
        # a norm that was raised to the smallest is a constant
        along = torch.where(n > _SHORTEST, along, 0)
    return [d.unit / n + along * u, None, None]


# autograd would save the features as well: the operator that reads the units saves these anyway
_unit = Differentiable(_Features, _Unit, _unit_forward, _unit_adjoint, saves=("unit", "norm"))


class WriteStrength(nn.Module):
    """beta_t of each head: the share of the value under a key that a step replaces.

    | `strength` | beta | eigenvalue of I - beta k k^T along a unit key |
    |---|---|---|
    | "sigmoid" | sigmoid(W x) | in (0, 1) |
    | "double_sigmoid" | 2 sigmoid(W x) | in (-1, 1) |
    | "one" | 1 | 0 |

    Args:
        d_model: width of the input.
        n_heads: heads h.
        strength: one of the table.
        bias: whether sigmoid's argument has a bias, which starts at zero.

    Raises:
        ValueError: an unknown strength.

    Source:
        "sigmoid": Schlag, Irie and Schmidhuber (2021). "double_sigmoid": Grazzi and others, Unlocking
        State-Tracking in Linear RNNs Through Negative Eigenvalues (2025).

    Example:
        >>> import torch
        >>> WriteStrength(4, 2, strength="double_sigmoid")(torch.zeros(1, 1, 4))
        tensor([[[1., 1.]]], grad_fn=<MulBackward0>)
    """

    def __init__(
        self, d_model: int, n_heads: int, *, strength: Strength = "sigmoid", bias: bool = False
    ) -> None:
        super().__init__()
        choice(Strength, beta=strength)
        self.n_heads, self.strength = n_heads, strength
        self.projection = None if strength == "one" else GateLinear(d_model, n_heads, bias=bias)
        if bias and self.projection is not None:
            nn.init.zeros_(self.projection.bias)

    def forward(self, x: Float[Tensor, "b t d_model"]) -> Float[Tensor, "b t h"]:
        """Return beta (b, t, h) of `x` (b, t, d_model), in float32 or better."""
        if self.projection is None:
            return x.new_ones(*x.shape[:2], self.n_heads, dtype=torch.promote_types(x.dtype, torch.float32))
        return _SCALES[self.strength] * torch.sigmoid(self.projection(x))

    def extra_repr(self) -> str:
        """Return the strength, which `print` shows beside the projection."""
        return f"strength={self.strength!r}"


def written(
    W: Float[Tensor, "*batch dk dv"],
    k: Float[Tensor, "*batch 1 dk"],
    v: Float[Tensor, "*batch 1 dv"],
    beta: Float[Tensor, "*batch 1 1"],
) -> Float[Tensor, "*batch dk dv"]:
    """Return W + beta k^T (v - k W): one step of the delta rule, for networks that run step by step.

    Args:
        W: fast weights, transposed (..., dk, dv).
        k: key, a row (..., 1, dk).
        v: value, a row (..., 1, dv).
        beta: writing strength (..., 1, 1).

    Example:
        >>> import torch
        >>> k, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[4.0]])
        >>> written(torch.zeros(2, 1), k, v, torch.tensor([[0.5]]))
        tensor([[2.],
                [0.]])
    """
    return W + k.mT * (beta * (v - k @ W))
