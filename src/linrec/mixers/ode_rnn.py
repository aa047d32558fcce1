"""ODE-RNN: Latent ODEs for Irregularly-Sampled Time Series (Rubanova, Chen and Duvenaud, 2019), algorithm 1.

    h'_t = ODESolve(f, h_{t-1}, dt_t)
    u_t, r_t = sigmoid(W_ur x_t + U_ur h'_t + b_ur)
    n_t = tanh(W_n x_t + U_n (r_t * h'_t) + b_n)
    h_t = u_t * h'_t + (1 - u_t) * n_t

x is the input, t time, dt the time since the step before, h the hidden state and output. ODESolve follows the
differential equation dh/ds = f(h) for the time dt, where f is a network with tanh between its layers. u and r
are the gates of a GRU, and n its new content.

With inputs="field", this is a neural ODE (Chen, Rubanova, Bettencourt and Duvenaud, 2018) with an input:

    h_t = ODESolve(f(., x_t), h_{t-1}, dt_t)
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.extras import check_extra
from linrec.nn.cells import ADAPTIVE, NonlinearMixer, Solver, beside_times, gru_gates, solve
from linrec.nn.mixer import State
from linrec.nn.projections import affine_map, matrix
from linrec.rules import COUNT, at_least, positive, require

__all__ = ["OdeRNN"]

Inputs = Literal["gru", "field"]


class OdeRNN(NonlinearMixer):
    """h'_t = ODESolve(f, h_{t-1}, dt_t), h_t = GRU(x_t, h'_t): a state that moves between observations.

    With irregular steps, `dt` is the time of the differential equation. Without them, it is 1.

    | the network | arguments |
    |---|---|
    | ODE-RNN | the defaults |
    | neural ODE whose field f reads h and x_t; there is no GRU | `inputs="field"` |
    | with gradients by the adjoint equation | `adjoint=True, solver="dopri5"` |

    With `adjoint`, no states within a step are stored for the gradient, and there are no second derivatives.

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
        inputs: "gru", or "field", where x_t is an input of the first layer of f, and held during a step.
        solver: "euler", "midpoint" or "rk4"; or adaptive, "bosh3", "dopri5" or "dopri8".
        n_steps: steps of a fixed solver for each dt.
        rtol: relative tolerance of an adaptive solver.
        atol: absolute tolerance of an adaptive solver.
        adjoint: whether an adaptive solver follows the adjoint equation for gradients.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, a name does not exist, an adaptive solver has a parallel mode,
            or `adjoint` has a fixed solver.
        MissingExtraError: an adaptive solver without torchdiffeq.

    Source:
        Rubanova, Chen and Duvenaud, Latent ODEs for Irregularly-Sampled Time Series (2019); initial values
        and tolerances come from the released code. Chen and others, Neural Ordinary Differential Equations
        (2018), section 2 and appendix B, for "field" and `adjoint`.

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
        inputs: Inputs = "gru",
        solver: Solver = "euler",
        n_steps: int = 1,
        rtol: float = 1e-3,
        atol: float = 1e-4,
        adjoint: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        at_least(1, d_hidden=d_hidden)
        at_least(1, most=COUNT, n_layers=n_layers, n_steps=n_steps)
        positive(rtol=rtol, atol=atol)
        if solver in ADAPTIVE:
            check_extra("ode", f'`solver="{solver}"`')
            require(
                mode in ("auto", "recurrent"),
                f'`mode` must be "auto" or "recurrent" with the adaptive solver {solver!r}; got {mode!r}.',
            )
        require(
            not adjoint or solver in ADAPTIVE,
            f"`adjoint` needs an adaptive solver, one of {', '.join(ADAPTIVE)}; got {solver!r}.",
        )
        self.inputs, self.adjoint = inputs, adjoint
        self.solver: Solver = solver
        self.n_steps, self.rtol, self.atol = n_steps, rtol, atol

        self.widths = [d_model, *[d_hidden] * n_layers, d_model]
        self.f = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairwise(self.widths))
        # of u, r and n, or of the first layer of f, which has a bias already
        gru = inputs == "gru"
        self.W = nn.Linear(d_model, 3 * d_model if gru else d_hidden, bias=gru)
        self.U = nn.Linear(d_model, 3 * d_model, bias=False) if gru else None
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=0.1)
            else:
                nn.init.zeros_(parameter)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        weights = [] if self.U is None else [matrix(self.U, self.d_model, x.device)]
        for layer, width in zip(self.f, self.widths, strict=False):
            weights += affine_map(layer, width, x.device)
        inputs = beside_times(self.W(x), dt)
        h, state = self.nonlinear_scan(self._cell, inputs, weights, state=state, reset=reset)
        return h.to(x.dtype), state

    def _cell(self, h: Tensor, inputs: Tensor, *weights: Tensor) -> Tensor:
        """Return h_t."""
        Wx, dt = inputs[..., :-1], inputs[..., -1:]
        U = weights[0] if self.inputs == "gru" else None
        layers = weights if U is None else weights[1:]

        def f(h: Tensor) -> Tensor:
            W, b, *further = layers
            h = functional.linear(h, W, b)
            if U is None:
                h = h + Wx
            while further:
                W, b, *further = further
                h = functional.linear(torch.tanh(h), W, b)
            return h

        read = (Wx, *layers) if self.adjoint else None
        h = solve(f, h, dt, self.solver, n_steps=self.n_steps, rtol=self.rtol, atol=self.atol, adjoint=read)
        if U is None:
            return h
        u, n = gru_gates(Wx, h, U)
        return u * h + (1 - u) * n
