"""Parts of networks that run step by step: their base class, loops, solvers, irregular steps, GRU gates."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.extras import import_extra
from linrec.nn.activations import to_complex, to_pairs
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import matrix
from linrec.ops.core.call import in_turn
from linrec.ops.core.loop import Step, Tensors, loop
from linrec.ops.core.precision import accumulation, wide, without_autocast
from linrec.ops.nonlinear_scan import nonlinear_scan
from linrec.rules import COUNT, at_least, choice, positive

__all__ = [
    "ADAPTIVE",
    "SOLVERS",
    "Fixed",
    "LowRank",
    "NonlinearMixer",
    "Solver",
    "Step",
    "Tensors",
    "beside_times",
    "gru_gates",
    "lstm_before",
    "lstm_weights",
    "solve",
    "step_by_step",
]

Fixed: TypeAlias = Literal["euler", "midpoint", "rk4"]
Adaptive: TypeAlias = Literal["dopri5", "bosh3", "dopri8"]
Solver: TypeAlias = Fixed | Adaptive

ADAPTIVE: tuple[str, ...] = get_args(Adaptive)
"""Solvers of torchdiffeq, which choose their steps."""
SOLVERS = (*get_args(Fixed), *ADAPTIVE)
"""All solvers."""


class NonlinearMixer(Mixer):
    """A mixer with the memory h_t = cell(h_{t-1}, x_t), which starts from zeros.

    Args:
        d_model: width of the sequence.
        mode: mode of `linrec.ops.nonlinear_scan`.
        state_shape: shape of the state of one row; `d_model` channels if no number is given.
        is_complex: whether the state is complex. The cell gets and returns `to_pairs` of the state.
    """

    recurrence = "nonlinear_scan"

    def __init__(self, d_model: int, mode: str, *state_shape: int, is_complex: bool = False) -> None:
        super().__init__(d_model)
        nonlinear_scan.operator.check_mode(mode)
        self.mode, self.is_complex = mode, is_complex
        *axes, n = state_shape or (d_model,)
        self.state_shape, self.cell_shape = (*axes, n), (*axes, 2 * n if is_complex else n)

    def nonlinear_scan(
        self,
        cell: Callable[..., Tensor],
        x: Float[Tensor, "b t *d"],
        parameters: Tensor | Sequence[Tensor] = (),
        *,
        state: Tensor | None,
        reset: Bool[Tensor, "b t"] | None,
    ) -> tuple[Float[Tensor, "b t *n"], Tensor]:
        """Call `linrec.ops.nonlinear_scan` in the mixer's mode."""
        given = parameters if isinstance(parameters, Tensor) else tuple(parameters)
        if state is None:
            # less work than `init_state`
            start = x.new_zeros(x.shape[0], *self.cell_shape, dtype=accumulation(x.dtype))
        else:
            start = to_pairs(state) if self.is_complex else state
        h, state = nonlinear_scan(cell, x, given, state=start, reset=reset, mode=self.mode)
        return h, to_complex(state) if self.is_complex else state

    def started(self, x: Tensor, state: State) -> State:
        """Return the state, or zeros in place of None."""
        return self.init_state(x.shape[0], device=x.device) if state is None else state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, *state_shape)."""
        options = self.factory_kwargs(device, is_complex=self.is_complex)
        return torch.zeros(batch, *self.state_shape, **options)


def step_by_step(
    name: str,
    step: Callable[..., Step],
    state: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    *,
    reset: Bool[Tensor, "b t"] | None = None,
    fresh: Sequence[Tensor | float] | None = None,
    axis: int = 1,
) -> Step:
    """Run state, outputs = step(state, *inputs_t) for every step t, without autocast.

    Without autocast, since the next step would repeat the rounding errors of a step.

    Args:
        name: the mixer's name, for the error.
        step: takes and returns a tuple of states; the outputs of `step` are a tuple too.
        state: the states before the first step. Axis 1 - `axis` is the batch.
        inputs: tensors with time on `axis`; None is None at every step.
        reset: (b, t) bool; where it is true, `step` gets `fresh` in place of the state.
        fresh: the states at the start of a sequence, numbers or tensors that broadcast; None is zeros.
        axis: the axis of time in inputs and outputs, 1 or 0.

    Returns:
        The states after the last step, and the outputs of all steps. Without any steps, the states are the
        states given.
    """
    fresh = [0.0] * len(state) if fresh is None else fresh
    axes = sorted({part.dim() for part in state})

    def after_reset(state: Tensors, *now: Tensor | None) -> Step:
        cuts = dict(zip(axes, now[len(inputs) :], strict=True))
        kept = (_replaced(part, cuts[part.dim()], start) for part, start in zip(state, fresh, strict=True))
        return step(tuple(kept), *now[: len(inputs)])

    given = [*inputs, *(_cut(reset, dim, axis) for dim in axes)]
    first = next(x for x in inputs if x is not None)

    def run(state: Tensors) -> tuple[Tensors, Tensors]:
        with without_autocast(first.device.type):
            if first.shape[axis] > 0:
                return loop(after_reset, state, given, axis=axis)[::-1]
            # a step of zeros shows the shapes of outputs, which depend on all inputs
            zeros = (None if x is None else x.sum(axis).to(x.dtype) for x in given)
            _, outputs = after_reset(state, *zeros)
        return tuple(y.unsqueeze(axis).narrow(axis, 0, 0) for y in outputs), state

    outputs, last = in_turn(name, run, tuple(state), inputs)
    return last, outputs


def _cut(reset: Tensor | None, dim: int, axis: int) -> Tensor | None:
    """Return the flags of all steps, of which each broadcasts to a state of `dim` axes."""
    if reset is None:
        return None
    flags = reset if axis == 1 else reset.T[:, None]
    return flags.reshape(*flags.shape, *[1] * (dim - flags.dim() + 1))


def _replaced(part: Tensor, cut: Tensor | None, start: Tensor | float) -> Tensor:
    """Return `start` where a sequence starts, and the state elsewhere."""
    if cut is None:
        return part
    return torch.where(cut, start, part) if isinstance(start, Tensor) else part.masked_fill(cut, start)


def beside_times(x: Float[Tensor, "b t d"], dt: Float[Tensor, "b t"] | None) -> Float[Tensor, "b t more"]:
    """Return inputs of a cell with the time of each step as a further channel, the last.

    The result is in float32, or float64 where `x` is, because half precision would round the times.

    Args:
        x: inputs (b, t, d).
        dt: time since the step before (b, t); None is 1 everywhere.
    """
    x = wide(x)
    times = torch.ones_like(x[..., :1]) if dt is None else dt.to(x.dtype)[..., None]
    return torch.cat([x, times], -1)


def gru_gates(
    Wx: Float[Tensor, "*b three_n"], h: Float[Tensor, "*b n"], U: Float[Tensor, "three_n n"]
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Return the gate and the new content of a GRU.

        z, r = sigmoid(W_zr x + U_zr h)    n = tanh(W_n x + U_n (r * h))

    Args:
        Wx: W x with biases, of z, r and n.
        h: the state that the unit reads.
        U: weights of the state, of z, r and n.

    Returns:
        z and n, in the shape of h.

    Source:
        Cho and others, Learning Phrase Representations using RNN Encoder-Decoder (2014).
    """
    of_z, of_r, of_n = Wx.chunk(3, -1)
    U_z, U_r, U_n = U.chunk(3)
    z, r = torch.sigmoid(of_z + h @ U_z.mT), torch.sigmoid(of_r + h @ U_r.mT)
    return z, torch.tanh(of_n + (r * h) @ U_n.mT)


