"""Attentive recurrent network, ARN (Hao, Wang, Yang, Wang, Zhang and Tu, 2019): a few vectors of a sequence.

    c_t = Attn(x_{t-1}; U),  x_t = F(c_t, x_{t-1}),  t = 1 .. n

U is a sequence, x_t a vector, c_t the context that a step reads, F the cell of an LSTM or a GRU, and n the
number of steps, which does not depend on the length of U. A further layer reads x_1 .. x_n in the place of U.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.visible_attention import CrossAttention
from linrec.rules import COUNT, at_least, choice

__all__ = ["AttentiveRecurrence", "AttentiveRecurrenceConfig"]

Cell: TypeAlias = Literal["lstm", "gru"]


@dataclass(frozen=True, kw_only=True)
class AttentiveRecurrenceConfig:
    """Configuration of an `AttentiveRecurrence`.

    Args:
        n_steps: n, the vectors that stand for a sequence.
        n_layers: layers.
        cell: F, "lstm" or "gru".
        n_heads: heads of the attention. None is the largest number that divides the width and leaves at
            least 64 channels to each head, or 1.

    Raises:
        ValueError: a number is out of range, or an unknown cell.

    Example:
        >>> AttentiveRecurrenceConfig(cell="gru").n_steps
        8
    """

    n_steps: int = 8
    n_layers: int = 1
    cell: Cell = "lstm"
    n_heads: int | None = None

    def __post_init__(self) -> None:
        at_least(1, most=COUNT, n_steps=self.n_steps, n_layers=self.n_layers)
        at_least(1, n_heads=self.n_heads, or_none=True)
        choice(Cell, cell=self.cell)


class AttentiveRecurrence(nn.Module):
    """x_t = F(Attn(x_{t-1}; U), x_{t-1}): n vectors, each of which attends to a sequence.

    x_0 is zeros, so the first step reads the same mixture of every sequence's keys.

    Args:
        config: the configuration.
        d_model: width of U and of the vectors.

    Source:
        Hao and others, Modeling Recurrence for Transformer (2019), section 3.2. The paper does not give x_0.

    Example:
        >>> network = AttentiveRecurrence(AttentiveRecurrenceConfig(n_steps=5), 16)
        >>> network(torch.zeros(2, 9, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, config: AttentiveRecurrenceConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        kind = nn.LSTMCell if config.cell == "lstm" else nn.GRUCell
        layers = range(config.n_layers)
        self.attentions = nn.ModuleList(CrossAttention(d_model, config.n_heads) for _ in layers)
        self.cells = nn.ModuleList(kind(d_model, d_model) for _ in layers)

    def forward(
        self, U: Float[Tensor, "b s d_model"], visible: Bool[Tensor, "b s"] | None = None
    ) -> Float[Tensor, "b n d_model"]:
        """Return x_1 .. x_n of the last layer; `visible` is false at steps of U that are padding."""
        for attention, cell in zip(self.attentions, self.cells, strict=True):
            U, visible = self._layer(cast(CrossAttention, attention), cell, U, visible), None
        return U

    if TYPE_CHECKING:
        __call__ = forward

    def _layer(self, attention: CrossAttention, cell: nn.Module, U: Tensor, visible: Tensor | None) -> Tensor:
        k, v = attention.keys(U)
        seen = None if visible is None else visible[:, None]
        x = memory = U.new_zeros(len(U), U.shape[2])
        steps = []
        for _ in range(self.config.n_steps):
            c = attention.attend(x[:, None], k, v, seen)[:, 0]
            if self.config.cell == "lstm":
                x, memory = cell(c, (x, memory))
            else:
                x = cell(c, x)
            steps.append(x)
        return torch.stack(steps, 1)
