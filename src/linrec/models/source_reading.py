"""Attention of a decoder's blocks to the output of an encoder, whose keys and values are computed once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.norms import Norm, make_norm
from linrec.nn.projections import output_kwargs
from linrec.nn.visible_attention import CrossAttention
from linrec.rules import require
from linrec.trees import Tree

__all__ = ["Encoded", "GatedReading", "Source", "SourceReading", "StackedReading", "TwoReadings"]


class Encoded(NamedTuple):
    """The output of an encoder.

    Attributes:
        y: the output (b, s, d).
        visible: whether a step is not padding (b, s); None without padding.
    """

    y: Float[Tensor, "b s d"]
    visible: Bool[Tensor, "b s"] | None


class Source(NamedTuple):
    """The keys and values of an encoder's output in one block of a decoder.

    Attributes:
        k: keys (b, s, h, d).
        v: values (b, s, h, d).
        visible: whether a step of the source is not padding (b, s); None without padding.
    """

    k: Float[Tensor, "b s h d"]
    v: Float[Tensor, "b s h d"]
    visible: Bool[Tensor, "b s"] | None


class SourceReading(nn.Module):
    """Attn(h; U): a sublayer of a block, between time mixing and channel mixing; U is an encoder's output.

    Args:
        d_model: width of the decoder.
        d_source: width of U.
        n_heads: heads, as in `CrossAttention`.
    """

    def __init__(self, d_model: int, d_source: int, n_heads: int | None = None) -> None:
        super().__init__()
        self.attention = CrossAttention(d_model, n_heads, d_other=d_source)

    def read(self, encoders: Sequence[Encoded]) -> Tree:
        """Return the keys and values of the first encoder's output, which `forward` reads."""
        y, visible = encoders[0]
        return Source(*self.attention.keys(y), visible)

    def empty(self, batch: int, device: torch.device | str | None) -> Tree:
        """Return a source of no steps, which `forward` refuses."""
        keys = torch.zeros(batch, 0, *self.attention.heads, **output_kwargs(self.attention.k, device))
        return Source(keys, keys, None)

    def forward(self, h: Float[Tensor, "b t d_model"], source: Tree) -> Float[Tensor, "b t d_model"]:
        """Return the outputs of the attention at each step."""
        require(
            source is not None and source.k.shape[1] > 0,
            "`state` must hold the source that the decoder reads; got a state without a source. Pass "
            "`source=`, or begin with the state of `encode(source)`.",
        )
        visible = None if source.visible is None else source.visible[:, None]
        return self.attention.attend(h, source.k, source.v, visible)

    if TYPE_CHECKING:
        __call__ = forward


class TwoReadings(SourceReading):
    """Attentions to two encoders, whose state is a pair of sources; a subclass joins their outputs.

    Args:
        d_model: width of the decoder.
        d_source: width of U_1.
        d_second: width of U_2.
        n_heads: heads, as in `CrossAttention`.
    """

    def __init__(self, d_model: int, d_source: int, d_second: int, n_heads: int | None = None) -> None:
        super().__init__(d_model, d_source, n_heads)
        self.second = SourceReading(d_model, d_second, n_heads)

    def read(self, encoders: Sequence[Encoded]) -> Tree:
        """Return the keys and values of the outputs of two encoders."""
        return super().read(encoders[:1]), self.second.read(encoders[1:])

    def empty(self, batch: int, device: torch.device | str | None) -> Tree:
        """Return two sources of no steps."""
        return super().empty(batch, device), self.second.empty(batch, device)

    def forward(self, h: Float[Tensor, "b t d_model"], source: Tree) -> Float[Tensor, "b t d_model"]:
        """Return Attn(h; U_1)."""
        return super().forward(h, None if source is None else source[0])

    def following(self, h: Float[Tensor, "b t d_model"], source: Tree) -> Float[Tensor, "b t d_model"]:
        """Return Attn(h; U_2)."""
        return self.second(h, None if source is None else source[1])


class GatedReading(TwoReadings):
    """C = g C_1 + (1 - g) C_2, g = sigmoid(W [C_1, C_2] + b), with C_i = Attn(h; U_i) of two encoders.

    Arguments are those of `TwoReadings`.

    Source:
        Hao and others, Modeling Recurrence for Transformer (2019), section 3.3, gated sum.
    """

    def __init__(self, d_model: int, d_source: int, d_second: int, n_heads: int | None = None) -> None:
        super().__init__(d_model, d_source, d_second, n_heads)
        self.gate = nn.Linear(2 * d_model, d_model)

    def forward(self, h: Float[Tensor, "b t d_model"], source: Tree) -> Float[Tensor, "b t d_model"]:
        """Return C at each step."""
        C_1, C_2 = super().forward(h, source), self.following(h, source)
        g = torch.sigmoid(self.gate(torch.cat([C_1, C_2], -1)))
        return g * C_1 + (1 - g) * C_2


class StackedReading(TwoReadings):
    """Two sublayers of a block, Attn(h; U_1) and then Attn(h; U_2), each with its skip connection and norm.

    The block calls the second sublayer, `following`, with `second_norm`.

    Args:
        d_model: width of the decoder.
        d_source: width of U_1.
        d_second: width of U_2.
        n_heads: heads, as in `CrossAttention`.
        norm: "layer", "rms" or "none", of the second sublayer.
        norm_eps: epsilon of the norm.

    Source:
        Hao and others, Modeling Recurrence for Transformer (2019), section 3.3, stack.
    """

    def __init__(
        self,
        d_model: int,
        d_source: int,
        d_second: int,
        n_heads: int | None = None,
        *,
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(d_model, d_source, d_second, n_heads)
        self.second_norm = make_norm(norm, d_model, eps=norm_eps)
