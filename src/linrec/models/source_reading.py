"""Attention of a decoder's blocks to the output of an encoder, whose keys and values are computed once."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.projections import output_kwargs
from linrec.nn.visible_attention import CrossAttention
from linrec.rules import require

__all__ = ["Source", "SourceReading"]


class Source(NamedTuple):
    """The keys and values of an encoder's output in one block of a decoder.

    Attributes:
        k: keys (b, s, h, d).
        v: values (b, s, h, d).
        visible: whether a step of the source is not padding (b, s); None if no step is.
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

    def source(self, encoded: Float[Tensor, "b s d_source"], visible: Bool[Tensor, "b s"] | None) -> Source:
        """Return the keys and values of an encoder's output, which `forward` reads."""
        return Source(*self.attention.keys(encoded), visible)

    def empty(self, batch: int, device: torch.device | str | None) -> Source:
        """Return a source of no steps, which `forward` refuses."""
        keys = torch.zeros(batch, 0, *self.attention.heads, **output_kwargs(self.attention.k, device))
        return Source(keys, keys, None)

    def forward(self, h: Float[Tensor, "b t d_model"], source: Source) -> Float[Tensor, "b t d_model"]:
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
