"""SGConv: What Makes Convolutional Models Great on Long Sequence Modeling? (Li and others, 2022).

    k_i = alpha^i Upsample(w_i, 2^max(i - 1, 0) d)     i = 0 .. N - 1
    K = (k_0, k_1, .., k_{N-1}) / Z
    y = K * u + D u     o_t = W GELU(y_t) + b

u input of a channel, K its kernel, y its output, o output of the layer; w_i the d numbers of a scale, alpha
the decay, at most 1, D a number and Z the norm of the kernel that training starts with, all per channel. A
scale is as long as all earlier scales together, so the number of parameters grows with the logarithm of the
length.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.channel_mixing import Output, PositionWise
from linrec.nn.long_filters import Filter, LongFilter
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.ops.inspection import kernel_mixing
from linrec.rules import at_least, require

__all__ = ["SGConv"]

Upsampling = Literal["linear", "nearest"]
AlphaSpacing = Literal["linear", "inverse"]


class MultiScaleFilter(LongFilter):
    """K = (k_0, .., k_{N-1}) / Z, k_i = alpha^i Upsample(w_i), cut to `length` taps, and D more in the first.

    Args:
        channels: how many.
        length: taps.
        d_kernel: d, numbers of each scale.
        alpha: decay of the first and of the last channel.
        alpha_spacing: whether alpha ("linear") or 1 / alpha ("inverse") is evenly spaced in between.
        upsampling: "linear" or "nearest".
    """

    def __init__(
        self,
        channels: int,
        length: int,
        *,
        d_kernel: int,
        alpha: tuple[float, float],
        alpha_spacing: AlphaSpacing,
        upsampling: Upsampling,
    ) -> None:
        super().__init__(channels, length)
        at_least(1, d_kernel=d_kernel)
        require(
            0 < min(alpha) <= max(alpha) <= 1,
            f"`alpha` must be decays above 0 and at most 1, of the first and the last channel; got {alpha}.",
        )
        self.alpha, self.alpha_spacing, self.upsampling = alpha, alpha_spacing, upsampling
        scales = 1 + max(0, math.ceil(math.log2(length / d_kernel)))
        self.w = nn.Parameter(torch.randn(scales, channels, d_kernel))
        mark(self, "w", group="transition", weight_decay=True)
        self.D = nn.Parameter(torch.randn(channels))
        self.register_buffer("Z", self._scales(length).detach().norm(dim=1, keepdim=True))

    def taps(self, length: int, *, device: torch.device | None = None) -> Float[Tensor, "d length"]:
        """Return the first taps of K, with D."""
        K = self._scales(length)[:, :length].to(device)
        K = K / self.get_buffer("Z").to(K.dtype)
        return torch.cat([K[:, :1] + self.D.to(K.dtype)[:, None], K[:, 1:]], 1)

    def _scales(self, length: int) -> Float[Tensor, "d taps"]:
        """Return (k_0, k_1, ..), so many scales that there are at least `length` taps."""
        w = self.w.to(self.state_dtype)
        first, last = self.alpha if self.alpha_spacing == "linear" else (1 / a for a in self.alpha)
        alpha = torch.linspace(first, last, self.channels, dtype=w.dtype, device=w.device)[:, None]
        if self.alpha_spacing == "inverse":
            alpha = 1 / alpha
        parts: list[Tensor] = []
        for i, scale in enumerate(w):
            factor = 2 ** max(i - 1, 0)
            # all earlier scales together have as many taps as this scale
            if i > 0 and factor * scale.shape[1] >= length:
                break
            long = functional.interpolate(scale[None], scale_factor=float(factor), mode=self.upsampling)[0]
            parts.append(alpha**i * long)
        return torch.cat(parts, 1)


class SGConv(Mixer):
    """y = K * u + D u with a kernel of scales that double in length and fade, then GELU and a projection.

    Kernels have `length` taps: choose the length of the sequences in training. Longer sequences run, too, and
    no step sees further back than `length` - 1 steps. The state is the last `length` - 1 inputs.

    The released code multiplies k_i by (1 / alpha)^(N - 1 - i) in place of alpha^i. After the division by Z,
    both are the same. Its arguments `decay_min` and `decay_max` are 1 / alpha of the first and of the last
    channel.

    w and D start normal with variance 1. w is marked as group "transition", as the authors train it with a
    learning rate of its own.

    Args:
        d_model: width of the sequence, and channels.
        length: taps of the kernels.
        d_kernel: d, numbers of each scale.
        alpha: decay from scale to scale, of the first and of the last channel.
        alpha_spacing: "linear" spaces alpha evenly over the channels in between; "inverse" spaces 1 / alpha
            evenly, as the released code does.
        upsampling: "linear" or "nearest".
        activation: whether y goes through GELU.
        output: "linear", "glu" or "none", the map that mixes the channels at the end.

    Raises:
        ValueError: an unknown name, a number below 1, or decays that are not above 0 and at most 1.

    Source:
        SGConv (Li and others, 2022), its definition of the kernel; the layer around it is S4's (Gu, Goel and
        Ré, 2022).

    Example:
        >>> mixer = SGConv(16, length=256)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, mixer.filter.w.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 50, 16]), torch.Size([3, 16, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        length: int = 1024,
        d_kernel: int = 64,
        alpha: tuple[float, float] = (0.5, 0.5),
        alpha_spacing: AlphaSpacing = "linear",
        upsampling: Upsampling = "linear",
        activation: bool = True,
        output: Output = "linear",
    ) -> None:
        super().__init__(d_model)
        self.filter: Filter = MultiScaleFilter(
            d_model,
            length,
            d_kernel=d_kernel,
            alpha=alpha,
            alpha_spacing=alpha_spacing,
            upsampling=upsampling,
        )
        self.out = PositionWise(d_model, output=output, activation=activation)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and the last inputs (b, s, d_model)."""
        y, state = self.filter(x, state, reset=reset)
        return self.out(y), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return no inputs, (batch, 0, d_model); of a distilled layer, modes of zero."""
        return self.filter.init_state(batch, **self.factory_kwargs(device))

    @property
    def state_size(self) -> int:
        """Elements per step that is kept, d_model; of a distilled layer, elements of its modes."""
        return self.filter.state_size

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of |K_(n - m)|, with D."""
        return kernel_mixing(self.filter.kernel(x.shape[1]), x, reset)