def lstm_weights(d_model: int) -> tuple[nn.Linear, nn.Linear]:
    """Return V and U of `lstm_before`: V Xavier-uniform, its bias uniform in +- 0.1, and U orthogonal."""
    V, U = nn.Linear(d_model, 4 * d_model), nn.Linear(d_model, 4 * d_model, bias=False)
    nn.init.xavier_uniform_(V.weight)
    nn.init.uniform_(V.bias, -0.1, 0.1)
    nn.init.orthogonal_(U.weight)
    return V, U


def lstm_before(
    h: Float[Tensor, "*b n"],
    m: Float[Tensor, "*b n"],
    Vx: Float[Tensor, "*b four_n"],
    U: Float[Tensor, "four_n n"],
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Return h and m after a step of the LSTM that runs before a continuous-time cell ("mixed memory").

        m <- sigmoid(g_f + 1) * m + sigmoid(g_i) * tanh(i),    h <- sigmoid(g_o) * tanh(m)

    Args:
        h: the state of the cell.
        m: the memory of the LSTM.
        Vx: V x with biases, of i, g_i, g_f and g_o.
        U: weights of h, of the same.

    Source:
        Lechner and Hasani, Learning Long-Term Dependencies in Irregularly-Sampled Time Series (2020), in the
        form of ncps.
    """
    i, g_i, g_f, g_o = (Vx + h @ U.mT).chunk(4, -1)
    m = torch.sigmoid(g_f + 1) * m + torch.sigmoid(g_i) * torch.tanh(i)
    return torch.sigmoid(g_o) * torch.tanh(m), m


def solve(
    f: Callable[[Tensor], Tensor],
    h: Float[Tensor, "*b n"],
    time: Float[Tensor, "*b 1"],
    solver: Solver,
    *,
    n_steps: int = 1,
    rtol: float = 1e-3,
    atol: float = 1e-4,
    adjoint: Sequence[Tensor] | None = None,
) -> Float[Tensor, "*b n"]:
    """Return h(time) of h' = f(h), h(0) = `h`.

    | solver | steps |
    |---|---|
    | "euler", "midpoint", "rk4" | `n_steps` of equal length, of order 1, 2 and 4 |
    | "bosh3", "dopri5", "dopri8" | as many as the tolerances need, of order 3, 5 and 8, by torchdiffeq |

    Time is rescaled to [0, 1] for each row, so rows may have different times. The adaptive solvers choose the
    same steps for all rows.

    Args:
        f: function of h, of the shape of h.
        h: initial values.
        time: time of each row; a negative time runs backwards.
        solver: one of the names above.
        n_steps: number of equal steps.
        rtol: relative tolerance of adaptive solvers.
        atol: absolute tolerance of adaptive solvers.
        adjoint: all tensors that f reads, for gradients of an adaptive solver by the adjoint equation, which
            a second solution follows backwards in time: no state within the time is stored, and the gradients
            have the solver's error. None means autograd.
    """
    choice(SOLVERS, solver=solver)
    at_least(1, most=COUNT, n_steps=n_steps)
    positive(rtol=rtol, atol=atol)
    if solver in ADAPTIVE:
        torchdiffeq = import_extra("torchdiffeq", f'solver="{solver}"')
        ends = torch.arange(2, dtype=time.dtype, device=time.device)
        # a step ends at 1, because interpolation within a longer step is less accurate
        options: dict[str, Any] = {
            "rtol": rtol,
            "atol": atol,
            "method": solver,
            "options": {"step_t": ends[1:]},
        }
        integrate = torchdiffeq.odeint
        if adjoint is not None:
            integrate = torchdiffeq.odeint_adjoint
            options |= {"adjoint_params": (time, *adjoint), "adjoint_options": {"step_t": ends[:1]}}
        path = integrate(lambda _, h: time * f(h), h, ends, **options)
        return path[-1]
    step = time / n_steps
    for _ in range(n_steps):
        h = h + step * _slope(f, h, step, solver)
    return h


def _slope(f: Callable[[Tensor], Tensor], h: Tensor, step: Tensor, solver: str) -> Tensor:
    """Return the mean slope over a step."""
    first = f(h)
    if solver == "euler":
        return first
    second = f(h + step / 2 * first)
    if solver == "midpoint":
        return second
    third = f(h + step / 2 * second)
    return (first + 2 * second + 2 * third + f(h + step * third)) / 6


class LowRank(nn.Sequential):
    """y = W x, or y = W_2 W_1 x with `rank` rows of W_1.

    Args:
        d_in: width of x.
        d_out: width of y.
        rank: None means a full matrix.
        std: standard deviation of the initial weights of every matrix, which are Gaussian.
    """

    def __init__(self, d_in: int, d_out: int, rank: int | None, *, std: float) -> None:
        at_least(1, rank=rank, or_none=True, cure="None means a full matrix.")
        sizes = [d_in, d_out] if rank is None else [d_in, rank, d_out]
        super().__init__(*(nn.Linear(m, n, bias=False) for m, n in itertools.pairwise(sizes)))
        self.sizes = sizes
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def weights(self, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Return the matrices, W or (W_1, W_2), for x on a device."""
        layers = zip(self, self.sizes[:-1], strict=True)
        return tuple(matrix(layer, width, device) for layer, width in layers)

    @staticmethod
    def product(x: Tensor, *weights: Tensor) -> Tensor:
        """Return y with the given matrices in place of the layer's."""
        return functools.reduce(functional.linear, weights, x)
