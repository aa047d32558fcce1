"""e-prop: filtered eligibility traces with a learning signal."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from linrec.learning.cells import Opened
from linrec.learning.eligibility import DRTRL
from linrec.learning.influence import Traces
from linrec.learning.learner import Learnt, Piece
from linrec.rules import choice, require
from linrec.trees import Tree

__all__ = ["EProp"]

Feedback = Literal["symmetric", "random"]


class EProp(DRTRL):
    """e-prop: eligibility traces, a filter of them, and a learning signal.

        e_W <- D e_W + dh_t/dy x^T,    f_W <- kappa f_W + e_W,    grad_W = L_t f_W

    `memory["traces"][path]` has "trace" and "filtered", by the parameters' names. With random feedback,
    `memory["feedback"][path]` is the matrix B (outputs, n).

    Args:
        kappa: decay of the filter, that of a leaky readout; 0 disables the filter.
        feedback: "symmetric" takes L_t = dl_t/dh_t; "random" takes L_t = dl_t/dprediction B, where B has
            Gaussian entries of variance 1 / outputs.

    Source:
        Bellec, Scherr, Subramoney and others, A Solution to the Learning Dilemma for Recurrent Networks of
        Spiking Neurons (2020), equations 1 to 4.
    """

    name: ClassVar[str] = "e_prop"
    shared: ClassVar[frozenset[str]] = frozenset({"feedback"})

    def __init__(
        self, *args: Any, kappa: float = 0.0, feedback: Feedback = "symmetric", **options: Any
    ) -> None:
        require(0 <= kappa < 1, f"`kappa` must be in [0, 1); got {kappa}. 0 disables the filter.")
        choice(Feedback, feedback=feedback)
        self.kappa, self.feedback = kappa, feedback
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"kappa": self.kappa, "feedback": self.feedback}

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        first = super().first(path, sample)
        return {"trace": first, "filtered": {name: e.clone() for name, e in first.items()}}

    @override
    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        # the first step shows the number of outputs
        known = {} if self.memory is None else self.memory["feedback"]
        return super().first_memory(rows, device) | {"feedback": known}

    @override
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        traces = super().follow(path, step, held["trace"], noise)
        filtered = {name: self.kappa * f + traces[name] for name, f in held["filtered"].items()}
        return {"trace": traces, "filtered": filtered}

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        return super().credit(step, error, traces["filtered"])

    @override
    def errors(
        self, errors: Sequence[Tensor | None], total: Tensor, prediction: Tensor, memory: dict[str, Tree]
    ) -> list[Tensor | None]:
        if self.feedback == "symmetric":
            return [*errors]
        (by_prediction,) = torch.autograd.grad(total, prediction, retain_graph=True)
        return [by_prediction.flatten(1) @ B for B in memory["feedback"].values()]

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        if self.feedback == "random" and not memory["feedback"]:
            memory = memory | {"feedback": self._feedback(piece, memory)}
        learnt = super().learn(piece, memory)
        return learnt._replace(memory=learnt.memory | {"feedback": memory["feedback"]})

    def _feedback(self, piece: Piece, memory: dict[str, Tree]) -> dict[str, Tensor]:
        prediction, _ = self.run(piece.inputs, memory["state"], piece.reset)
        draw, outputs = torch.Generator().manual_seed(0), prediction.shape[-1]
        return {
            path: torch.randn(outputs, mixer.init_state(1).numel(), generator=draw).to(prediction)
            / outputs**0.5
            for path, mixer in self.cells.items()
        }
