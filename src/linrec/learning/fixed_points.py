"""Recurrent backpropagation: gradients at a fixed point of the state, in the memory of a single step.

h = F(h, x, theta),    z = (I - J^T)^{-1} dl/dh,    grad = z^T dF/dtheta,    J = dF/dh at h
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from linrec.learning.cells import Opened
from linrec.learning.influence import Influence, Traces
from linrec.learning.learner import Learnt, Piece
from linrec.rules import at_least, positive
from linrec.trees import Tree, map_tree

__all__ = ["CGRBP", "RBP", "FixedPoint", "NeumannRBP"]

Product = Callable[[Tensor], Tensor]


def neumann(transposed: Product, v: Float[Tensor, "b n"], terms: int) -> Float[Tensor, "b n"]:
    """Return sum_{k=0}^{terms} (J^T)^k v, for `transposed` v -> J^T v."""
    z = power = v
    for _ in range(terms):
        power = transposed(power)
        z = z + power
    return z


def iterated(
    transposed: Product, v: Float[Tensor, "b n"], tolerance: float, most: int
) -> Float[Tensor, "b n"]:
    """Return z of z = J^T z + v by iteration; a row ends when no entry changes by over `tolerance` |v|."""
    z, left = v, torch.ones_like(v[:, :1], dtype=torch.bool)
    for _ in range(most):
        new = torch.where(left, transposed(z) + v, z)
        left = (new - z).abs().amax(1, keepdim=True) > tolerance * v.abs().amax(1, keepdim=True)
        z = new
        if not left.any():
            break
    return z


def conjugate_gradients(
    forward: Product, transposed: Product, v: Float[Tensor, "b n"], tolerance: float, most: int
) -> Float[Tensor, "b n"]:
    """Return z of (I - J) (I - J^T) z = (I - J) v; a row ends when its residual is below `tolerance`."""
    z, r = torch.zeros_like(v), v - forward(v)
    p, square = r, (r * r).sum(1, keepdim=True)
    end = tolerance**2 * square
    for _ in range(most):
        left = square > end
        if not left.any():
            break
        q = p - transposed(p)
        q = q - forward(q)
        step = torch.where(left, square / (p * q).sum(1, keepdim=True), 0)
        z, r = z + step * p, r - step * q
        last, square = square, (r * r).sum(1, keepdim=True)
        p = r + torch.where(left, square / last, 0) * p
    return z


class FixedPoint(Influence):
    """Base class of learners whose last step of a chunk is a fixed point, to which earlier steps only lead.

    Inputs are constant over a chunk. The target of the last step alone gives a gradient; give the others the
    weight 0. Memory does not grow with the chunk. In a stack, errors pass from fixed point to fixed point.

    Args:
        contraction: factor of the penalty |relu(1^T J - bound)| at the fixed point, summed over the rows with
            an error, which keeps the state contracting; 0 disables it.
        bound: bound of the column sums of J.

    The other arguments are those of `Learner`.

    Source of the penalty:
        Linsley, Ashok, Govindarajan, Liu and Serre, Stable and Expressive Recurrent Vision Models (2020).
    """

    traces: ClassVar[bool] = False

    def __init__(self, *args: Any, contraction: float = 0.0, bound: float = 0.9, **options: Any) -> None:
        at_least(0, contraction=contraction, cure="0 disables the penalty.")
        positive(bound=bound)
        self.contraction, self.bound = contraction, bound
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"contraction": self.contraction, "bound": self.bound}

    @override
    def piece_end(self, step: int) -> int | None:
        return None

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        lead = map_tree(lambda x: x[:, :-1], piece)
        last = map_tree(lambda x: x[:, -1:], piece)
        if not lead.inputs.shape[1]:
            return super().learn(last, memory)
        with torch.no_grad():
            prediction, state = self.run(lead.inputs, memory["state"], lead.reset)
        learnt = super().learn(last, memory | {"state": state})
        return learnt._replace(
            prediction=torch.cat([prediction, learnt.prediction], 1),
            loss=torch.cat([self.loss(prediction, lead.targets), learnt.loss], 1),
        )

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        return {}

    @override
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        return {}

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        if not self.contraction:
            return {}
        weights = [*step.weights.values()]
        near = torch.autograd.grad(step.h, weights, error, retain_graph=True)
        ones = (error != 0).any(1, keepdim=True).expand_as(error).to(error.dtype)
        (sums,) = torch.autograd.grad(step.h, step.before, ones, create_graph=True)
        penalty = self.contraction * (sums - self.bound).relu().norm(dim=1).sum()
        more = torch.autograd.grad(penalty, weights, retain_graph=True, materialize_grads=True)
        return {name: a + b for name, a, b in zip(step.weights, near, more, strict=True)}


class RBP(FixedPoint):
    """Recurrent backpropagation: z by the iteration z <- J^T z + v, v = dl/dh.

    It converges where the state does, as fast.

    Args:
        tolerance: largest change of z that ends the iteration, relative to v.
        iterations: largest number of iterations.

    The other arguments are those of `FixedPoint`.

    Source:
        Almeida (1987); Pineda (1987); equations 67 to 70 of the survey.

    Example:
        >>> from linrec import mixers
        >>> learner = RBP(mixers.build("elman", 4))
        >>> x = torch.ones(1, 50, 4)
        >>> weight = torch.arange(50)[None] == 49
        >>> learner.chunk(x, torch.zeros_like(x), weight=weight.float()).loss.shape
        torch.Size([1, 50])
    """

    name: ClassVar[str] = "rbp"

    def __init__(self, *args: Any, tolerance: float = 1e-6, iterations: int = 100, **options: Any) -> None:
        positive(tolerance=tolerance)
        at_least(1, iterations=iterations)
        self.tolerance, self.iterations = tolerance, iterations
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"tolerance": self.tolerance, "iterations": self.iterations}

    @override
    def settled(self, step: Opened, error: Tensor) -> Tensor:
        return iterated(lambda z: step.back(z)[0], error, self.tolerance, self.iterations)


class CGRBP(RBP):
    """Recurrent backpropagation with z by conjugate gradients: (I - J) (I - J^T) z = (I - J) v.

    Each iteration is a forward and a backward pass of a step. It needs no contraction, but an I - J that is
    not singular. The arguments are those of `RBP`.

    Source:
        Liao, Xiong, Fetaya, Zhang, Yoon, Pitkow, Urtasun and Zemel, Reviving and Improving Recurrent
        Back-Propagation (2018), section 4.1.
    """

    name: ClassVar[str] = "rbp_cg"

    @override
    def settled(self, step: Opened, error: Tensor) -> Tensor:
        return conjugate_gradients(
            step.forward, lambda z: step.back(z)[0], error, self.tolerance, self.iterations
        )


class NeumannRBP(FixedPoint):
    """Recurrent backpropagation with z by the first terms of the Neumann series, sum_{k=0}^{K} (J^T)^k v.

    At a fixed point, K terms beside v are backpropagation through the last K + 1 steps, in the memory of one.

    Args:
        terms: K.

    The other arguments are those of `FixedPoint`.

    Source:
        Liao and others (2018), section 4.2.
    """

    name: ClassVar[str] = "rbp_neumann"

    def __init__(self, *args: Any, terms: int = 20, **options: Any) -> None:
        at_least(0, terms=terms)
        self.terms = terms
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"terms": self.terms}

    @override
    def settled(self, step: Opened, error: Tensor) -> Tensor:
        return neumann(lambda z: step.back(z)[0], error, self.terms)
