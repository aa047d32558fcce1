"""Jordan network: Serial Order: A Parallel Distributed Processing Approach (Jordan, 1986).

    s_t = mu s_{t-1} + y_{t-1}
    h_t = sigma(W x_t + U s_t + b)
    y_t = sigma_y(C h_t + c)

x is the input, t time, s the state units, which are as many as outputs, mu their connection to themselves, h
the hidden units, y the output, and sigma and sigma_y activations. The past reaches a step through outputs
alone, where that of an Elman network reaches it through hidden units.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.projections import affine_map, matrix
from linrec.rules import at_least, require

__all__ = ["Jordan"]

Activation = Literal["tanh", "sigmoid"]


class Jordan(NonlinearMixer):
    """h_t = sigma(W x_t + U s_t + b), y_t = sigma_y(C h_t + c): outputs are fed back, and not hidden units.

    s_t is the sum of all earlier outputs, weighed by mu to the power of their age. mu = 0 is the network of
    textbooks, s_t = y_{t-1}. Both sigmas are logistic in the paper, whose plans are constant inputs.

    All parameters start as in torch's Linear; the paper has no initial values.

    Args:
        d_model: width of the sequence, of y and of s.
        d_hidden: width of h; None is `d_model`.
        mu: connection of a state unit to itself, in [0, 1).
        activation: sigma, "tanh" or "sigmoid".
        output_activation: sigma_y, "tanh" or "sigmoid".
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `d_hidden` is below 1, `mu` is out of [0, 1), or an activation or the mode does not exist.

    Source:
        Jordan, Serial Order: A Parallel Distributed Processing Approach (1986).

    Example:
        >>> mixer = Jordan(64, mu=0.5)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_hidden: int | None = None,
        mu: float = 0.0,
        activation: Activation = "tanh",
        output_activation: Activation = "tanh",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, 2 * d_model)
        at_least(1, d_hidden=d_hidden, or_none=True, cure="None is `d_model`.")
        require(0 <= mu < 1, f"`mu` must be in [0, 1); got {mu}. With 0, a step sees the last output alone.")
        self.d_hidden = d_model if d_hidden is None else d_hidden
        self.mu, self.sigma, self.sigma_y = mu, ACTIVATIONS[activation], ACTIVATIONS[output_activation]

        self.W = nn.Linear(d_model, self.d_hidden)
        self.U = nn.Linear(d_model, self.d_hidden, bias=False)
        self.C = nn.Linear(self.d_hidden, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y of every step, and the last y and s, joined (b, 2 d_model)."""
        U, output = matrix(self.U, self.d_model, x.device), affine_map(self.C, self.d_hidden, x.device)
        ys, state = self.nonlinear_scan(self._cell, self.W(x), (U, *output), state=state, reset=reset)
        return ys[..., : self.d_model], state

    def _cell(self, ys: Tensor, Wx: Tensor, U: Tensor, C: Tensor, c: Tensor) -> Tensor:
        """Return y_t and s_t, joined."""
        y, s = ys.chunk(2, -1)
        s = self.mu * s + y
        h = self.sigma(Wx + functional.linear(s, U))
        return torch.cat([self.sigma_y(functional.linear(h, C, c)), s], -1)
