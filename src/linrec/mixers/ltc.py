"""LTC: Liquid Time-constant Networks (Hasani, Lechner, Amini, Rus and Grosu, 2021).

    c_i dv_i/dt = g_i (L_i - v_i) + sum_j w_ij s_ij(v_j) (E_ij - v_i) + sum_j w'_ij s'_ij(x_j) (E'_ij - v_i)
    s_ij(v) = sigmoid(sigma_ij (v - mu_ij)), and s' in the same way

x is the input, and v the potentials of the neurons, which are state and output. c are their capacities, g
and L the conductances and potentials of their leaks. w is the conductance of the synapse from neuron j to
neuron i, which opens around mu with steepness sigma and pulls v_i towards E. Primes mark the synapses from
the inputs. A step of dt is K fused steps of the length D = dt / K:

    v_i <- (c_i v_i + D (g_i L_i + sum w s E + sum w' s' E')) / (c_i + D (g_i + sum w s + sum w' s'))
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.cells import NonlinearMixer, beside_times
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.rules import COUNT, at_least

__all__ = ["LTC"]

EPSILON = 1e-8
"""Conductance that the released code adds to the denominator."""


class LTC(NonlinearMixer):
    """c_i dv_i/dt = g_i (L_i - v_i) + synapses: neurons whose time constants depend on their inputs.

    The fused steps are implicit in v_i and explicit in the synapses, so they are stable for every dt.

    With irregular steps, `dt` is the time that the equation runs, in K steps. Without them, it is 1.

    Inputs and outputs have a scale and an offset for each channel, and all neurons are connected. The sparse
    wirings of neural circuit policies are not here. c, g and w are softplus of the parameters. As in the
    released code, these parameters start uniform, c in [0.4, 0.6], g and w in [0.001, 1]. L is uniform in
    [-0.2, 0.2], sigma in [3, 8] and mu in [0.3, 0.8]. E is 1 for two thirds of the synapses, and -1 for the
    others. No parameter has weight decay.

    Each of the K steps takes d_model^2 numbers for each row.

    Args:
        d_model: width of the sequence, and number of neurons.
        n_steps: fused steps K of each step.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `n_steps` is below 1, or the mode does not exist.

    Source:
        Hasani and others, Liquid Time-constant Networks (2021), with the model of synapses of appendix 2; and
        the released code, ncps.

    Example:
        >>> mixer = LTC(16)
        >>> y, state = mixer(torch.zeros(2, 10, 16), dt=torch.rand(2, 10))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 16]))
    """

    takes_dt = True

    def __init__(self, d_model: int, *, n_steps: int = 6, mode: str = "auto") -> None:
        super().__init__(d_model, mode)
        at_least(1, most=COUNT, n_steps=n_steps)
        self.n_steps = n_steps

        self.c = nn.Parameter(torch.empty(d_model).uniform_(0.4, 0.6))
        self.g = nn.Parameter(torch.empty(d_model).uniform_(0.001, 1))
        self.L = nn.Parameter(torch.empty(d_model).uniform_(-0.2, 0.2))
        # the synapses from neurons, then the synapses from inputs: entry (j, i) is of the synapse from j to i
        synapses = 2, d_model, d_model
        self.w = nn.Parameter(torch.empty(synapses).uniform_(0.001, 1))
        self.sigma = nn.Parameter(torch.empty(synapses).uniform_(3, 8))
        self.mu = nn.Parameter(torch.empty(synapses).uniform_(0.3, 0.8))
        self.E = nn.Parameter(1 - 2 * (torch.rand(synapses) < 1 / 3).to(torch.get_default_dtype()))
        # scales and offsets of inputs and outputs
        self.scale = nn.Parameter(torch.ones(2, d_model))
        self.offset = nn.Parameter(torch.zeros(2, d_model))
        mark(self, "c", "g", "L", "w", "sigma", "mu", "E", "scale", "offset", group="channel")

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return outputs of every step, and the last v (b, d_model)."""
        c, g, w = map(functional.softplus, (self.c, self.g, self.w))
        parameters = c, g, self.L, w, self.sigma, self.mu, self.E
        inputs = beside_times(self.scale[0] * x + self.offset[0], dt)
        v, state = self.nonlinear_scan(self._cell, inputs, parameters, state=state, reset=reset)
        return (self.scale[1] * v + self.offset[1]).to(x.dtype), state

    def _cell(
        self,
        v: Tensor,
        inputs: Tensor,
        c: Tensor,
        g: Tensor,
        L: Tensor,
        w: Tensor,
        sigma: Tensor,
        mu: Tensor,
        E: Tensor,
    ) -> Tensor:
        """Return v after K fused steps."""
        x, D = inputs[..., :-1], inputs[..., -1:] / self.n_steps

        def synapses(v: Tensor, kind: int) -> tuple[Tensor, Tensor]:
            """Return the sums over j of w s E and of w s."""
            ws = w[kind] * torch.sigmoid(sigma[kind] * (v[..., None] - mu[kind]))
            return (ws * E[kind]).sum(-2), ws.sum(-2)

        pull_x, open_x = synapses(x, 1)
        for _ in range(self.n_steps):
            pull, opened = synapses(v, 0)
            v = (c * v + D * (g * L + pull + pull_x)) / (c + D * (g + opened + open_x + EPSILON))
        return v
