"""Parts in front of a recurrence that have a state and may be left out, and the short convolution."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.parameters import mark
from linrec.ops.short_conv import short_conv
from linrec.rules import COUNT, at_least

__all__ = ["ShortConvolution", "Stage"]


class Stage(nn.Module):
    """Base class of parts in front of a recurrence, which return their input where they are left out.

    The state of a mixer is the pair of the states of the part and of the recurrence. Without the part, it is
    the state of the recurrence alone.

    Args:
        present: whether the mixer has the part.
    """

    def __init__(self, *, present: bool) -> None:
        super().__init__()
        self.present = present

    def split(self, state: Any) -> tuple[Any, Any]:
        """Return the states of the part and of the recurrence from the state of the mixer."""
        return (None, state) if state is None or not self.present else state

    def joined(self, own: Any, recurrent: Any) -> Any:
        """Return the state of the mixer from the states of the part and of the recurrence."""
        return (own, recurrent) if self.present else recurrent


class ShortConvolution(Stage):
    """y_tc = f(sum_{j=0..width-1} w_cj x_{t-j,c} + b_c): every channel filtered by a few taps, causally.

    f is SiLU or the identity. Taps and biases start uniform in +- 1 / sqrt(width), as in torch's Conv1d.

    Args:
        channels: channels c.
        width: taps per channel, at least 1, the tap for the current step first. None leaves the convolution
            out: y is f(x).
        bias: whether there is a b.
        silu: whether f is SiLU.

    Source:
        Gu and Dao, Mamba (2023), section 3.4.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, channels: int, width: int | None, *, bias: bool = False, silu: bool = False) -> None:
        super().__init__(present=width is not None)
        self.channels, self.width, self.silu = channels, width, silu
        if width is None:
            return
        if width < 1:
            raise ValueError(
                f"`width` of a short convolution, a mixer's `conv_size`, must be at least 1 tap; got {width}."
                " A mixer with `conv_size=None` has no convolution."
            )
        at_least(1, most=COUNT, conv_size=width, cure="Mixers with long filters are hyena, sgconv and tnn.")
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        mark(self, "weight", group="channel", weight_decay=True)
        first = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None
        self.register_parameter("bias", first)

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        tail: Float[Tensor, "b taps c"] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b taps c"] | None]:
        """Filter `x` (b, t, c) behind a tail of width - 1 taps; see `linrec.ops.short_conv`."""
        if not self.present:
            return functional.silu(x) if self.silu else x, None
        # autocast may have halved the input of float32 taps, which the operator takes
        return short_conv(x, self.weight, self.bias, state=tail, reset=reset, silu=self.silu)

    def side_by_side(
        self,
        parts: Sequence[Tensor],
        tail: Float[Tensor, "b taps c"] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "b taps c"] | None]:
        """Filter several tensors (b, t, ..), which have the channels between them, in the dtype of the first.

        Each result has the dtype of its tensor.
        """
        if not self.present:
            return tuple(functional.silu(part) if self.silu else part for part in parts), None
        x = torch.cat([part.to(parts[0].dtype) for part in parts], dim=-1)
        y, tail = self.forward(x, tail, reset=reset)
        filtered = y.split([part.shape[-1] for part in parts], dim=-1)
        return tuple(y.to(part.dtype) for y, part in zip(filtered, parts, strict=True)), tail

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Float[Tensor, "b taps c"] | None:
        """Return the tail at the start of a sequence: zeros (batch, width - 1, channels)."""
        if self.width is None:
            return None
        return short_conv.empty_state(batch, self.width, self.channels, dtype=dtype, device=device)

    def extra_repr(self) -> str:
        """Return the sizes and the activation, which `print` shows."""
        bias = self.present and self.bias is not None
        return f"channels={self.channels}, width={self.width}, bias={bias}, silu={self.silu}"
