"""LTC: Liquid Time-constant Networks (Hasani, Lechner, Amini, Rus and Grosu, 2021).

    c_i dv_i/dt = g_i (L_i - v_i) + sum_j w_ij s_ij(v_j) (E_ij - v_i) + sum_j w'_ij s'_ij(x_j) (E'_ij - v_i)
    s_ij(v) = sigmoid(sigma_ij (v - mu_ij)), and s' in the same way

x is the input, and v the potentials of the neurons, which are state and output. c are their capacities, g
and L the conductances and potentials of their leaks. w is the conductance of the synapse from neuron j to
neuron i, which opens around mu with steepness sigma and pulls v_i towards E. Primes mark the synapses from
the inputs. A step of dt is K fused steps of the length D = dt / K:

    v_i <- (c_i v_i + D (g_i L_i + sum w s E + sum w' s' E')) / (c_i + D (g_i + sum w s + sum w' s'))

The general form has a network f > 0, time constants tau and potentials A (the paper's equation 1):

    dv/dt = -(1 / tau + f) * v + f * A,    f = sigmoid(W x + R v + b)                       variant="network"
    v <- (v + D f * A) / (1 + D (1 / tau + f))
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.cells import NonlinearMixer, beside_times, lstm_before, lstm_weights
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.nn.projections import matrix
from linrec.rules import COUNT, at_least

__all__ = ["LTC"]

Variant = Literal["synapses", "network"]

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
    others. No parameter of neurons and synapses has weight decay.

    Each of the K steps takes d_model^2 numbers for each row, and d_model numbers with "network". There, W, R
    and b start as in torch's Linear, tau, exp of a parameter, at 1, and A uniform in [-1, 1]. The survey of
    Tiezzi and others (2024) prints the general form with one matrix in both places of f; this is the paper's.

    Args:
        d_model: width of the sequence, and number of neurons.
        n_steps: fused steps K of each step.
        variant: "synapses", or "network" for the general form.
        mixed_memory: whether an LSTM runs before each step, from which the step starts; the state then has
            2 d_model channels.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `n_steps` is below 1, or a name does not exist.

    Source:
        Hasani and others, Liquid Time-constant Networks (2021), equation 1, and the model of synapses of
        appendix 2; Lechner and Hasani, Learning Long-Term Dependencies in Irregularly-Sampled Time Series
        (2020), for mixed memory; and the released code, ncps.

    Example:
        >>> mixer = LTC(16)
        >>> y, state = mixer(torch.zeros(2, 10, 16), dt=torch.rand(2, 10))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 16]))
    """

    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        n_steps: int = 6,
        variant: Variant = "synapses",
        mixed_memory: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, (2 if mixed_memory else 1) * d_model)
        at_least(1, most=COUNT, n_steps=n_steps)
        self.n_steps, self.variant, self.mixed_memory = n_steps, variant, mixed_memory

        if variant == "synapses":
            self._make_synapses(d_model)
        else:
            self.W = nn.Linear(d_model, d_model)
            self.R = nn.Linear(d_model, d_model, bias=False)
            self.log_tau = nn.Parameter(torch.zeros(d_model))
            self.A = nn.Parameter(torch.empty(d_model).uniform_(-1, 1))
            mark(self, "log_tau", "A", group="channel")
        # scales and offsets of inputs and outputs
        self.scale = nn.Parameter(torch.ones(2, d_model))
        self.offset = nn.Parameter(torch.zeros(2, d_model))
        mark(self, "scale", "offset", group="channel")
        if mixed_memory:
            self.V, self.U = lstm_weights(d_model)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return outputs of every step, and the last v (b, d_model); with a mixed memory, v and m, joined."""
        given = self.scale[0] * x + self.offset[0]
        if self.variant == "synapses":
            c, g, w = map(functional.softplus, (self.c, self.g, self.w))
            parameters = [c, g, self.L, w, self.sigma, self.mu, self.E]
        else:
            given = self.W(given)
            parameters = [matrix(self.R, self.d_model, x.device), self.log_tau.exp(), self.A]
        if self.mixed_memory:
            given = torch.cat([given, self.V(x)], -1)
            parameters = [matrix(self.U, self.d_model, x.device), *parameters]
        inputs = beside_times(given, dt)
        v, state = self.nonlinear_scan(self._cell, inputs, parameters, state=state, reset=reset)
        v = v[..., : self.d_model]
        return (self.scale[1] * v + self.offset[1]).to(x.dtype), state

    def _cell(self, v: Tensor, inputs: Tensor, *parameters: Tensor) -> Tensor:
        """Return v after K fused steps; with a mixed memory, v and m, joined."""
        fused = self._synapses if self.variant == "synapses" else self._network
        x, D = inputs[..., : self.d_model], inputs[..., -1:] / self.n_steps
        if not self.mixed_memory:
            return fused(v, x, D, *parameters)
        v, m = v.chunk(2, -1)
        v, m = lstm_before(v, m, inputs[..., self.d_model : -1], parameters[0])
        return torch.cat([fused(v, x, D, *parameters[1:]), m], -1)

    def _make_synapses(self, d_model: int) -> None:
        """Make the parameters of neurons and synapses."""
        self.c = nn.Parameter(torch.empty(d_model).uniform_(0.4, 0.6))
        self.g = nn.Parameter(torch.empty(d_model).uniform_(0.001, 1))
        self.L = nn.Parameter(torch.empty(d_model).uniform_(-0.2, 0.2))
        # the synapses from neurons, then the synapses from inputs: entry (j, i) is of the synapse from j to i
        synapses = 2, d_model, d_model
        self.w = nn.Parameter(torch.empty(synapses).uniform_(0.001, 1))
        self.sigma = nn.Parameter(torch.empty(synapses).uniform_(3, 8))
        self.mu = nn.Parameter(torch.empty(synapses).uniform_(0.3, 0.8))
        self.E = nn.Parameter(1 - 2 * (torch.rand(synapses) < 1 / 3).to(torch.get_default_dtype()))
        mark(self, "c", "g", "L", "w", "sigma", "mu", "E", group="channel")

    def _network(self, v: Tensor, Wx: Tensor, D: Tensor, R: Tensor, tau: Tensor, A: Tensor) -> Tensor:
        """Return v after K fused steps of the general form."""
        for _ in range(self.n_steps):
            f = torch.sigmoid(Wx + functional.linear(v, R))
            v = (v + D * f * A) / (1 + D * (1 / tau + f))
        return v

    def _synapses(
        self,
        v: Tensor,
        x: Tensor,
        D: Tensor,
        c: Tensor,
        g: Tensor,
        L: Tensor,
        w: Tensor,
        sigma: Tensor,
        mu: Tensor,
        E: Tensor,
    ) -> Tensor:
        """Return v after K fused steps of neurons with synapses."""

        def synapses(v: Tensor, kind: int) -> tuple[Tensor, Tensor]:
            """Return the sums over j of w s E and of w s."""
            ws = w[kind] * torch.sigmoid(sigma[kind] * (v[..., None] - mu[kind]))
            return (ws * E[kind]).sum(-2), ws.sum(-2)

        pull_x, open_x = synapses(x, 1)
        for _ in range(self.n_steps):
            pull, opened = synapses(v, 0)
            v = (c * v + D * (g * L + pull + pull_x)) / (c + D * (g + opened + open_x + EPSILON))
        return v
