"""Token embeddings whose gradient is quick and deterministic for small vocabularies too."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Embedding"]

SMALL = 256
"""Rows up to which the gradient is a matrix product."""


class Embedding(nn.Embedding):
    """x_n = E[token_n], with E (num_embeddings, embedding_dim) drawn from N(0, 1).

    The same values and parameters as torch's own. Where few rows serve many tokens, torch's gradient on GPUs
    adds the thousands of rows that share a token one after another, or in any order with atomics; here, up to
    256 rows, it is the product of the tokens' one-hot matrix with the incoming gradient.

    Args:
        num_embeddings: tokens.
        embedding_dim: width.

    Example:
        >>> import torch
        >>> embedding = Embedding(6, 4)
        >>> embedding(torch.tensor([[0, 5, 5]])).shape
        torch.Size([1, 3, 4])
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d"]:
        """Look up `tokens`, ids in [0, num_embeddings)."""
        if self.num_embeddings > SMALL:
            return super().forward(tokens)
        return _SmallLookup.apply(self.weight, tokens)

    if TYPE_CHECKING:
        __call__ = forward


class _SmallLookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        weight, tokens = inputs
        ctx.rows = len(weight)
        ctx.save_for_backward(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        rows = torch.arange(ctx.rows, device=tokens.device)
        chosen = (rows[:, None] == tokens.flatten()).to(gradient.dtype)
        return chosen @ gradient.flatten(0, -2), None
