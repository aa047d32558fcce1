"""Feature maps of linear attention, by name: sim(q, k) = phi(q) . phi(k).

| name | phi(x) | phi(q) . phi(k) | features of d channels |
|---|---|---|---|
| arc_cosine | (ReLU(W x) + epsilon) / sqrt(m) | estimates half the arc-cosine kernel of order 1 | m |
| cosformer | ReLU(x), with a phase per step | ReLU(q) . ReLU(k) cos(pi (n - m) / 2 M) | d |
| dpfp | products of ReLU([x, -x]) with itself, rolled by 1 .. nu | | 2 d nu |
| elu | elu(x) + 1 | | d |
| hashed | [sqrt(c + 1), c bits of x] | 1 + 2 agreeing bits | c + 1 |
| identity | x | q . k | d |
| learned | ReLU(W x + b), W and b learned | | m |
| performer | exp(W x - abs(x)^2 / 2) / sqrt(m) | estimates exp(q . k) | m, or 2 m if hyperbolic |
| performer_trigonometric | exp(abs(x)^2 / 2) [sin(W x), cos(W x)] / sqrt(m) | estimates exp(q . k) | 2 m |
| relu | ReLU(x) + epsilon | | d |
| rfa | [sin(W x), cos(W x)] / sqrt(m) of unit x | estimates exp(-abs(sigma (q - k))^2 / 2 tau^2) | 2 m |
| silu | x sigmoid(x) | | d |
| softmax | softmax of the channels | | d |
| taylor | [1, y, y_i^2 / sqrt(2), y_i y_j] | 1 + s + s^2 / 2, s = q . k / sqrt(d) | 1 + d (d + 3) / 2 |

Other maps with a matrix W are random: `RandomFeatures`, which can be redrawn. In the two of Performer, x, q
and k are divided by d^(1/4), so that the features estimate the kernel of softmax attention. `HashedFeatures`
learns its bits by `fit`.
"""

import inspect
from typing import Any

from linrec.errors import unknown, unknown_argument
from linrec.nn.feature_maps.fixed import (
    DPFP,
    ELU,
    CosFormer,
    FeatureMap,
    Identity,
    ReLU,
    SiLU,
    Softmax,
    Taylor,
)
from linrec.nn.feature_maps.learned import HashedFeatures, LearnedFeatures
from linrec.nn.feature_maps.random import (
    ArcCosine,
    FourierFeatures,
    PositiveFeatures,
    RandomFeatures,
    TrigonometricFeatures,
)
from linrec.rules import require

__all__ = ["FeatureMap", "HashedFeatures", "RandomFeatures", "build", "build_without_phase", "names"]

PER_HEAD = "hashed", "learned"
"""Maps that learn numbers of each head, by the argument `n_heads`."""

_MAPS: dict[str, type[FeatureMap]] = {
    "arc_cosine": ArcCosine,
    "cosformer": CosFormer,
    "dpfp": DPFP,
    "elu": ELU,
    "hashed": HashedFeatures,
    "identity": Identity,
    "learned": LearnedFeatures,
    "performer": PositiveFeatures,
    "performer_trigonometric": TrigonometricFeatures,
    "relu": ReLU,
    "rfa": FourierFeatures,
    "silu": SiLU,
    "softmax": Softmax,
    "taylor": Taylor,
}


def names() -> list[str]:
    """Names of all feature maps, sorted.

    Example:
        >>> "elu" in names()
        True
    """
    return sorted(_MAPS)


def build(name: str, d_head: int, **arguments: Any) -> FeatureMap:
    """Make the feature map called `name` for heads of `d_head` channels, with its keyword arguments.

    Raises:
        ValueError: there is no such feature map, or it takes no such argument; the message names the nearest.

    Example:
        >>> build("dpfp", 4, nu=3).d_features
        24
    """
    if name not in _MAPS:
        raise unknown("`feature_map`", name, names())
    known = [p.name for p in inspect.signature(_MAPS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for argument in arguments:
        if argument not in known:
            raise unknown_argument(f"feature map {name!r}", argument, known)
    return _MAPS[name](d_head, **arguments)


def build_without_phase(
    name: str,
    d_head: int,
    *,
    of: str,
    cure: str = 'Pass one that does not, such as "silu".',
    **arguments: Any,
) -> FeatureMap:
    """Make the feature map called `name`, for recurrences that do not turn features with time.

    Args:
        name: the name of the feature map.
        d_head: channels of a query or key.
        of: the recurrence, for the error.
        cure: a sentence for the error.
        arguments: keyword arguments of the feature map.
    """
    phi = build(name, d_head, **arguments)
    require(
        phi.phase is None,
        f"`feature_map` of {of} must have no phase; that of {name!r} turns its features. {cure}",
    )
    return phi
