"""Online function approximation: the past of a signal in a few numbers, updated at every step."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.hippo.discretization import Discretization, discretize
from linrec.hippo.functions import basis
from linrec.hippo.measures import Measure, StateSpace, matrices

__all__ = ["OnlineApproximation", "Past"]

# steps whose matrices are made at once, where they differ
_AT_ONCE = 64


class Past(NamedTuple):
    """What is known of signals after some steps.

    Args:
        x: (b, c, N), coefficients.
        steps: how many samples they hold.
    """

    x: Float[Tensor, "b c N"]
    steps: int


class OnlineApproximation(nn.Module):
    """x' = A x + B u, whose state reads u's past: u(t - s) is near sum_n x_n(t) F_n(s).

    | measure | what the state knows |
    |---|---|
    | "legs" | all of the past, however long: x' = (A x + B u) / t |
    | "legs" with a `window` | the past with the weight e^(-age / window) |
    | "legt", "fout" | the last `window` steps, by polynomials or by waves |
    | "lagt" | the past in functions that fade as e^(-age / (2 window)) |

    A sample is held for its step: the one that came last has the ages 0 to 1, the one before 1 to 2. With
    "zoh", the coefficients of "legs" are those of the best polynomial on the whole past, to rounding, at
    every step. "bilinear" costs less where matrices differ from step to step, as they do there alone.

    It has no parameters, and computes in float64 unless it is moved to another dtype; inputs are converted.

    Args:
        measure: as for `linrec.hippo.matrices`.
        N: coefficients per signal.
        window: steps that the measure's unit of time takes; None for "legs" with all of the past.
        discretization: "zoh" or "bilinear"; see `linrec.hippo.discretize`.

    Raises:
        ValueError: an unknown name, an `N` below 1, a `window` that is not positive and finite, or none
            where the measure needs one.

    Source:
        HiPPO (Gu, Dao, Ermon, Rudra and Ré, 2020), sections 2 and 3; How to Train Your HiPPO (2022), FouT.

    Example:
        A parabola is remembered from its first step on:

        >>> import torch
        >>> u = torch.linspace(-1, 1, 101).square()[None, :, None]
        >>> approximation = OnlineApproximation("legs", 8)
        >>> _, past = approximation(u)
        >>> approximation.reconstruct(past, torch.tensor([0.5, 50.5, 100.5])).round(decimals=2).tolist()
        [[[1.0], [0.0], [1.0]]]
    """

    A: Tensor
    B: Tensor

    def __init__(
        self,
        measure: Measure,
        N: int,
        *,
        window: float | None = None,
        discretization: Discretization = "zoh",
    ) -> None:
        super().__init__()
        system = matrices(measure, N)
        if discretization not in ("zoh", "bilinear"):
            raise unknown("discretization", discretization, ["zoh", "bilinear"])
        if window is None and measure != "legs":
            raise ValueError(
                f'`window` must be a number of steps for "{measure}"; got None. '
                'The measure that needs none is "legs".'
            )
        if window is not None and not 0 < window < math.inf:
            raise ValueError(
                f"`window` must be a positive number of steps; got {window}. "
                'All of the past is "legs" without one.'
            )
        self.measure, self.N, self.window = measure, N, window
        self.discretization: Discretization = discretization
        if window is not None:
            system = discretize(system, 1 / window, discretization)
        # with a window those of one step; without, in continuous time
        self.register_buffer("A", system.A, persistent=False)
        self.register_buffer("B", system.B, persistent=False)

    def forward(
        self, u: Float[Tensor, "b t c"], past: Past | None = None
    ) -> tuple[Float[Tensor, "b t c N"], Past]:
        """Take in more samples.

        Args:
            u: signals (b, t, c), any t.
            past: what the last call returned, None where the signals begin.

        Returns:
            The coefficients after every step (b, t, c, N), and what is known after the last one.

        Raises:
            ValueError: signals that are not (b, t, c), or a past of other signals.
        """
        if u.dim() != 3:
            raise ValueError(
                f"`u` must have shape (batch, time, channels); got {tuple(u.shape)}. "
                "One signal of t samples is (1, t, 1)."
            )
        batch, time, channels = u.shape
        if past is None:
            past = Past(self.A.new_zeros(batch, channels, self.N), 0)
        if past.x.shape != (batch, channels, self.N):
            raise ValueError(
                f"`past.x` must have shape (b, c, N) = {(batch, channels, self.N)}; "
                f"got {tuple(past.x.shape)}. "
                "Pass what the last call on these signals returned, or None."
            )
        x, states = past.x, []
        for first in range(0, time, _AT_ONCE):
            some = u[:, first : first + _AT_ONCE].to(self.A)
            A, B = self._steps(past.steps + first, some.shape[1])
            for A_k, Bu_k in zip(A, (some[..., None] * B[:, None]).unbind(1), strict=True):
                x = x @ A_k.mT + Bu_k
                states.append(x)
        stacked = torch.stack(states, 1) if states else x.new_zeros(batch, 0, channels, self.N)
        return stacked, Past(x, past.steps + time)

    def reconstruct(self, past: Past, ages: Float[Tensor, "ages"]) -> Float[Tensor, "b ages c"]:
        """Read the signals from their coefficients.

        Args:
            past: what `forward` returned, or `Past(coefficients[:, k], k + 1)` for what was known earlier.
            ages: how many steps ago (ages,). The middle of the last sample is at 0.5.

        Returns:
            The signals at these ages, (b, ages, c); zeros where there was no sample yet.

        Raises:
            ValueError: ages below 0, or beyond the window, or beyond the first sample where there is none.
        """
        window = past.steps if self.window is None else self.window
        oldest = math.inf if self.window is not None and self.measure in ("legs", "lagt") else window
        if ages.numel() and not (ages.min() >= 0 and ages.max() <= oldest):
            raise ValueError(
                f"`ages` must be from 0 to {oldest} steps; got {ages.min():g} to {ages.max():g}. "
                "What is older has left the state, or was never in it."
            )
        # before the first sample there is no age but 0
        s = ages.to(self.A) / (window or 1)
        if self.window is None:
            # ages in units of the whole past, and time in its logarithm
            s = -torch.log1p(-s)
        return torch.einsum("bcn,an->bac", past.x, basis(self.measure, self.N, s))

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.measure!r}, {self.N}, window={self.window}, discretization={self.discretization!r}"

    def _steps(self, before: int, count: int) -> StateSpace:
        """A (count, N, N) and B (count, N) of the `count` steps that follow `before` steps."""
        if self.window is not None:
            return StateSpace(self.A.expand(count, -1, -1), self.B.expand(count, -1))
        # x' = (A x + B u) / t does not change over log t; the first step would be endless there
        k = torch.arange(max(before, 1), before + count).to(self.A)
        A, B = discretize(StateSpace(self.A, self.B), torch.log1p(1 / k), self.discretization)
        if before:
            return StateSpace(A, B)
        # after one step the signal is a constant: the first polynomial
        start = torch.eye(1, self.N).to(self.B)
        return StateSpace(torch.cat([torch.zeros_like(self.A)[None], A]), torch.cat([start, B]))
