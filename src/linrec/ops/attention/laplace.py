"""Attention by Laplace's function or a squared ReLU, which weigh each pair of steps apart from the others."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from linrec.ops.attention import softmax, softmax_reference
from linrec.ops.attention.cache import AttentionCache

Weigher: TypeAlias = Literal["laplace", "relu2"]

# at mu, f and its slope are those of relu(s)^2
MU, SIGMA = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))


def laplace(scores: Tensor) -> Tensor:
    """f(s) = (1 + erf((s - mu) / (sigma sqrt(2)))) / 2."""
    # where f is small, 1 + erf cancels to zero, and erfc keeps its digits
    return 0.5 * torch.erfc((MU - scores) / (SIGMA * math.sqrt(2)))


def relu2(scores: Tensor) -> Tensor:
    """f(s) = max(s, 0)^2."""
    return torch.relu(scores).square()


WEIGHERS: dict[Weigher, Callable[[Tensor], Tensor]] = {"laplace": laplace, "relu2": relu2}


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: AttentionCache,
    reset: Tensor | None,
    scale: float,
    window: int | None,
    function: Weigher,
) -> tuple[Tensor, AttentionCache]:
    """y_n = sum_{n-window<m<=n} f(scale q_n . k_m) v_m; other args and returns as in `softmax.causal`."""
    attend = partial(_attend, function=function)
    return softmax.causal(q, k, v, cache, reset, scale, window, 0.0, attend)


def causal_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: AttentionCache,
    reset: Tensor | None,
    scale: float,
    window: int | None,
    function: Weigher,
) -> tuple[Tensor, AttentionCache]:
    """The same by the loop over time; other args and returns as in `softmax.causal`."""

    def weigh(scores: Tensor, alive: Tensor) -> Tensor:
        return WEIGHERS[function](scores) * alive

    return softmax_reference.causal_reference(q, k, v, cache, reset, scale, window, 0.0, weigh)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    *,
    visible: Tensor | None = None,
    is_causal: bool = False,
    function: Weigher,
) -> Tensor:
    """Queries (b, n, h, dk) attend to keys (b, m, g, dk), those `visible` to them, (b or 1, n, m)."""
    assert dropout == 0
    q, k, v = (x.transpose(1, 2) for x in (q, softmax.repeated(k, q), softmax.repeated(v, q)))
    # Laplace's function is steep around its middle, where half precision would round it
    scores = scale * (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    weights = WEIGHERS[function](scores)
    if is_causal:
        weights = weights.tril()
    elif visible is not None:
        weights = weights * visible[:, None]
    return (weights.to(v.dtype) @ v).transpose(1, 2)
