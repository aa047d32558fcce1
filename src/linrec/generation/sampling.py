"""Sampling of the next token from logits: temperature, top-k, top-p."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linrec.ops.core.kernel import Memory, forward_op

__all__ = ["Candidates", "Sampling", "candidates", "draw"]


@dataclass(frozen=True)
class Sampling:
    """p_i proportional to exp(logits_i / temperature) for the tokens i that top-k and top-p keep, else 0.

    Top-k keeps the `top_k` likeliest tokens. The probabilities of the kept tokens are normalised at the given
    temperature; then top-p keeps the smallest set of likeliest tokens with a total probability of at least
    `top_p`.

    Args:
        temperature: 0 takes the likeliest token (greedy); 1 is the model's own distribution.
        top_k: maximum number of tokens to choose from; None is all.
        top_p: total probability of the tokens to choose from; None or 1 is all.

    Raises:
        ValueError: `temperature` is negative or not finite, `top_k` is below 1, or `top_p` is not in (0, 1].

    Source: Fan and others, Hierarchical Neural Story Generation (2018), section 5 (top-k); Holtzman and
    others, The Curious Case of Neural Text Degeneration (2020), section 3.1 (top-p).

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95).greedy
        False
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"`temperature` must be at least 0 and finite; got {self.temperature}. 0 is greedy."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, or None for all tokens; got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"`top_p` must be in (0, 1], or None for all tokens; got {self.top_p}. "
                "To always take the likeliest token, pass `temperature=0`."
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


class Candidates(NamedTuple):
    """Tokens to choose from, with their probabilities.

    Attributes:
        ids: tokens, (b, n); sorted by descending probability if top-k or top-p is active.
        probabilities: probabilities of `ids`, (b, n), float64, or float32 on MPS, which has no float64; 0 for
            tokens that top-p excludes. The sum of a row is 1 without top-p, and at least `top_p` with it.
    """

    ids: Int64[Tensor, "b n"]
    probabilities: Float[Tensor, "b n"]


def candidates(logits: Float[Tensor, "b v"], sampling: Sampling) -> Candidates:
    """p = softmax(logits / temperature) of the tokens that top-k and top-p keep.

    Args:
        logits: (b, v).
        sampling: temperature and filters.

    Returns:
        The tokens, and their probabilities.

    Example:
        >>> logits = torch.tensor([[0.1, 0.6, 0.3]]).log()
        >>> ids, probabilities = candidates(logits, Sampling(top_p=0.8))
        >>> ids.tolist(), probabilities.float()
        ([[1, 2, 0]], tensor([[0.6000, 0.3000, 0.0000]]))
    """
    if sampling.greedy:
        ids = logits.argmax(-1, keepdim=True)
        return Candidates(ids, torch.ones_like(ids, dtype=_wide(logits)))
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits, ids = logits.topk(sampling.top_k)
    elif top_p < 1:
        # a stable sort keeps the same tokens on every device if probabilities are equal
        logits, ids = logits.sort(descending=True, stable=True)
    else:
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    logits = logits.to(_wide(logits))
    # subtract the largest logit first, so that the division cannot overflow
    p = ((logits - logits.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if top_p < 1:
        before = _cumulative(p) - p
        p = torch.where(before < top_p, p, 0.0)
    return Candidates(ids, p)


def draw(found: Candidates, uniform: Float[Tensor, "b 1"]) -> Int64[Tensor, "b"]:
    """Return the token i with F_{i-1} <= u F_n < F_i, where F is the cumulative sum of the probabilities.

    A token with probability 0 is never drawn, even under rounding errors.

    Args:
        found: the tokens to choose from.
        uniform: u (b, 1), in [0, 1), in the dtype of the probabilities.

    Returns:
        Tokens (b).

    Example:
        >>> found = Candidates(torch.tensor([[5, 7]]), torch.tensor([[0.2, 0.6]]))
        >>> [draw(found, torch.tensor([[u]])).item() for u in (0.0, 0.24, 0.26, 0.999)]
        [5, 5, 7, 7]
    """
    ids, p = found
    total = _cumulative(p)
    # the last token with F_{i-1} <= u F_n always exists; rounding may leave no token with u F_n < F_i
    begun = (total - p <= uniform * total[:, -1:]) & (p > 0)
    place = torch.arange(p.shape[-1], device=p.device)
    chosen = torch.where(begun, place, 0).amax(-1, keepdim=True)
    return ids.gather(-1, chosen)[:, 0]


class _Given(NamedTuple):
    p: Tensor


class _Sums(NamedTuple):
    total: Tensor


def _fill(out: _Sums, given: _Given) -> None:
    torch.cumsum(given.p, -1, out=out.total)


# one operation for compilers alone: torch 2.11 fails to compile long sums in float64 for several rows on CUDA
_sums = forward_op(
    "cumulative_probabilities",
    _Given,
    _Sums,
    lambda given, keep: (Memory(tuple(given.p.shape), given.p.dtype),),
    _fill,
)


def _cumulative(p: Tensor) -> Tensor:
    return _sums(_Given(p)).total if torch.compiler.is_compiling() else p.cumsum(-1)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float32 if logits.device.type == "mps" else torch.float64
