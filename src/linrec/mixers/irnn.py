"""iRNN: incremental recurrent network on an equilibrium manifold (Kag, Zhang and Saligrama, 2020).

    g_0 = 0
    g_i = g_{i-1} + eta_i (phi(U (g_{i-1} + h_{t-1}) + W x_t + b) - alpha (g_{i-1} + h_{t-1}))    i = 1..K
    h_t = g_K

x is the input, t time, h the hidden state and output, g the increment, eta_i the learned length of inner step
i, phi an activation, and alpha a decay. At the equilibrium, h_t + h_{t-1} depends on x_t alone, so the
Jacobian of h_t by h_{t-1} is -I: gradients neither vanish nor explode.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.nn.projections import matrix
from linrec.rules import COUNT, at_least, positive

__all__ = ["IncrementalRNN"]

Activation = Literal["relu", "tanh"]


class IncrementalRNN(NonlinearMixer):
    """h_t = g_K, K Euler steps of g' = phi(U (g + h_{t-1}) + W x_t + b) - alpha (g + h_{t-1}) from g = 0.

    IRNN, the network of rectified linear units that starts at the identity (Le, Jaitly and Hinton, 2015), is
    another network: `elman(activation="relu", init="identity")`.

    W and U start at Gaussian values of standard deviation `std`, and b at zero, as in the authors' code of a
    later model, since the paper's code was not released. eta is marked as group "transition" without weight
    decay.

    Args:
        d_model: width of the sequence and of the state.
        n_steps: inner steps K.
        activation: phi, "relu" or "tanh".
        alpha: decay of the ordinary differential equation.
        eta_init: initial length of all inner steps; None means 1 / K.
        std: standard deviation of the initial W and U.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: an unknown activation or mode, or a number is out of range.

    Source:
        Kag, Zhang and Saligrama, RNNs Incrementally Evolving on an Equilibrium Manifold: A Panacea for
        Vanishing and Exploding Gradients? (2020). The initial eta is not the paper's.

    Example:
        >>> mixer = IncrementalRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_steps: int = 5,
        activation: Activation = "relu",
        alpha: float = 1.0,
        eta_init: float | None = None,
        std: float = 0.1,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        at_least(1, most=COUNT, n_steps=n_steps)
        at_least(0, alpha=alpha, std=std)
        positive(eta_init=eta_init, or_none=True)
        self.phi, self.alpha = ACTIVATIONS[activation], alpha

        self.W = nn.Linear(d_model, d_model)
        self.U = nn.Linear(d_model, d_model, bias=False)
        nn.init.normal_(self.W.weight, std=std)
        nn.init.normal_(self.U.weight, std=std)
        nn.init.zeros_(self.W.bias)
        self.eta = nn.Parameter(torch.full((n_steps,), 1 / n_steps if eta_init is None else eta_init))
        mark(self, "eta", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        # clones, because an exported loop refuses parameters that share memory
        parameters = matrix(self.U, self.d_model, x.device), *(eta_i.clone() for eta_i in self.eta)
        return self.nonlinear_scan(self._cell, self.W(x), parameters, state=state, reset=reset)

    def _cell(self, h: Tensor, Wx: Tensor, U: Tensor, *eta: Tensor) -> Tensor:
        """Return h_t."""
        g = torch.zeros_like(h)
        for eta_i in eta:
            g = g + eta_i * (self.phi(functional.linear(g + h, U) + Wx) - self.alpha * (g + h))
        return g
