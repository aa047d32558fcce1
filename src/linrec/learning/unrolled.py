"""Sequences as systems of equations between free states, which all steps evaluate at once.

    r_t = x_t - F(x_{t-1}, u_t, theta)

The states x_t are tensors of their own. The loss reads them, so that credit passes by r alone.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.learning.cells import find_cells, opening
from linrec.learning.learner import Learner, Piece
from linrec.trees import Tree, leaves, map_tree

__all__ = ["System", "Unrolled"]

States = Mapping[str, Float[Tensor, "b t n"]]


class System(NamedTuple):
    """The equations of a sequence at given states.

    Args:
        prediction: (b, t, ..), a function of the states.
        loss: (b, t), without weights.
        total: the weighted sum of the losses.
        before: x_{t-1} of each layer (b, t, n), leaves, zeros at the start and after resets.
        kept: (b, t, 1), 0 where a reset cuts off x_{t-1}, else 1.
        x: x_t of each layer (b, t, n), leaves.
        F: F(x_{t-1}, u_t, theta) of each layer (b, t, n), functions of `before`, and of `x` of lower layers.
    """

    prediction: Tensor
    loss: Tensor
    total: Tensor
    before: dict[str, Tensor]
    kept: Tensor
    x: dict[str, Tensor]
    F: dict[str, Tensor]

    def back(self, v: States) -> dict[str, Tensor]:
        """Return the sum of v^T dF/dx over all steps, for each x_t."""
        return self._by_states([*self.F.values()], [v[path] for path in self.F])

    def errors(self) -> dict[str, Tensor]:
        """Return the derivatives of the total loss by each x_t, with the other states held."""
        return self._by_states([self.total], None)

    def _by_states(self, of: list[Tensor], v: list[Tensor] | None) -> dict[str, Tensor]:
        inputs = [*self.x.values(), *self.before.values()]
        found = torch.autograd.grad(
            of, inputs, v, retain_graph=True, materialize_grads=True, allow_unused=True
        )
        pairs = zip(self.x, found[: len(self.x)], found[len(self.x) :], strict=True)
        # x_t is `before` of the next step
        return {path: own + later(by * self.kept) for path, own, by in pairs}


class Unrolled(Learner):
    """Base class of learners of whole sequences whose states are free.

    The arguments are those of `Learner`.

    Raises:
        ValueError: a layer's memory is not the real state of a single `scan` or `nonlinear_scan`.
    """

    chunk_only: ClassVar[str | None] = "the states of a sequence need all of its steps."

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cells = {path: mixer for path, (mixer, _) in find_cells(self.model, self._named).items()}

    @torch.no_grad()
    def forward(self, piece: Piece, state: Tree) -> tuple[dict[str, Tensor], Tree]:
        """Return x_t = F(x_{t-1}) of each layer, (b, t, n), and the model's state at the end."""
        found: dict[str, list[Tensor]] = {path: [] for path in self.cells}
        for t in range(piece.inputs.shape[1]):
            now = slice(t, t + 1)
            with opening(self.cells, self._named) as steps:
                _, state = self.run(
                    piece.inputs[:, now], state, None if piece.reset is None else piece.reset[:, now]
                )
            for path, step in steps.items():
                found[path].append(step.after.detach())
        return {path: torch.stack(of, 1) for path, of in found.items()}, state

    def system(self, piece: Piece, x: States, first: Tree) -> System:
        """Return the equations at states x, after the model's state `first`."""
        b, t = piece.inputs.shape[:2]
        x = {path: of.detach().requires_grad_() for path, of in x.items()}
        kept = next(iter(x.values())).new_ones(b, t, 1)
        if piece.reset is not None:
            kept = kept * ~piece.reset[:, :, None]
        before = {}
        for (path, of), start in zip(x.items(), self._starts(first), strict=True):
            shifted = torch.cat([start[:, None], of.detach()[:, :-1]], 1)
            before[path] = torch.where(kept > 0, shifted, 0).requires_grad_()
        states = {path: (before[path].flatten(0, 1), of.flatten(0, 1)) for path, of in x.items()}
        # steps become rows
        rows = map_tree(lambda leaf: leaf.repeat_interleave(t, 0), first)
        with opening(self.cells, self._named, states=states) as steps:
            prediction, _ = self.run(piece.inputs.flatten(0, 1)[:, None], rows, None)
        prediction = prediction[:, 0].unflatten(0, (b, t))
        loss = self.loss(prediction, piece.targets)
        F = {path: steps[path].h.unflatten(0, (b, t)) for path in x}
        return System(prediction, loss, self.weighted(loss, piece.weight), before, kept, x, F)

    def _starts(self, state: Tree) -> list[Tensor]:
        return [leaf.detach().flatten(1) for leaf in leaves(state) if leaf.is_floating_point()]

    def by_parameters(self, total: Tensor) -> list[Tensor | None]:
        """Return the gradients of a sum of losses by the learner's parameters."""
        return [*torch.autograd.grad(total, self.parameters, allow_unused=True, retain_graph=True)]


def later(by: Float[Tensor, "b t n"]) -> Float[Tensor, "b t n"]:
    """Shift the values one step back in time; the last step has zeros."""
    return torch.cat([by[:, 1:], torch.zeros_like(by[:, :1])], 1)
