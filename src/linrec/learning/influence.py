"""Base class of learners whose traces approximate the influence of weights on a layer's state.

    M_t = dh_t/dtheta = J_t M_{t-1} + I_t,    grad_t = dl_t/dh_t M_t

J is dh_t/dh_{t-1}, and I is dh_t/dtheta with h_{t-1} held.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from typing_extensions import override

from linrec.learning.cells import Opened, find_cells, opening
from linrec.learning.learner import Learner, Learnt, Piece
from linrec.learning.rtrl import check_parameters
from linrec.nn.mixer import Mixer
from linrec.rules import require
from linrec.trees import Tree, leaves, map_tree

__all__ = ["Influence", "Traces"]

Traces: TypeAlias = dict[str, Tree]
# the golden ratio times 2^64, as a signed number
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


class Influence(Learner):
    """Base class of learners with traces of each layer's influence, step by step.

    Weights and biases of a layer's products have traces. Its other parameters, and those outside of recurrent
    layers, have the credit of the same step. Errors pass down at the same step. `memory["traces"]` has the
    traces by the layer's path.

    The arguments are those of `Learner`.

    Raises:
        ValueError: a layer's memory is not the real state of a single `scan` or `nonlinear_scan`, or a
            parameter changes this state outside of products, or has half precision.
    """

    holds: bool = False
    traces: ClassVar[bool] = True
    """Whether weights have traces, and so must change the state by products."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        check_parameters(self)
        found = find_cells(self.model, self._named, holds=self.holds)
        for path, (mixer, step) in found.items() if self.traces else ():
            _check_products(path, mixer, step)
        self.cells = {path: mixer for path, (mixer, _) in found.items()}
        self._first = {
            path: map_tree(torch.detach, self.first(path, step)) for path, (_, step) in found.items()
        }
        self.signs = {path: self.n_signs(step) for path, (_, step) in found.items()}

    @abstractmethod
    def first(self, path: str, sample: Opened) -> Traces:
        """Return the traces of a layer before the first step, without an axis of rows."""

    def n_signs(self, sample: Opened) -> int:
        """Return the number of random signs that each step of a layer takes."""
        return 0

    @abstractmethod
    def follow(self, path: str, step: Opened, held: Traces, noise: Float[Tensor, "b k"]) -> Traces:
        """Return the traces of a layer after a step."""

    @abstractmethod
    def credit(self, step: Opened, error: Float[Tensor, "b n"], traces: Traces) -> Mapping[str, Tensor]:
        """Return gradients of traced parameters from dl_t/dh_t and the traces after the step."""

    def errors(
        self, errors: Sequence[Tensor | None], total: Tensor, prediction: Tensor, memory: dict[str, Tree]
    ) -> list[Tensor | None]:
        """Return the errors of the layers' states, of those that autograd gives for the total loss."""
        return [*errors]

    def settled(self, step: Opened, error: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return the error that weights and lower layers get, from dl_t/dh_t."""
        return error

    @override
    def piece_end(self, step: int) -> int | None:
        return step + 1

    @override
    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        def repeated(tensor: Tensor) -> Tensor:
            return tensor.to(device).expand(rows, *tensor.shape).clone()

        memory = super().first_memory(rows, device) | {"traces": map_tree(repeated, self._first)}
        if any(self.signs.values()):
            seeds = _mixed(torch.arange(rows, device=device) * GOLDEN)
            memory["noise"] = self._noise(seeds, memory["traces"])
        return memory

    def _noise(self, seeds: Int64[Tensor, "b"], traces: Traces) -> dict[str, Tree]:
        """Return the signs of the next step by the layer's path, and the seeds that they came from."""
        noise: dict[str, Tree] = {"seeds": seeds, "signs": {}}
        for i, (path, n) in enumerate(self.signs.items()):
            numbers = i * sum(self.signs.values()) + torch.arange(n, device=seeds.device)
            bits = _mixed(_mixed(seeds)[:, None] + numbers * GOLDEN) & 1
            noise["signs"][path] = (2 * bits - 1).to(leaves(traces[path])[0].dtype)
        return noise

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        held = memory["traces"]
        if piece.reset is not None and piece.reset.any():
            held = self._after_reset(held, piece.reset[:, 0])
        noise = memory.get("noise", {"signs": dict.fromkeys(self.cells, piece.inputs.new_zeros(1, 0))})
        with opening(self.cells, self._named, holds=self.holds) as steps:
            prediction, state = self.run(piece.inputs, memory["state"], piece.reset)
        loss = self.loss(prediction, piece.targets)
        states = [step.after for step in steps.values()]
        total = self.weighted(loss, piece.weight)
        found = torch.autograd.grad(total, [*self.parameters, *states], allow_unused=True, retain_graph=True)
        gradients: dict[str, Tensor | None] = dict(zip(self._named, found, strict=False))
        errors = self.errors(found[len(gradients) :], total, prediction, memory)
        new: Traces = {}
        for i, (path, step) in reversed([*enumerate(steps.items())]):
            error = torch.zeros_like(step.h) if (e := errors[i]) is None else self.settled(step, e)
            same = torch.autograd.grad(
                step.h, [*self.parameters, *states[:i]], error, retain_graph=True, allow_unused=True
            )
            new[path] = self.follow(path, step, held[path], noise["signs"][path])
            start = f"{path}." if path else ""
            own = {start + name: g for name, g in self.credit(step, error, new[path]).items()}
            for name, g in zip(self._named, same, strict=False):
                gradients[name] = _sum(gradients[name], own.get(name, g))
            errors = [_sum(e, g) for e, g in zip(errors, same[len(gradients) :], strict=False)]
        after = {"state": state, "traces": {path: new[path] for path in held}}
        if "noise" in memory:
            after["noise"] = self._noise(noise["seeds"] + 1, held)
        return Learnt(prediction, loss, [*gradients.values()], after)

    def _after_reset(self, traces: Traces, reset: Tensor) -> Traces:
        """Return the traces, with those before the first step in rows that start anew."""
        first = iter(leaves(self._first))

        def started(trace: Tensor) -> Tensor:
            return torch.where(
                reset.reshape(-1, *[1] * (trace.dim() - 1)), next(first).to(trace.device), trace
            )

        return map_tree(started, traces)


def _check_products(path: str, mixer: Mixer, step: Opened) -> None:
    """Raise ValueError for parameters of a layer that change its state outside of products."""
    traced = {name for product in step.products for name in (product.weight, product.bias)}
    others = {n: p for n, p in mixer.named_parameters() if p.requires_grad and n not in traced}
    wanted = [step.before, *others.values()]
    _, *by = torch.autograd.grad(step.h.sum(), wanted, retain_graph=True, allow_unused=True)
    wrong = [name for name, g in zip(others, by, strict=True) if g is not None and g.any()]
    require(
        not wrong,
        f"`{'`, `'.join(wrong)}` of `{path or 'model'}` ({type(mixer).__name__}) must change the state by "
        "products W x + b. Freeze them by `requires_grad_(False)`, or take 'dense_rtrl'.",
    )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _mixed(z: Int64[Tensor, "*n"]) -> Int64[Tensor, "*n"]:
    """Return pseudo-random numbers, a function of each number alone (the last steps of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        z = (z ^ (z >> shift)) * factor
    return z ^ (z >> 31)
