"""Wave-RNN (Keller, Muller, Sejnowski and Welling, 2024).

    h_t = act(V x_t + u @ h_{t-1} + b)

x is the input, t time, h the hidden state and output: channels of units on a ring. @ is the circular
convolution over the units, from all channels to all channels, and act an activation. u starts as a shift by
one unit, and V writes to one unit of each channel: an input travels around the ring as a wave.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import tensor_options
from linrec.nn.projections import readable
from linrec.rules import divisor, require

__all__ = ["WaveRNN"]

Activation = Literal["relu", "tanh", "identity"]
Init = Literal["wave", "identity", "random"]
InputInit = Literal["source", "normal"]


class WaveRNN(NonlinearMixer):
    """h_t = act(V x_t + u @ h_{t-1} + b): a circular convolution carries the past around a ring of units.

    | task of the paper | arguments |
    |---|---|
    | copy, 600 channels | `n_channels=6` |
    | adding, 2700 channels | `n_channels=27` |
    | permuted sequential MNIST, 4096 channels | `n_channels=16` |
    | noisy CIFAR-10, 2304 or 4096 channels | `n_channels=16` |
    | sequential MNIST, 5408 or 10368 channels | `n_channels=32` |

    The settings are in the released code.

    Args:
        d_model: width of the sequence and of h, n_channels times the units of a ring.
        n_channels: rings.
        kernel_size: units that the convolution sees, an odd number from 3 on.
        activation: "relu", "tanh" or "identity".
        init: of u, "wave" for a shift by one unit, "identity", or "random" as in torch's Conv1d. The biases
            are those of torch's Conv1d in all cases.
        input_init: of V, "source" for ones to the first unit of each ring and zeros elsewhere, or "normal"
            with standard deviation 0.001.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: sizes do not fit, or the name of an option or the mode does not exist.

    Source:
        Keller and others, Traveling Waves Encode the Recent Past and Enhance Sequence Learning (2024), and
        the released code.

    Example:
        >>> mixer = WaveRNN(64, n_channels=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_channels: int = 1,
        kernel_size: int = 3,
        activation: Activation = "relu",
        init: Init = "wave",
        input_init: InputInit = "source",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        divisor("d_model", d_model, n_channels=n_channels)
        units = d_model // n_channels
        require(
            kernel_size % 2 == 1 and 3 <= kernel_size <= 2 * units + 1,
            f"`kernel_size` must be odd, from 3 to {2 * units + 1}, to have neighbours; got {kernel_size}.",
        )
        self.n_channels, self.activation = n_channels, activation
        self.kernel_size = kernel_size

        self.V = nn.Linear(d_model, d_model)
        self.u = nn.Conv1d(n_channels, n_channels, kernel_size)
        if input_init == "source":
            nn.init.zeros_(self.V.bias)
            nn.init.zeros_(self.V.weight)
            nn.init.ones_(self.V.weight[::units])
        else:
            nn.init.normal_(self.V.weight, std=0.001)
        if init != "random":
            nn.init.dirac_(self.u.weight)
        if init == "wave":
            self.u.weight.data = self.u.weight.data.roll(1, -1)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        weights = self._kernel(x.device)
        return self.nonlinear_scan(self._cell, self.V(x), weights, state=state, reset=reset)

    def _cell(self, h: Tensor, Vx: Tensor, u: Tensor, b: Tensor) -> Tensor:
        """Return h_t."""
        margin = u.shape[-1] // 2
        rings = pad(h.unflatten(-1, (self.n_channels, -1)), (margin, margin), mode="circular")
        h = Vx + conv1d(rings, u, b).flatten(-2)
        if self.activation == "identity":
            return h
        return torch.relu(h) if self.activation == "relu" else torch.tanh(h)

    def _kernel(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return u and b; of outputs for impulses, where a call is more than the convolution by u."""
        if readable(nn.Conv1d, self.u):
            weight, bias = self.u.parameters()
            return weight, bias
        n, margin = self.n_channels, self.kernel_size - 1
        impulses = torch.eye(n + 1, n, **tensor_options(self.u, device))[..., None]
        y = self.u(pad(impulses, (margin, margin)))
        return (y[:-1] - y[-1]).movedim(0, 1).flip(-1), y[-1, :, 0]
