"""Online function approximation: a signal's past in a few coefficients, updated at every step."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.hippo.discretization import Discretization, discretize
from linrec.hippo.functions import basis
from linrec.hippo.measures import Measure, StateSpace, check, matrices
from linrec.restored import RestoredModule
from linrec.rules import choice, positive, typed

__all__ = ["OnlineApproximation", "Past"]

# number of steps per chunk of discretised matrices, if the matrices change over time
_AT_ONCE = 64


class Past(NamedTuple):
    """State of an online approximation after some steps.

    Args:
        x: (b, c, N), coefficients.
        steps: number of samples so far.
    """

    x: Float[Tensor, "b c N"]
    steps: int


class OnlineApproximation(RestoredModule):
    """x' = A x + B u, whose state approximates the past of u: u(t - s) ~ sum_n x_n(t) F_n(s).

    | measure | the state approximates |
    |---|---|
    | "legs" | the whole past at any length: x' = (A x + B u) / t |
    | "legs" with a `window` | the past with the weight e^(-age / window) |
    | "legt", "fout" | the last `window` steps, by polynomials or by a Fourier series |
    | "lagt" | the past, by functions that decay as e^(-age / (2 window)) |

    A sample is constant during its step: the last sample has ages 0 to 1, the previous sample 1 to 2. With
    "zoh", the state of "legs" is, at every step, the least-squares polynomial on the whole past, up to
    rounding. "bilinear" is cheaper if matrices change from step to step, which happens only for "legs"
    without a window.

    The module has no parameters. It computes in float64 unless it is moved to another dtype; inputs are
    converted.

    Args:
        measure: as in `linrec.hippo.matrices`.
        N: number of coefficients per signal.
        window: number of steps per unit of time of the measure; None for "legs" on the whole past.
        discretization: "zoh", "bilinear" or "euler"; see `linrec.hippo.discretize`.

    Raises:
        ValueError: a name is unknown, `N` is below 1, `window` is not positive and finite, or `window` is
            None for another measure than "legs".

    Source:
        HiPPO (Gu, Dao, Ermon, Rudra and Ré, 2020), sections 2 and 3; How to Train Your HiPPO (2022), FouT.

    Example:
        A parabola is reconstructed back to its first step:

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
        check(measure, N)
        choice(Discretization, discretization=discretization)
        typed({"window": float | None}, window=window)
        if window is None and measure != "legs":
            raise ValueError(
                f'`window` must be a number of steps for "{measure}"; got None. '
                'Only "legs" works without a window.'
            )
        positive(window=window, or_none=True, cure='For the whole past, use "legs" with `window` = None.')
        self.measure: Measure = measure
        self.N, self.window = N, window
        self.discretization: Discretization = discretization
        self.add_constants()

    def constants(self) -> dict[str, Tensor]:
        """Return A and B: with a window, of a step; without, in continuous time."""
        system = matrices(self.measure, self.N)
        if self.window is not None:
            system = discretize(system, 1 / self.window, self.discretization)
        return system._asdict()

    def forward(
        self, u: Float[Tensor, "b t c"], past: Past | None = None
    ) -> tuple[Float[Tensor, "b t c N"], Past]:
        """Update the coefficients with more samples.

        Args:
            u: signals (b, t, c), any t.
            past: the state that the last call returned; None at the start of the signals.

        Returns:
            The coefficients after every step (b, t, c, N), and the state after the last step.

        Raises:
            ValueError: `u` is not (b, t, c), or `past` has a different shape.
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
                "Pass the state that the last call on these signals returned, or None."
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

    if TYPE_CHECKING:
        __call__ = forward

    def reconstruct(self, past: Past, ages: Float[Tensor, "ages"]) -> Float[Tensor, "b ages c"]:
        """Reconstruct the signals from their coefficients.

        Args:
            past: the state that `forward` returned, or `Past(coefficients[:, k], k + 1)` for an earlier step.
            ages: (ages,), ages in steps. The middle of the last sample has age 0.5.

        Returns:
            The signals at these ages, (b, ages, c); zeros before the first sample.

        Raises:
            ValueError: an age is below 0, beyond the window, or, without a window, before the first sample.
        """
        window = past.steps if self.window is None else self.window
        oldest = math.inf if self.window is not None and self.measure in ("legs", "lagt") else window
        if ages.numel() and not (ages.min() >= 0 and ages.max() <= oldest):
            raise ValueError(
                f"`ages` must be from 0 to {oldest} steps; got {ages.min():g} to {ages.max():g}. "
                "Older samples have left the state, or were never in it."
            )
        # before the first sample, the only possible age is 0
        s = ages.to(self.A) / (window or 1)
        if self.window is None:
            # the age as a fraction of the whole past, on a logarithmic time axis
            s = -torch.log1p(-s)
        return torch.einsum("bcn,an->bac", past.x, basis(self.measure, self.N, s))

    def extra_repr(self) -> str:
        """Return the arguments that `print` shows."""
        return f"{self.measure!r}, {self.N}, window={self.window}, discretization={self.discretization!r}"

    def _steps(self, before: int, count: int) -> StateSpace:
        """Return A (count, N, N) and B (count, N) of the `count` steps that follow `before` steps."""
        if self.window is not None:
            return StateSpace(self.A.expand(count, -1, -1), self.B.expand(count, -1))
        # x' = (A x + B u) / t is time-invariant in log t, where the first step would be infinitely long
        k = torch.arange(max(before, 1), before + count).to(self.A)
        A, B = discretize(StateSpace(self.A, self.B), torch.log1p(1 / k), self.discretization)
        if before:
            return StateSpace(A, B)
        # after one step the signal is a constant: the first polynomial
        start = torch.eye(1, self.N).to(self.B)
        return StateSpace(torch.cat([torch.zeros_like(self.A)[None], A]), torch.cat([start, B]))
