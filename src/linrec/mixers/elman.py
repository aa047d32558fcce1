"""Elman network: Finding Structure in Time (Elman, 1990).

    h_t = sigma(W x_t + b + U h_{t-1} + c)

x is the input, t time, h the hidden state and output, sigma an activation, and b and c torch's two biases.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.torch_rnn import RNNWeights, run_torch_rnn

__all__ = ["Elman"]

Activation = Literal["tanh", "relu"]
Init = Literal["torch", "identity", "orthogonal"]


class Elman(NonlinearMixer):
    """h_t = sigma(W x_t + b + U h_{t-1} + c): the simple recurrent network.

    The parameters `rnn` are those of torch.nn.RNN, whose weights load. In mode "auto", calls on CUDA without
    resets run cuDNN where it takes the call; see `linrec.nn.torch_rnn`. Elman's own network had logistic
    units, which torch's layer lacks.

    `activation="relu", init="identity"` is IRNN of Le, Jaitly and Hinton: U starts at the identity, the
    biases at zero, and W at Gaussian values of standard deviation 0.001. The mixer `irnn` is another network,
    the iRNN of Kag, Zhang and Saligrama.

    Args:
        d_model: width of the sequence and of the state.
        activation: "tanh" or "relu".
        init: "torch", where all parameters are uniform in +- 1 / sqrt(d_model); "identity"; or "orthogonal",
            where U is a random orthogonal matrix.
        mode: mode of `linrec.ops.nonlinear_scan`, or "auto".

    Raises:
        ValueError: an unknown `activation`, `init` or `mode`.

    Source:
        Elman, Finding Structure in Time (1990), in the form of torch.nn.RNN; Le, Jaitly and Hinton, A Simple
        Way to Initialize Recurrent Networks of Rectified Linear Units (2015).

    Example:
        >>> import torch
        >>> mixer = Elman(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        activation: Activation = "tanh",
        init: Init = "torch",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        self.sigma = ACTIVATIONS[activation]

        self.rnn = RNNWeights(f"RNN_{activation.upper()}", d_model)
        W, U, b, c = self.rnn.parameters()
        if init == "identity":
            nn.init.normal_(W, std=0.001)
            nn.init.eye_(U)
            nn.init.zeros_(b)
            nn.init.zeros_(c)
        elif init == "orthogonal":
            nn.init.orthogonal_(U)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        # on the CPU the loop is as fast: a step is one product
        start = self.started(x, state)
        return run_torch_rnn(self.rnn, self._cell, x, start, reset, self.mode, fused=x.is_cuda)

    def _cell(self, h: Tensor, Wx: Tensor, U: Tensor, c: Tensor) -> Tensor:
        """Return h_t."""
        return self.sigma(Wx + functional.linear(h, U, c))
