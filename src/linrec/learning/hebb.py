"""Hebbian learning: weights learn from the activity before and behind them alone."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from linrec.learning.cells import Opened, Product
from linrec.learning.influence import Influence, Traces
from linrec.learning.learner import Learnt, Piece
from linrec.rules import choice, require
from linrec.trees import Tree

__all__ = ["Hebb"]

Rule = Literal["hebb", "oja", "sanger", "covariance", "bcm"]
Post = Literal["state", "product"]


class Hebb(Influence):
    """Hebbian learning of recurrent layers, with an eligibility and a third factor.

        e <- kappa e + dW,    theta <- theta + lr M e

    For a product W x of a layer, with x before and y behind it, averaged over rows by the update:

    | rule | dW |
    |---|---|
    | "hebb" | y x^T |
    | "oja" | y x^T - diag(y^2) W |
    | "sanger" | y x^T - tril(y y^T) W |
    | "covariance" | (y - mean y) (x - mean x)^T |
    | "bcm" | y (y - mean y^2) x^T |

    y is the new state of the layer, or the product itself, with its bias. M is 1, or the running mean of a
    row's loss minus its loss: a reward that is better than expected ("three-factor"). Biases do not learn;
    all parameters outside of these products learn by the gradient of the same step. "sanger" finds the
    principal eigenvectors of x, in order, and "oja" the first one in each row.

    `memory["traces"][path]` has "e" by the weights' names, and running means of x, y and y^2 by the products'
    names; `memory["baseline"]` has the mean loss.

    Args:
        rule: one of the table.
        post: y: "state", for products with as many outputs as the state, or "product".
        kappa: decay of the eligibility; 0 leaves the present step.
        modulated: whether M is the reward.
        decay: of the running means.

    Source:
        Hebb (1949); Oja, Simplified Neuron Model as a Principal Component Analyzer (1982); Sanger, Optimal
        Unsupervised Learning in a Single-Layer Linear Feedforward Neural Network (1989); Bienenstock, Cooper
        and Munro (1982); Fremaux and Gerstner, Neuromodulated Spike-Timing-Dependent Plasticity (2016), for
        three factors.
    """

    name: ClassVar[str] = "hebb"
    traces: ClassVar[bool] = False

    def __init__(
        self,
        *args: Any,
        rule: Rule = "oja",
        post: Post = "state",
        kappa: float = 0.0,
        modulated: bool = False,
        decay: float = 0.99,
        **options: Any,
    ) -> None:
        choice(Rule, rule=rule)
        choice(Post, post=post)
        require(
            0 <= kappa < 1 and 0 <= decay < 1, f"`kappa` and `decay` must be in [0, 1); got {kappa}, {decay}."
        )
        self.rule, self.post, self.kappa, self.modulated, self.decay = rule, post, kappa, modulated, decay
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        names = ("rule", "post", "kappa", "modulated", "decay")
        return super().options() | {name: getattr(self, name) for name in names}

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        n = sample.h.shape[1]
        for p in sample.products if self.post == "state" else ():
            require(
                p.y.shape[1] == n,
                f"products of `{path or 'model'}` must have as many outputs as the state, {n}, for `post` = "
                f"'state'; `{p.name}` has {p.y.shape[1]}. Take 'product'.",
            )
        products = [p for p in sample.products if p.weight in sample.weights]
        return {
            "e": {p.weight: torch.zeros_like(sample.weights[p.weight]) for p in products},
            "x": {p.name: p.x.new_zeros(p.x.shape[1]) for p in products},
            "y": {p.name: p.y.new_zeros(p.y.shape[1]) for p in products},
            "y2": {p.name: p.y.new_zeros(p.y.shape[1]) for p in products},
        }

    @override
    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        return super().first_memory(rows, device) | {"baseline": torch.zeros(rows, device=device)}

    @override
    @torch.no_grad()
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        new: Traces = {
            "e": {name: self.kappa * e for name, e in held["e"].items()},
            "x": {},
            "y": {},
            "y2": {},
        }
        for p in step.products:
            if p.weight not in step.weights:
                continue
            y = step.h if self.post == "state" else p.y
            for name, now in (("x", p.x), ("y", y), ("y2", y**2)):
                new[name][p.name] = self.decay * held[name][p.name] + (1 - self.decay) * now
            means = {name: new[name][p.name] for name in ("x", "y", "y2")}
            new["e"][p.weight][:, p.rows] += self._change(p, step.weights[p.weight][p.rows], y, means)
        return new

    def _change(self, p: Product, W: Tensor, y: Tensor, mean: dict[str, Tensor]) -> Tensor:
        """Return dW (b, o, d)."""
        if self.rule == "covariance":
            return (y - mean["y"])[:, :, None] * (p.x - mean["x"])[:, None]
        if self.rule == "bcm":
            y = y * (y - mean["y2"])
        plain = y[:, :, None] * p.x[:, None]
        if self.rule == "oja":
            return plain - (y**2)[:, :, None] * W
        if self.rule == "sanger":
            return plain - (y[:, :, None] * y[:, None]).tril() @ W
        return plain

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        # in place of the gradient of the same step
        return {name: torch.zeros_like(p) for name, p in step.weights.items()}

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        learnt = super().learn(piece, memory)
        loss = learnt.loss.detach()[:, 0]
        M = (memory["baseline"] - loss) if self.modulated else torch.ones_like(loss)
        if piece.weight is not None:
            M = M * piece.weight[:, 0]
        gradients = dict(zip(self._named, learnt.gradients, strict=True))
        for path, traces in learnt.memory["traces"].items():
            for name, e in traces["e"].items():
                gradients[f"{path}.{name}" if path else name] = -torch.einsum("b,b...->...", M.to(e.dtype), e)
        baseline = self.decay * memory["baseline"] + (1 - self.decay) * loss.float()
        after = learnt.memory | {"baseline": baseline}
        return learnt._replace(gradients=[*gradients.values()], memory=after)
