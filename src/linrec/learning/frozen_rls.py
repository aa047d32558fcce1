"""Frozen recurrences with a readout by recursive least squares: no gradient, and no learning rate."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from linrec.learning.layers import outermost
from linrec.learning.learner import Learner, Learnt, Piece
from linrec.models import LanguageModel, SequenceClassifier
from linrec.rules import require
from linrec.trees import Tree

__all__ = ["FrozenRLS"]

# a trace of P that is this many times as large as at the start has lost its digits
LARGEST = 1e12


class FrozenRLS(Learner):
    """Recursive least squares of a linear readout; the model is frozen.

    With features x_t (m,) and targets y_t (n,), w_0 = 0 and P_0 = I / ridge, each step adds

        k = P x / (la + x^T P x),    w <- w + k (y - x^T w)^T,    P <- (P - k x^T P) / la

    so that w minimises sum_s la^(t-s) |y_s - x_s^T w|^2 + ridge la^(t+1) |w|^2 after step t. All outputs
    share P. The features are the inputs of the model's head, or the outputs of a model without a head, and a
    constant 1. With `layers`, they are the outputs of all recurrent layers, as in a deep reservoir. Rows
    share the readout: a step of b rows is one update with b errors, each times its weight.

    A target that is a class counts as one-hot, so x^T w estimates probabilities. The prediction is log p with
    p_i = max(x^T w_i, floor / n) / sum_j max(x^T w_j, floor / n), whose cross-entropy compares with other
    learners.

    The readout is `memory["readout"]`, float64, with w (m, n) and P (m, m). It learns at every step, also
    with `update=False`; `reset` clears states, and the readout only without `rows`. Where inputs leave a
    direction unused, P grows there by 1 / la per step; a P that has become 1e12 times as large starts again
    from I / ridge, and w stays.

    Args:
        forgetting: la in (0, 1]; 1 / (1 - la) steps are remembered.
        ridge: weight of |w|^2 at the start, above 0.
        layers: whether the readout sees the outputs of all recurrent layers.
        floor: smallest probability of a class, in units of a uniform guess, in (0, 1).

    The other arguments are those of `Learner`; the optimiser is unused.

    Source:
        Plackett, Some Theorems in Least Squares (1950); Jaeger, Adaptive Nonlinear System Identification with
        Echo State Networks (2003), for a readout of a frozen recurrence.

    Example:
        >>> from linrec import mixers
        >>> learner = FrozenRLS(mixers.build("lru", 4))
        >>> step = learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4))
        >>> bool(step.loss[0, -1] < step.loss[0, 0]), learner.memory["readout"]["P"].shape
        (True, torch.Size([5, 5]))
    """

    name: ClassVar[str] = "frozen_rls"
    shared: ClassVar[frozenset[str]] = frozenset({"readout"})

    def __init__(
        self,
        *args: Any,
        forgetting: float = 0.999,
        ridge: float = 1.0,
        floor: float = 0.01,
        layers: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        require(0 < forgetting <= 1, f"`forgetting` must be in (0, 1]; got {forgetting}. 1 forgets nothing.")
        require(ridge > 0, f"`ridge` must be above 0; got {ridge}. Small numbers learn fast at first.")
        require(0 < floor < 1, f"`floor` must be in (0, 1); got {floor}. 1 would be a uniform guess.")
        self.forgetting, self.ridge, self.floor, self.layers = forgetting, ridge, floor, layers

    @override
    def options(self) -> dict[str, Any]:
        names = ("forgetting", "ridge", "floor", "layers")
        return super().options() | {name: getattr(self, name) for name in names}

    @override
    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        # the first step shows the numbers of features and outputs
        return super().first_memory(rows, device) | {"readout": {}}

    @override
    @torch.no_grad()
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        with self._features() as found:
            output, state = self.run(piece.inputs, memory["state"], piece.reset)
        x = torch.cat(found, 2) if found else output
        x = functional.pad(x.double(), (0, 1), value=1.0)
        is_class = not piece.targets.is_floating_point()
        y = piece.targets
        # the square roots of weights scale features and errors alike
        root = x.new_ones(y.shape[:2]) if piece.weight is None else piece.weight.double().sqrt()
        if is_class:
            root = root.masked_fill(y < 0, 0)
            y = functional.one_hot(y.clamp(min=0), output.shape[-1])
        y = y.double()
        w, P = memory["readout"].get("w"), memory["readout"].get("P")
        if w is None or P is None:
            w, P = x.new_zeros(x.shape[2], y.shape[2]), self._fresh(x)
        fits = []
        for t in range(x.shape[1]):
            fits.append(x[:, t] @ w)
            w, P = self._updated(w, P, root[:, t, None] * x[:, t], root[:, t, None] * (y[:, t] - fits[-1]))
        prediction = torch.stack(fits, 1)
        if is_class:
            p = prediction.clamp(min=self.floor / prediction.shape[2])
            prediction = (p / p.sum(2, keepdim=True)).log()
        prediction = prediction.to(output.dtype)
        loss = self.loss(prediction, piece.targets)
        none = [None] * len(self.parameters)
        return Learnt(prediction, loss, none, {"state": state, "readout": {"w": w, "P": P}})

    def _updated(
        self,
        w: Float[Tensor, "m n"],
        P: Float[Tensor, "m m"],
        x: Float[Tensor, "b m"],
        e: Float[Tensor, "b n"],
    ) -> tuple[Tensor, Tensor]:
        """Return w and P after a step of b rows with features x and errors e."""
        Px = P @ x.T
        inner = x @ Px + self.forgetting * torch.eye(len(x), dtype=x.dtype, device=x.device)
        k = torch.linalg.solve(inner, Px, left=False)
        P = (P - k @ Px.T) / self.forgetting
        P = (P + P.T) / 2
        trace = P.diagonal().sum()
        if not trace <= LARGEST * len(P) / self.ridge:
            P = self._fresh(x)
        return w + k @ e, P

    def _fresh(self, x: Tensor) -> Tensor:
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) / self.ridge

    @contextmanager
    def _features(self) -> Iterator[list[Tensor]]:
        """Within the context, collect the inputs of the model's head, or the outputs of all layers."""
        found: list[Tensor] = []
        handles: list[RemovableHandle] = []
        if self.layers:
            for mixer in outermost(self.model).values():
                handles.append(mixer.register_forward_hook(lambda mixer, given, made: found.append(made[0])))
        elif isinstance(self.model, LanguageModel | SequenceClassifier):
            handles.append(
                self.model.head.register_forward_pre_hook(lambda head, given: found.append(given[0]))
            )
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()
