"""The short convolution as a layer: its taps, and the tail that it carries."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.parameters import mark
from linrec.ops.short_conv import short_conv

__all__ = ["ShortConvolution"]


class ShortConvolution(nn.Module):
    """y_tc = sum_{j=0..width-1} w_cj x_{t-j,c} + b_c: every channel filtered by a few taps, causally.

    Taps and biases start uniform in +- 1 / sqrt(width), as those of torch's Conv1d.

    Args:
        channels: channels c.
        width: taps per channel, at least 1; the first is that of the current step.
        bias: whether there is a b.

    Raises:
        ValueError: a width below 1.

    Source:
        Gu and Dao, Mamba (2023), section 3.4.

    Example:
        >>> import torch
        >>> y, tail = ShortConvolution(8, 4)(torch.zeros(2, 10, 8))
        >>> y.shape, tail.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 3, 8]))
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(
                f"`width` of a short convolution, a mixer's `conv_size`, must be at least 1 tap; got {width}."
                " A mixer with `conv_size=None` has no convolution."
            )
        self.channels, self.width = channels, width
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        mark(self, "weight", group="channel", weight_decay=True)
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        tail: Float[Tensor, "b width-1 c"] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b width-1 c"]]:
        """Filter `x` (b, t, c); arguments and results are those of `linrec.ops.short_conv`."""
        # autocast may have halved the input of float32 taps, which the operator takes
        return short_conv(x, self.weight, self.bias, state=tail, reset=reset)

    def side_by_side(
        self,
        parts: Sequence[Tensor],
        tail: Float[Tensor, "b width-1 c"] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "b width-1 c"]]:
        """Filter several tensors (b, t, ..), which have the channels between them, as one."""
        y, tail = self(torch.cat(list(parts), dim=-1), tail, reset=reset)
        return y.split([part.shape[-1] for part in parts], dim=-1), tail

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Float[Tensor, "b width-1 c"]:
        """The tail at the start of a sequence: zeros (batch, width - 1, channels)."""
        return short_conv.empty_state(batch, self.width, self.channels, dtype=dtype, device=device)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"channels={self.channels}, width={self.width}, bias={self.bias is not None}"
