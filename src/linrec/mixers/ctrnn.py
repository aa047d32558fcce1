"""CTRNN: continuous-time recurrent neural network (Funahashi and Nakamura, 1993; Beer, 1995).

    tau_i dh_i/dt = -h_i + sigma(sum_j W_ij h_j + sum_j U_ij x_j + b_i)                variant="rate"
    tau_i dv_i/dt = -v_i + sum_j W_ij sigma(v_j) + sum_j U_ij x_j + b_i                variant="potential"
    y = h,  or  y = sigma(v)

x is the input, t time, tau the time constants of the neurons, sigma an activation, and y the output. The
state is h, the rates of the neurons, or v, their potentials; y are rates in both forms. The input holds
during a step.
Beer writes sigma(v_j + b_j); v + b is the state here.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import Fixed, NonlinearMixer, beside_times, solve
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.nn.projections import matrix
from linrec.rules import COUNT, at_least, positive

__all__ = ["CTRNN"]

Activation = Literal["tanh", "sigmoid"]
Variant = Literal["rate", "potential"]


class CTRNN(NonlinearMixer):
    """tau h' = -h + sigma(W h + U x_t + b): neurons that follow their inputs at their own speeds.

    With irregular steps, `dt` is the time that the equation runs. Without them, it is 1. With tau = 1, one
    step of Euler's method for a `dt` of 1 is an Elman network.

    The two forms are one system, v = W h + U x + b, if all tau are equal and x is constant. Euler's method is
    stable while `dt` / `n_steps` is below 2 tau. W, U and b start as in torch's Linear. tau is exp of a
    parameter, marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence, and number of neurons.
        variant: "rate", where sigma is taken of the sum, or "potential", where the sum is of sigma.
        activation: sigma, "tanh" or "sigmoid".
        tau: time constant of all neurons when training starts, in the unit of `dt`.
        learn_tau: whether each neuron learns its tau.
        solver: "euler", "midpoint" or "rk4"; see `linrec.nn.cells.solve`.
        n_steps: steps of the solver for each `dt`.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `tau` is not positive, `n_steps` is below 1, or a name does not exist.

    Source:
        Funahashi and Nakamura, Approximation of Dynamical Systems by Continuous Time Recurrent Neural
        Networks (1993); Beer, On the Dynamics of Small Continuous-Time Recurrent Neural Networks (1995), for
        "potential". The form of "rate" is equation 3 of Tiezzi, Casoni, Betti, Gori and Melacci, State-Space
        Modeling in Long Sequence Processing (2024).

    Example:
        >>> mixer = CTRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64), dt=torch.rand(2, 10))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        variant: Variant = "rate",
        activation: Activation = "tanh",
        tau: float = 1.0,
        learn_tau: bool = True,
        solver: Fixed = "euler",
        n_steps: int = 6,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        positive(tau=tau)
        at_least(1, most=COUNT, n_steps=n_steps)
        self.variant, self.sigma = variant, ACTIVATIONS[activation]
        self.solver: Fixed = solver
        self.n_steps = n_steps

        self.U = nn.Linear(d_model, d_model)
        self.W = nn.Linear(d_model, d_model, bias=False)
        self.log_tau = nn.Parameter(torch.full((d_model,), tau).log(), requires_grad=learn_tau)
        mark(self, "log_tau", float32=True)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return y of every step, and the last h or v (b, d_model)."""
        parameters = matrix(self.W, self.d_model, x.device), self.log_tau.exp()
        inputs = beside_times(self.U(x), dt)
        h, state = self.nonlinear_scan(self._cell, inputs, parameters, state=state, reset=reset)
        y = h if self.variant == "rate" else self.sigma(h)
        return y.to(x.dtype), state

    def _cell(self, h: Tensor, inputs: Tensor, W: Tensor, tau: Tensor) -> Tensor:
        """Return h or v after the time of a step."""
        Ux, dt = inputs[..., :-1], inputs[..., -1:]

        def slope(h: Tensor) -> Tensor:
            if self.variant == "rate":
                return (self.sigma(functional.linear(h, W) + Ux) - h) / tau
            return (functional.linear(self.sigma(h), W) + Ux - h) / tau

        return solve(slope, h, dt, self.solver, n_steps=self.n_steps)
