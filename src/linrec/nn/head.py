"""Embeddings of tokens, and the heads of models."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.parameters import mark

__all__ = ["Embedding", "Head", "PairHead", "soft_cap"]

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


def soft_cap(x: Float[Tensor, "*n"], cap: float | None) -> Float[Tensor, "*n"]:
    """y = cap tanh(x / cap), within (-cap, cap) and near x where x is small; x itself where `cap` is None."""
    return x if cap is None else cap * torch.tanh(x / cap)


class Head(nn.Linear):
    """logits = cap tanh((W x + b) / cap), or W x + b where `cap` is None.

    Args:
        d_model: width of the input.
        n_outputs: logits.
        bias: whether there is b.
        cap: bound of the magnitude of logits, or None.

    Raises:
        ValueError: `cap` is not positive.

    Example:
        >>> Head(64, 50, cap=30.0)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 50])
    """

    def __init__(self, d_model: int, n_outputs: int, *, bias: bool = True, cap: float | None = None) -> None:
        if cap is not None and not cap > 0:
            raise ValueError(f"`cap` must be above 0, or None; got {cap}.")
        super().__init__(d_model, n_outputs, bias=bias)
        self.cap = cap

    def forward(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n n_outputs"]:
        """Return the logits of `x` (..., d_model)."""
        return soft_cap(super().forward(x), self.cap)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"{super().extra_repr()}, cap={self.cap}"


class PairHead(nn.Module):
    """outputs = W_2 relu(W_1 [u, v, u v, u - v] + b_1) + b_2, of the encodings u and v of two sequences.

    The hidden layer is as wide as an encoding.

    Args:
        d_model: width of the encodings.
        n_outputs: classes, or values of a regression.

    Source:
        Long Range Arena (Tay et al., 2020), section 2.2.3: encodings that one model makes of both sequences,
        apart from each other; the four parts come from its code, the single hidden layer from S4's.

    Example:
        >>> PairHead(64, 2)(torch.zeros(5, 2, 64)).shape
        torch.Size([5, 2])
    """

    def __init__(self, d_model: int, n_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(4 * d_model, d_model)
        self.output = mark(nn.Linear(d_model, n_outputs), group="vocabulary", weight_decay=True)

    def forward(self, encodings: Float[Tensor, "b 2 d_model"]) -> Float[Tensor, "b n_outputs"]:
        """Outputs of each pair."""
        u, v = encodings.unbind(1)
        return self.output(torch.relu(self.hidden(torch.cat([u, v, u * v, u - v], dim=-1))))

    if TYPE_CHECKING:
        __call__ = forward
