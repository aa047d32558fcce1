"""Fast weights: features, strengths and steps of the delta rule, and fast weights whose entries decay."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn import feature_maps
from linrec.nn.gates import GateLinear
from linrec.ops.core.kernel import Differentiable
from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.scan import scan
from linrec.rules import choice, require

__all__ = [
    "CHANNELS_PER_HEAD",
    "FeatureNorm",
    "Strength",
    "UnitFeatures",
    "WriteStrength",
    "fast_weights",
    "fast_weights_matrix",
    "joint_decay",
    "written",
]

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

    Source:
        "l2" with SiLU: Yang and others, DeltaNet (2024). "l1": the sum normalisation of Schlag, Irie and
        Schmidhuber (2021), for features >= 0.
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

    Source:
        "sigmoid": Schlag, Irie and Schmidhuber (2021). "double_sigmoid": Grazzi and others, Unlocking
        State-Tracking in Linear RNNs Through Negative Eigenvalues (2025).
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
    """
    return W + k.mT * (beta * (v - k @ W))


def fast_weights(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_f: Float[Tensor, "b t h dk"] | None,
    log_z: Float[Tensor, "b t h dv"],
    *,
    joint: bool = False,
    state: Float[Tensor, "b h dk dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:
    """Return y_t = q_t S_t and the last S, of S_t = (f_t^T z_t) * S_{t-1} + k_t^T v_t.

    Every entry of S is a channel of `scan`, which keeps it for every step.

    Args:
        q: queries (b, t, h, dk).
        k: keys (b, t, h, dk).
        v: values (b, t, h, dv).
        log_f: log of the decays of key channels (b, t, h, dk), in float32 or better; None is f = 1.
        log_z: log of the decays of value channels (b, t, h, dv), in float32 or better.
        joint: whether entries decay by 1 - (1 - f) (1 - z) in place of f z.
        state: S_0 (b, h, dk, dv), or None for zeros.
        reset: (b, t) bool, true where a new sequence starts.

    Returns:
        y (b, t, h, dv) and the last S (b, h, dk, dv), both in the dtype of the decays.
    """
    update = (k[..., None] * v[..., None, :]).to(log_z.dtype)
    if log_f is None:
        decay = log_z.exp()[..., None, :].expand_as(update)
    elif joint:
        decay = joint_decay(log_f[..., None], log_z[..., None, :])
    else:
        decay = (log_f[..., None] + log_z[..., None, :]).exp()
    state = None if state is None else state.flatten(1)
    S, last = scan(decay.flatten(2), update.flatten(2), state=state, reset=reset)
    y = (q[..., None, :].to(S.dtype) @ S.unflatten(-1, update.shape[2:]))[..., 0, :]
    return y, last.unflatten(-1, update.shape[2:])


def joint_decay(log_f: Float[Tensor, "*f"], log_z: Float[Tensor, "*z"]) -> Float[Tensor, "*fz"]:
    """Return 1 - (1 - f) (1 - z) = z + (1 - z) f of logarithms that broadcast; nothing cancels."""
    return log_z.exp() - torch.expm1(log_z) * log_f.exp()


def fast_weights_matrix(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    log_f: Float[Tensor, "b t h dk"] | None,
    log_z: Float[Tensor, "b t h dv"],
    gate: Float[Tensor, "b t h dv"] | None = None,
    *,
    joint: bool = False,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t t"]:
    """Return the mean magnitude over heads and value channels of the weight of v of step m in y of step n.

        W_nm = mean_hj |gate_mj sum_i q_ni k_mi prod_{l=m+1..n} f_li z_lj|

    Args:
        q: queries (b, t, h, dk).
        k: keys (b, t, h, dk).
        log_f: as for `fast_weights`.
        log_z: as for `fast_weights`.
        gate: a factor of v (b, t, h, dv); None is 1.
        joint: as for `fast_weights`; the product is then of these decays.
        reset: (b, t) bool.
    """
    # to one value channel, the fast weights are a head of its own
    d_value = log_z.shape[-1]
    q, k = (part.repeat_interleave(d_value, 2) for part in (q, k))
    if gate is not None:
        k = k * gate.flatten(2)[..., None]
    if log_f is None:
        log_decay = log_z[..., None]
    elif joint:
        log_decay = joint_decay(log_f[..., None, :], log_z[..., None]).log()
    else:
        log_decay = log_f[..., None, :] + log_z[..., None]
    return gate_loop_matrix(q, k, log_decay.flatten(2, 3), reset=reset).abs().mean(1)
