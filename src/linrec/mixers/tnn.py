"""TNN: Toeplitz Neural Network for Sequence Modeling (Qin and others, 2023), its gated Toeplitz unit.

    u = SiLU(x W_u + b_u)     v = SiLU(x W_v + b_v)
    y_n = sum_{m <= n} t_{n-m} * v_m     t_i = lambda^i RPE(i)
    o = (u * y) W_o + b_o
    RPE(i) = z_r     z_{j+1} = W_j relu(norm(z_j)) + b_j     z_1 = w_0 i + b_0

x input, u gate, v value, y output of the Toeplitz matrices, which are lower triangular, one for each channel,
o output of the layer; lambda the exponential decay, RPE the relative position encoder, a network of the
distance i, norm a division by the root of the mean square plus 1e-8, the released code's.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.long_filters import Filter, LongFilter
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import tensor_options
from linrec.ops.core.precision import without_autocast
from linrec.ops.inspection import kernel_mixing
from linrec.rules import COUNT, at_least, require

__all__ = ["TNN", "RelativePositionFilter"]

# taps end where their decay falls below this number
NOTHING = 1e-8
# of the released code
EPS = 1e-8


class RelativePositionFilter(LongFilter):
    """t_i = lambda^i RPE(i): taps that a network makes of their distance.

    Args:
        channels: how many.
        length: taps; None keeps all taps until lambda^i is below 1e-8.
        decay: lambda, above 0 and at most 1.
        width: of the network.
        depth: its layers between the first and the last.
    """

    def __init__(self, channels: int, length: int | None, *, decay: float, width: int, depth: int) -> None:
        require(
            0 < decay < 1 or (decay == 1 and length is not None),
            f"`decay` must be above 0 and at most 1, and below 1 without a `length`; got {decay} and "
            f"{length}. Without decay, pass the `length` of training's sequences.",
        )
        if length is None:
            length = math.ceil(math.log(NOTHING) / math.log(decay))
        super().__init__(channels, length, decay=decay)
        at_least(1, d_position=width)
        at_least(0, most=COUNT, position_depth=depth)
        self.inputs = nn.Linear(1, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, channels)
        self.keep_float32("inputs", "layers", "out")

    def taps(self, length: int, *, device: torch.device | None = None) -> Float[Tensor, "d length"]:
        """Return the first taps t_0, t_1, .."""
        like = tensor_options(self, device)
        with without_autocast(like["device"].type):
            i = torch.arange(length, **like | {"dtype": self.state_dtype})
            z = self.inputs(i[:, None])
            for layer in (*self.layers, self.out):
                rms = torch.linalg.vector_norm(z, dim=-1, keepdim=True) / z.shape[-1] ** 0.5
                z = layer(functional.relu(z / (rms + EPS)))
            assert self.decay is not None
            return (self.decay ** i[:, None] * z).mT


class TNN(Mixer):
    """y_n = sum_{m <= n} lambda^(n-m) RPE(n - m) * v_m, gated: attention by distance alone.

    A network makes the taps of all channels of their distances. They fade with lambda. Without a `length`, a
    filter has all taps whose decay is at least 1e-8, 1,833 taps with lambda = 0.99. Sequences of any length
    run. The state is the last inputs of the filter. `linrec.lab.distillation` turns a trained layer into
    a recurrence; with `method="exact"` and the `length` of training's sequences, by the conversion of the
    paper's second part.

    Linear layers start as torch's own. The paper's ablations are arguments: `decay=1` disables the decay, and
    `position_depth` and `d_position` size the encoder.

    Args:
        d_model: width of the sequence.
        expansion: channels of u, v and y, as a multiple of d_model.
        length: the largest number of taps; None keeps all taps until they are below 1e-8.
        decay: lambda.
        d_position: width of the relative position encoder.
        position_depth: its layers between the first and the last. The authors' language models have 6.
        bias: whether the projections have biases.

    Raises:
        ValueError: a number below 1, or a `decay` out of range.

    Source:
        TNN (Qin and others, 2023), its sections on the gated Toeplitz unit, the relative position encoder and
        the exponential decay bias; sizes come from the authors' code.

    Example:
        >>> mixer = TNN(16)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, mixer.filter.length
        (torch.Size([2, 50, 16]), torch.Size([2, 50, 48]), 1833)
    """

    def __init__(
        self,
        d_model: int,
        *,
        expansion: int = 3,
        length: int | None = None,
        decay: float = 0.99,
        d_position: int = 64,
        position_depth: int = 3,
        bias: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, expansion=expansion)
        width = expansion * d_model
        self.u = nn.Linear(d_model, width, bias=bias)
        self.v = nn.Linear(d_model, width, bias=bias)
        self.filter: Filter = RelativePositionFilter(
            width, length, decay=decay, width=d_position, depth=position_depth
        )
        self.out = nn.Linear(width, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and the last v (b, s, expansion d_model)."""
        u, v = functional.silu(self.u(x)), functional.silu(self.v(x))
        y, state = self.filter(v, state, reset=reset)
        return self.out(u * y), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return no inputs, (batch, 0, expansion d_model); of a distilled layer, modes of zero."""
        return self.filter.init_state(batch, **self.factory_kwargs(device))

    @property
    def state_size(self) -> int:
        """Elements per step that is kept, expansion d_model; of a distilled layer, elements of its modes."""
        return self.filter.state_size

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of |t_(n - m)|, before the gate."""
        return kernel_mixing(self.filter.kernel(x.shape[1]), x, reset)
