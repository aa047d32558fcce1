"""ODE-RNN: Latent ODEs for Irregularly-Sampled Time Series (Rubanova, Chen and Duvenaud, 2019), algorithm 1.

    h'_t = ODESolve(f, h_{t-1}, dt_t)
    u_t, r_t = sigmoid(W_ur x_t + U_ur h'_t + b_ur)
    n_t = tanh(W_n x_t + U_n (r_t * h'_t) + b_n)
    h_t = u_t * h'_t + (1 - u_t) * n_t

x is the input, t time, dt the time since the step before, h the hidden state and output. ODESolve follows the
differential equation dh/ds = f(h) for the time dt, where f is a network with tanh between its layers. u and r
are the gates of a GRU, and n its new content.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.extras import check_extra
from linrec.nn.cells import ADAPTIVE, SOLVERS, NonlinearMixer, Solver, beside_times, gru_gates, solve
from linrec.nn.mixer import State
from linrec.nn.projections import affine_map, matrix
from linrec.rules import COUNT, at_least, choice, positive, require

__all__ = ["OdeRNN"]


class OdeRNN(NonlinearMixer):
    """h'_t = ODESolve(f, h_{t-1}, dt_t), h_t = GRU(x_t, h'_t): a state that moves between observations.

    With irregular steps, `dt` is the time of the differential equation. Without them, it is 1.

    Fixed solvers take `n_steps` equal steps for each dt. Adaptive solvers are of torchdiffeq, from the extra
    "ode". They choose the same steps for all rows, run in the loop alone, and read values, so they have no
    `torch.compile` and no `torch.export`.

    The released code takes one step of Euler's method for short gaps. Its GRU has gates of two layers, a
    standard deviation beside h, and an update only at steps with observations; they are not here. Its weights
    start normal with standard deviation 0.1, and biases at zero, as here.

    Args:
        d_model: width of the sequence and of h.
        d_hidden: width of the hidden layers of f.
        n_layers: hidden layers of f.
        solver: "euler", "midpoint" or "rk4"; or adaptive, "bosh3", "dopri5" or "dopri8".
        n_steps: steps of a fixed solver for each dt.
        rtol: relative tolerance of an adaptive solver.
        atol: absolute tolerance of an adaptive solver.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, the solver or the mode does not exist, or an adaptive solver has
            a parallel mode.
        MissingExtraError: an adaptive solver without torchdiffeq.

    Source:
        Rubanova, Chen and Duvenaud, Latent ODEs for Irregularly-Sampled Time Series (2019); initial values
        and tolerances come from the released code.

    Example:
        >>> mixer = OdeRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64), dt=torch.rand(2, 10))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        d_hidden: int = 100,
        n_layers: int = 2,
        solver: Solver = "euler",
        n_steps: int = 1,
        rtol: float = 1e-3,
        atol: float = 1e-4,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        at_least(1, d_hidden=d_hidden)
        at_least(1, most=COUNT, n_layers=n_layers, n_steps=n_steps)
        positive(rtol=rtol, atol=atol)
        choice(SOLVERS, solver=solver)
        if solver in ADAPTIVE:
            check_extra("ode", f'`solver="{solver}"`')
            require(
                mode in ("auto", "recurrent"),
                f'`mode` must be "auto" or "recurrent" with the adaptive solver {solver!r}; got {mode!r}.',
            )
        self.solver: Solver = solver
        self.n_steps, self.rtol, self.atol = n_steps, rtol, atol

        self.widths = [d_model, *[d_hidden] * n_layers, d_model]
        self.f = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairwise(self.widths))
        # of u, r and n
        self.W = nn.Linear(d_model, 3 * d_model)
        self.U = nn.Linear(d_model, 3 * d_model, bias=False)
        for layer in (*self.f, self.W, self.U):
            nn.init.normal_(layer.weight, std=0.1)
        for layer in (*self.f, self.W):
            nn.init.zeros_(layer.bias)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        weights = [matrix(self.U, self.d_model, x.device)]
        for layer, width in zip(self.f, self.widths, strict=False):
            weights += affine_map(layer, width, x.device)
        inputs = beside_times(self.W(x), dt)
        h, state = self.nonlinear_scan(self._cell, inputs, weights, state=state, reset=reset)
        return h.to(x.dtype), state

    def _cell(self, h: Tensor, inputs: Tensor, U: Tensor, *layers: Tensor) -> Tensor:
        """Return h_t."""

        def f(h: Tensor) -> Tensor:
            for W, b in zip(layers[:-2:2], layers[1:-2:2], strict=True):
                h = torch.tanh(functional.linear(h, W, b))
            return functional.linear(h, *layers[-2:])

        Wx, dt = inputs[..., :-1], inputs[..., -1:]
        h = solve(f, h, dt, self.solver, n_steps=self.n_steps, rtol=self.rtol, atol=self.atol)
        u, n = gru_gates(Wx, h, U)
        return u * h + (1 - u) * n
