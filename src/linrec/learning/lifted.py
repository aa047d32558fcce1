"""Lifted training: states are variables of their own, bound to the recurrence by penalties or multipliers."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from linrec.learning.learner import Learnt, Piece
from linrec.learning.unrolled import System, Unrolled
from linrec.rules import at_least, choice, positive
from linrec.trees import Tree

__all__ = ["Lifted"]

Method = Literal["penalty", "lagrangian", "local_propagation"]
Constraint = Literal["lin", "abs", "eps", "lineps", "squared", "cubic"]
CONSTRAINTS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "lin": lambda r, eps: r,
    "abs": lambda r, eps: r.abs(),
    "eps": lambda r, eps: (r.abs() - eps).relu(),
    "lineps": lambda r, eps: (r - eps).relu() - (-r - eps).relu(),
    "squared": lambda r, eps: r**2,
    "cubic": lambda r, eps: r**3,
}


class Lifted(Unrolled):
    """Train weights and states together, under the constraint that states follow the recurrence.

        L = loss(x) + <lam, G(r)> + rho / 2 |r|^2,    r_t = x_t - F(x_{t-1}, u_t, theta)

    | method | updates |
    |---|---|
    | "penalty" | descent in x and theta, without lam |
    | "lagrangian" | the same, and lam <- lam + rho r before each call but the first |
    | "local_propagation" | descent in x and theta, and ascent in lam: lam <- lam + ascent G(r) |

    Each call of `chunk` takes the same whole sequences, all of the data: it makes `sweeps` steps of descent
    in x and returns the gradient by theta for one step of the optimiser. Losses are those of the free
    states; run the model for its own. States start at a forward pass, and lam at 0. Sequences of another
    length, or `reset()`, start anew.

    At the forward states with lam = -dloss/dx_t, the gradient by x is zero, and that by theta is of
    backpropagation through time: a saddle of L is a stationary point of ordinary training.

    `memory["x"]` and `memory["multipliers"]` have x and lam (b, t, n) by the layer's path, and may be
    replaced.

    Args:
        method: one of the table.
        rho: weight of the quadratic penalty, 0 for pure "local_propagation". May be raised between calls.
        rate: rate of the descent in x.
        sweeps: steps of descent in x per call.
        constraint: G, entrywise: "lin" r, "abs" |r|, "eps" max(|r| - eps, 0), "lineps" r outside of +- eps,
            "squared" r^2, "cubic" r^3. Only for "local_propagation".
        ascent: rate of the ascent in lam, of "local_propagation".
        eps: of "eps" and "lineps".

    The other arguments are those of `Learner`.

    Source:
        Carreira-Perpinan and Wang, Distributed Optimization of Deeply Nested Systems (2014), for "penalty";
        Marra, Tiezzi, Melacci, Betti, Maggini and Gori, Local Propagation in Constraint-based Neural Networks
        (2020), and the released code of its form for graphs, for "local_propagation".

    Example:
        >>> from linrec import mixers
        >>> learner = Lifted(mixers.build("elman", 4))
        >>> step = learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4))
        >>> learner.memory["x"][""].shape
        torch.Size([1, 6, 4])
    """

    name: ClassVar[str] = "lifted"
    shared: ClassVar[frozenset[str]] = frozenset({"x", "multipliers"})

    def __init__(
        self,
        *args: Any,
        method: Method = "lagrangian",
        rho: float = 1.0,
        rate: float = 0.1,
        sweeps: int = 10,
        constraint: Constraint = "lin",
        ascent: float = 0.1,
        eps: float = 1e-4,
        **options: Any,
    ) -> None:
        choice(Method, method=method)
        choice(Constraint, constraint=constraint)
        positive(rate=rate, ascent=ascent)
        at_least(0, rho=rho, eps=eps)
        at_least(1, sweeps=sweeps)
        self.method, self.rho, self.rate, self.sweeps = method, rho, rate, sweeps
        self.constraint, self.ascent, self.eps = constraint, ascent, eps
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        names = ("method", "rho", "rate", "sweeps", "constraint", "ascent", "eps")
        return super().options() | {name: getattr(self, name) for name in names}

    @override
    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        # the first sequences show the number of steps
        return super().first_memory(rows, device) | {"x": {}, "multipliers": {}}

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        first = self.first_memory(len(piece.inputs), piece.inputs.device)["state"]
        x, multipliers = memory["x"], memory["multipliers"]
        if not x or next(iter(x.values())).shape[:2] != piece.inputs.shape[:2]:
            x, _ = self.forward(piece, first)
            multipliers = {path: torch.zeros_like(of) for path, of in x.items()}
        system = self.system(piece, x, first)
        if self.method == "lagrangian":
            multipliers = {
                path: lam + self.rho * _residual(system, path) for path, lam in multipliers.items()
            }
        for _ in range(self.sweeps):
            pull, by_x = self.forces(system, multipliers), system.errors()
            back = system.back(pull)
            x = {
                path: (of - self.rate * (by_x[path] + pull[path] - back[path])).detach()
                for path, of in system.x.items()
            }
            if self.method == "local_propagation":
                multipliers = {
                    path: lam + self.ascent * self._constraint(_residual(system, path))
                    for path, lam in multipliers.items()
                }
            system = self.system(piece, x, first)
        pull = self.forces(system, multipliers)
        lagrangian = system.total - sum((pull[path] * F).sum() for path, F in system.F.items())
        after = {"state": memory["state"], "x": x, "multipliers": multipliers}
        return Learnt(system.prediction, system.loss, self.by_parameters(lagrangian), after)

    def forces(self, system: System, multipliers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return lam G'(r) + rho r of each state."""
        found = {}
        for path, lam in multipliers.items():
            r = _residual(system, path).requires_grad_()
            if self.method == "local_propagation":
                (lam,) = torch.autograd.grad((lam * self._constraint(r)).sum(), r)
            found[path] = lam + self.rho * r.detach()
        return found

    def _constraint(self, r: Tensor) -> Tensor:
        return CONSTRAINTS[self.constraint](r, self.eps)


def _residual(system: System, path: str) -> Tensor:
    return (system.x[path] - system.F[path]).detach()
