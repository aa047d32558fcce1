"""The channel mixing of RWKV, which sees the input of the step before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import orthogonal_linear
from linrec.nn.rwkv_start import Place, ramp
from linrec.nn.token_shift import TokenShift
from linrec.rules import at_least

__all__ = ["RWKVChannelMixing"]


class RWKVChannelMixing(Mixer):
    """y_t = sigmoid(r_t) * (W_v ReLU(k_t)^2), of mixtures of the current and the last token.

        r_t = W_r (x_t + (x_{t-1} - x_t) * mu_r)
        k_t = W_k (x_t + (x_{t-1} - x_t) * mu_k)

    It is a `Mixer`, since the last input is a state. `linrec.models.Block` takes it like any other channel
    mixing. It is the same in RWKV-4, 5 and 6; mu is 1 - mu of the paper of RWKV-4.

    As in the released code of RWKV-5 and 6, mu_r and mu_k start at 1 - (i/d)^(1 - l/L), for channel i of d
    and layer l of L. W_k starts orthogonal, and W_r and W_v at zero, so that every output is zero at first.
    In the released code of RWKV-4, W_k is sqrt(d_hidden / d_model) times as large. Layers learn their places
    when a model calls `RWKVChannelMixing.share`; a layer that stands alone is the first of one.

    Args:
        d_model: width of input and output.
        d_hidden: width of k; the papers have 4 `d_model` in RWKV-4, 3.5 `d_model` in RWKV-5 and 6.
        token_shift: whether r and k see the input of the step before; without token shift, mu = 0, and there
            is no state.
        receptance: whether the output is multiplied by sigmoid(r).
        zero_init: whether W_r and W_v start at zero; else they are orthogonal too.

    Raises:
        ValueError: a `d_hidden` below 1.

    Source:
        RWKV (Peng and others, 2023), channel mixing; Eagle and Finch (Peng and others, 2024).

    Example:
        >>> import torch
        >>> y, last = RWKVChannelMixing(64, 256)(torch.zeros(2, 10, 64))
        >>> y.shape, last.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        token_shift: bool = True,
        receptance: bool = True,
        zero_init: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_hidden=d_hidden)
        first = 0.0 if zero_init else 1.0
        # of k and r
        self.shift = TokenShift(d_model, 2 if receptance else 1, present=token_shift)
        self.k = orthogonal_linear(d_model, d_hidden)
        self.v = orthogonal_linear(d_hidden, d_model, gain=first)
        self.r = orthogonal_linear(d_model, d_model, gain=first) if receptance else None
        self.share([self])

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last input (b, d_model), or None without token shift."""
        mixed, last = self.shift(x, state, reset=reset)
        y = self.v(torch.relu(self.k(mixed[0])).square())
        return y if self.r is None else torch.sigmoid(self.r(mixed[1])) * y, last

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_model); None without token shift."""
        return self.shift.init_state(batch, **self.factory_kwargs(device))

    @classmethod
    def share(cls, layers: "Sequence[RWKVChannelMixing]") -> None:
        """Start mu of each layer from its place in the stack."""
        for layer, mixer in enumerate(layers):
            place = Place(layer, len(layers))
            mixer.shift.start([1 - ramp(mixer.d_model, place.height)] * mixer.shift.n)
