"""Predictive coding: errors of states settle by local exchange, and weights learn from them."""

from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from linrec.learning.learner import Learnt, Piece
from linrec.learning.unrolled import Unrolled
from linrec.rules import at_least, choice, positive
from linrec.trees import Tree, map_tree

__all__ = ["PredictiveCoding", "TemporalPredictiveCoding"]

Form = Literal["fixed", "zero_divergence", "free"]


class PredictiveCoding(Unrolled):
    """Predictive coding of whole sequences.

        e_t = x_t - F(x_{t-1}),    E = 1/2 sum |e_t|^2 + loss(x),    dtheta = -dE / dtheta

    | form | what settles |
    |---|---|
    | "fixed" | e <- e - rate (e_t + dl/dx_t - (dF/dx_t)^T e_{t+1}), with F and dF/dx of the forward pass |
    | "zero_divergence" | the same with rate 1 and as many sweeps as steps and layers |
    | "free" | x, by descent of E, with predictions of the present x |

    All states settle at once in each sweep. At rest, "fixed" gives the gradient of backpropagation through
    time; "zero_divergence" gives it without waiting for rest. "free" rests at another point, near that
    gradient if the losses have small weights, such as 0.01.

    Args:
        form: one of the table.
        rate: rate of the sweeps.
        sweeps: number of sweeps; errors take one per step, so "fixed" needs many more than steps.

    The other arguments are those of `Learner`.

    Source:
        Millidge, Tschantz and Buckley, Predictive Coding Approximates Backprop along Arbitrary Computation
        Graphs (2020), and the released code, for "fixed"; Song, Lukasiewicz, Xu and Bogacz, Can the Brain Do
        Backpropagation? (2020), for "zero_divergence"; Whittington and Bogacz (2017), for "free".

    Example:
        >>> from linrec import mixers
        >>> learner = PredictiveCoding(mixers.build("elman", 4))
        >>> learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4)).loss.shape
        torch.Size([1, 6])
    """

    name: ClassVar[str] = "predictive_coding"

    def __init__(
        self, *args: Any, form: Form = "fixed", rate: float = 0.1, sweeps: int = 100, **options: Any
    ) -> None:
        choice(Form, form=form)
        positive(rate=rate)
        at_least(1, sweeps=sweeps)
        self.form, self.rate, self.sweeps = form, rate, sweeps
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"form": self.form, "rate": self.rate, "sweeps": self.sweeps}

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        first = self.first_memory(len(piece.inputs), piece.inputs.device)["state"]
        return self.settled(piece, first)

    def settled(self, piece: Piece, first: Tree) -> Learnt:
        """Return the results of a sequence that starts at a state."""
        x, state = self.forward(piece, first)
        at_start = system = self.system(piece, x, first)
        e = {path: torch.zeros_like(of) for path, of in x.items()}
        by_x = system.errors()
        rate, sweeps = self.rate, self.sweeps
        if self.form == "zero_divergence":
            rate, sweeps = 1.0, piece.inputs.shape[1] + len(x) - 1
        for _ in range(sweeps):
            back = system.back(e)
            # -dE/dx_t
            pull = {path: back[path] - by_x[path] - e[path] for path in e}
            if self.form == "free":
                x = {path: of + rate * pull[path] for path, of in x.items()}
                system = self.system(piece, x, first)
                e = {path: (of - system.F[path]).detach() for path, of in x.items()}
                by_x = system.errors()
            else:
                e = {path: of + rate * pull[path] for path, of in e.items()}
        energy = system.total - sum((e[path] * F).sum() for path, F in system.F.items())
        gradients = self.by_parameters(energy)
        last = iter(x.values())
        state = map_tree(
            lambda leaf: next(last)[:, -1].view_as(leaf) if leaf.is_floating_point() else leaf, state
        )
        # the prediction of the forward pass
        return Learnt(at_start.prediction, at_start.loss, gradients, {"state": state})


class TemporalPredictiveCoding(PredictiveCoding):
    """Temporal predictive coding: each state settles between its prediction and the present target, online.

        E_t = 1/2 |x_t - F(x_{t-1})|^2 + l_t(x_t),    x_t <- x_t - rate dE_t/dx_t,    dtheta = -dE_t/dtheta

    x_t starts at F(x_{t-1}), and the settled x_t is carried to the next step. There is no credit over more
    than a step. For linear F this is a Kalman filter with a fixed gain.

    Args:
        rate: rate of the sweeps.
        sweeps: number of sweeps of each step.

    The other arguments are those of `Learner`.

    Source:
        Millidge, Tang, Osanlouy, Harper and Bogacz, Predictive Coding Networks for Temporal Prediction
        (2023).
    """

    name: ClassVar[str] = "temporal_predictive_coding"
    chunk_only: ClassVar[str | None] = None

    def __init__(self, *args: Any, rate: float = 0.1, sweeps: int = 20, **options: Any) -> None:
        super().__init__(*args, form="free", rate=rate, sweeps=sweeps, **options)

    @override
    def piece_end(self, step: int) -> int | None:
        return step + 1

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        return self.settled(piece, memory["state"])
