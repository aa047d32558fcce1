"""Elman network: Finding Structure in Time (Elman, 1990).

    h_t = (1 - leak) h_{t-1} + leak sigma(W x_t + b + U h_{t-1} + c)

x is the input, t time, h the hidden state and output, sigma an activation, and b and c torch's two biases.
Elman's network has leak 1.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.torch_rnn import RNNWeights, run_torch_rnn
from linrec.rules import at_least, positive, require

__all__ = ["Elman"]

Activation = Literal["tanh", "relu"]
Init = Literal["torch", "identity", "orthogonal", "reservoir", "limit_cycle"]
# spectral radius of U
RADIUS = {"orthogonal": 1.0, "reservoir": 0.9, "limit_cycle": 1.1}


class Elman(NonlinearMixer):
    """h_t = (1 - leak) h_{t-1} + leak sigma(W x_t + b + U h_{t-1} + c): the simple recurrent network.

    The parameters `rnn` are those of torch.nn.RNN, whose weights load. In mode "auto", calls on CUDA without
    resets run cuDNN where it takes the call; see `linrec.nn.torch_rnn`. Elman's own network had logistic
    units, which torch's layer lacks.

    `activation="relu", init="identity"` is IRNN of Le, Jaitly and Hinton: U starts at the identity, the
    biases at zero, and W at Gaussian values of standard deviation 0.001. The mixer `irnn` is another network,
    the iRNN of Kag, Zhang and Saligrama.

    Args:
        d_model: width of the sequence and of the state.
        activation: "tanh" or "relu".
        init: start of the parameters, of the table.
        leak: share of the new state, in (0, 1].
        radius: spectral radius of U; None is 1 for "orthogonal", 0.9 for "reservoir", 1.1 for "limit_cycle".
        density: share of nonzero entries in each row of a reservoir's U; at least one entry.
        longest: longest period of the limit cycles in steps; the periods are spaced evenly in their
            logarithm.
        mode: mode of `linrec.ops.nonlinear_scan`, or "auto".

    Raises:
        ValueError: an unknown `activation`, `init` or `mode`, a number out of range, limit cycles of an odd
            `d_model`, or `radius` for an `init` that has none.

    Source:
        Elman, Finding Structure in Time (1990), in the form of torch.nn.RNN; Le, Jaitly and Hinton, A Simple
        Way to Initialize Recurrent Networks of Rectified Linear Units (2015); Jaeger, The "Echo State"
        Approach (2001); Park, Sagodi and Sokol, Persistent Learning Signals and Working Memory without
        Continuous Attractors (2023).

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
        leak: float = 1.0,
        radius: float | None = None,
        density: float = 0.1,
        longest: float = 100.0,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        positive(leak=leak, density=density)
        require(leak <= 1 and density <= 1, f"`leak` and `density` must be at most 1; got {leak}, {density}.")
        positive(radius=radius, or_none=True)
        require(radius is None or init in RADIUS, f"`radius` needs `init` of {[*RADIUS]}; got {init!r}.")
        at_least(4, longest=longest)
        self.sigma, self.leak = ACTIVATIONS[activation], leak

        self.rnn = RNNWeights(f"RNN_{activation.upper()}", d_model)
        W, U, b, c = self.rnn.parameters()
        scale = RADIUS.get(init, 1.0) if radius is None else radius
        if init in ("identity", "limit_cycle"):
            nn.init.normal_(W, std=0.001 if init == "identity" else 0.1 / d_model**0.5)
            nn.init.zeros_(b)
            nn.init.zeros_(c)
        with torch.no_grad():
            if init == "identity":
                nn.init.eye_(U)
            elif init == "orthogonal":
                nn.init.orthogonal_(U).mul_(scale)
            elif init == "reservoir":
                U.copy_(_sparse(d_model, density))
                U.mul_(scale / torch.linalg.eigvals(U).abs().max())
            elif init == "limit_cycle":
                require(d_model % 2 == 0, f"`d_model` must be even for limit cycles; got {d_model}.")
                U.copy_(scale * _turning(d_model // 2, longest))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        # on the CPU the loop is as fast: a step is one product
        start = self.started(x, state)
        return run_torch_rnn(
            self.rnn, self._cell, x, start, reset, self.mode, fused=x.is_cuda and self.leak == 1
        )

    def _cell(self, h: Tensor, Wx: Tensor, U: Tensor, c: Tensor) -> Tensor:
        """Return h_t."""
        new = self.sigma(Wx + functional.linear(h, U, c))
        return new if self.leak == 1 else (1 - self.leak) * h + self.leak * new


def _sparse(n: int, density: float) -> Tensor:
    """Return Gaussian numbers (n, n) with as many nonzero entries in each row."""
    kept = torch.rand(n, n).argsort(1) < max(1, round(density * n))
    return torch.randn(n, n) * kept


def _turning(pairs: int, longest: float) -> Tensor:
    """Return a matrix that turns pairs of channels, a turn in 4 to `longest` steps."""
    theta = 2 * math.pi / torch.logspace(math.log10(4), math.log10(longest), pairs)
    cos, sin = theta.cos(), theta.sin()
    return torch.block_diag(*torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2))
