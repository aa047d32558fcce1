"""Softmax attention of one sequence to another."""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.head_sizes import split_width
from linrec.nn.projections import projected
from linrec.nn.visible_attention import visible_attention

__all__ = ["CrossAttention"]

CHANNELS_PER_HEAD = 64


class CrossAttention(nn.Module):
    """o = softmax(q k^T / (tau sqrt(d_head))) v W^O, with q of one sequence, and k and v of another.

    The projections have biases. There are no positions.

    Args:
        d_model: width of both sequences and of the output.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        temperature: tau.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`.

    Source:
        Vaswani and others, Attention Is All You Need (2017), section 3.2.

    Example:
        >>> import torch
        >>> attention = CrossAttention(8, 2)
        >>> attention(torch.zeros(3, 5, 8), torch.zeros(3, 4, 8)).shape
        torch.Size([3, 5, 8])
    """

    of_one_input = "k", "v"

    def __init__(self, d_model: int, n_heads: int | None = None, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.heads = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.temperature = temperature
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        other: Float[Tensor, "b s d_model"],
        visible: Bool[Tensor, "#b t s"] | None = None,
    ) -> Float[Tensor, "b t d_model"]:
        """Return o.

        Args:
            x: the sequence of the queries.
            other: the sequence of the keys and values.
            visible: whether a query sees a key; each query must see at least one key. None is all.
        """
        q = (self.q(x) / self.temperature).unflatten(-1, self.heads)
        k, v = (y.unflatten(-1, self.heads) for y in projected(other, self.k, self.v))
        o = visible_attention(q, k, v, visible, causal=False)
        return self.out(o.flatten(-2))
