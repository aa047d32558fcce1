"""Causal filters of channels as layers, and filters of as many taps as steps."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from linrec.nn.mixer import State
from linrec.nn.parameters import Float32Module
from linrec.ops.core.call import in_turn, time_is_split, unhandled
from linrec.ops.core.isolation import documents
from linrec.ops.long_conv import long_conv
from linrec.rules import at_least

__all__ = ["Filter", "LongFilter"]


class Filter(Float32Module, ABC):
    """y = K * u: every channel filtered causally by its own taps, with a state of past inputs.

    Args:
        channels: d.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    @abstractmethod
    def forward(
        self, u: Float[Tensor, "b t d"], state: State = None, *, reset: Bool[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b t d"], State]:
        """Return y (b, t, d) and the state, of `u` (b, t, d), a state and resets as of a `Mixer`."""

    @abstractmethod
    def kernel(self, length: int) -> Float[Tensor, "d length"]:
        """Return the first taps K, the tap of the current step first, in float32 or better."""

    @abstractmethod
    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the state at the start of `batch` sequences, in the precision of `dtype`."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Elements of the state per sequence; where the state grows, elements per step kept."""


class LongFilter(Filter):
    """y_t = sum_{l < length} K_l u_{t-l}, whose taps `taps` makes: by FFT, with the past inputs as the state.

    The state grows with every step, up to the last `length` - 1 inputs, since no step sees further back. A
    step has the cost of making and summing so many taps. `linrec.lab.distillation` turns the filter into a
    recurrence.

    Args:
        channels: d.
        length: how many taps there are at most.
        decay: the factor from each tap to the next tap, if all taps have a common factor.
    """

    def __init__(self, channels: int, length: int, *, decay: float | None = None) -> None:
        super().__init__(channels)
        at_least(1, length=length, cure="A single tap is no memory at all.")
        self.length, self.decay = length, decay

    def forward(
        self, u: Float[Tensor, "b t d"], state: State = None, *, reset: Bool[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b s d"]]:
        """Return y, and the last inputs (b, s, d), s < `length`."""
        if not time_is_split():
            return self._filtered(u, state, reset)
        if state is None:
            state = self.init_state(u.shape[0], dtype=self.state_dtype, device=u.device)

        def passed(state: Tensor) -> tuple[Tensor, Tensor]:
            return state, self._last(torch.cat([state.to(u.dtype), u], 1), reset)

        # one process after another, but for the convolution itself
        before, last = in_turn("long_filter", passed, state, [u])
        with unhandled():
            y, _ = self._filtered(u, before, reset)
        return y, last

    def _filtered(self, u: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        past = 0 if state is None else state.shape[1]
        taps = self.taps(min(self.length, past + u.shape[1]), device=u.device)
        y, inputs = long_conv(u, taps, state=state, reset=reset)
        return y, self._last(inputs, None)

    def _last(self, inputs: Tensor, reset: Tensor | None) -> Tensor:
        """Return the last `length` - 1 inputs, with zeros before the last reset."""
        if reset is not None:
            document = documents(reset, past=inputs.shape[1] - reset.shape[1])
            inputs = inputs.masked_fill((document != document[:, -1:])[..., None], 0)
        # a copy, for a view would keep all steps as long as the state
        return inputs[:, max(0, inputs.shape[1] - (self.length - 1)) :].to(self.state_dtype, copy=True)

    @abstractmethod
    def taps(self, length: int, *, device: torch.device | None = None) -> Float[Tensor, "d length"]:
        """Return the first taps in float32 or better.

        Args:
            length: number of taps, at most as many as there are.
            device: where the taps are used; None is where the parameters live.
        """

    def kernel(self, length: int) -> Float[Tensor, "d length"]:
        """Return the first taps, and zeros after the last."""
        taps = self.taps(min(length, self.length))
        return functional.pad(taps, (0, length - taps.shape[1]))

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Float[Tensor, "b s d"]:
        """Return no inputs, (batch, 0, d)."""
        state: Tensor = long_conv.empty_state(batch, 0, self.channels, dtype=dtype, device=device)
        return state

    @property
    def state_size(self) -> int:
        """Elements per step that is kept, of which there are at most `length` - 1: d."""
        return self.channels

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"channels={self.channels}, length={self.length}"
