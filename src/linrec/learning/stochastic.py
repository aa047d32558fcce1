"""Unbiased approximations of the influence of weights by random factors: UORO and KF-RTRL."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from linrec.learning.cells import Opened
from linrec.learning.influence import Influence, Traces
from linrec.rules import at_least, require

__all__ = ["KFRTRL", "UORO"]

# keeps the ratio of norms finite where the divisor is zero
TINY = 1e-30


class UORO(Influence):
    """Unbiased online recurrent optimisation: the influence as a product of two vectors.

        A <- r_0 J A + r_1 nu,    B <- B / r_0 + nu^T I / r_1,    nu random signs,    grad = (dl/dh A) B
        r_0 = sqrt(|B| / |J A|) + e,    r_1 = sqrt(|nu^T I| / |nu|) + e

    The expectation over the signs is the exact influence of a layer. The variance grows with the state.
    Equation 72 of the survey prints r_1 in place of 1 / r_1, which is biased.

    `memory["traces"][path]` has A (b, n), and B by the parameters' names. `memory["noise"]["signs"][path]`
    are the signs of the next step, and may be replaced. They are drawn from `memory["noise"]["seeds"]`.

    Args:
        epsilon: e.

    Source:
        Tallec and Ollivier, Unbiased Online Recurrent Optimization (2017), algorithm 1.

    Example:
        >>> from linrec import mixers
        >>> learner = UORO(mixers.build("elman", 4))
        >>> step = learner.step(torch.ones(1, 4), torch.ones(1, 4))
        >>> learner.memory["traces"][""]["A"].shape, learner.memory["noise"]["signs"][""].shape
        (torch.Size([1, 4]), torch.Size([1, 4]))
    """

    name: ClassVar[str] = "uoro"

    def __init__(self, *args: Any, epsilon: float = 1e-7, **options: Any) -> None:
        at_least(0, epsilon=epsilon)
        self.epsilon = epsilon
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"epsilon": self.epsilon}

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        names = sample.by_weights(product.y for product in sample.products)
        return {
            "A": sample.h.new_zeros(sample.h.shape[1]),
            "B": {name: of.new_zeros(of.shape[1:]) for name, of in names.items()},
        }

    @override
    def n_signs(self, sample: Opened) -> int:
        return sample.h.shape[1]

    @override
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        JA, new = step.forward(held["A"]), step.by_weights(step.back(noise)[1])
        r_0 = balance([*held["B"].values()], [JA], self.epsilon)
        r_1 = balance([*new.values()], [noise], self.epsilon)
        A, B = rank_one(r_0, r_1, JA, noise, held["B"], new)
        return {"A": A, "B": B}

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        along = (error * traces["A"]).sum(1)
        return {name: torch.einsum("b,b...->...", along, b) for name, b in traces["B"].items()}


class KFRTRL(Influence):
    """Kronecker-factored real-time recurrent learning: the influence as a Kronecker product.

        A <- c_0 p_0 A + c_1 p_1 a,    B <- c_0 / p_0 J B + c_1 / p_1 diag(D),    grad_W = (dl/dh B)^T A
        p_0 = sqrt(|J B| / |A|),    p_1 = sqrt(|diag(D)| / |a|),    c_0 and c_1 random signs

    a (m,) is the vector that the weights multiply, such as (h_{t-1}, x_t, 1), and D (n,) the derivative of
    h_t by the product W a. So all products of a layer must add up before a function of channels, as in
    `elman`.

    `memory["traces"][path]` has B (b, n, n), and A by the parameters' names. `memory["noise"]["signs"][path]`
    are c_0 and c_1 of the next step, and may be replaced.

    Source:
        Mujika, Meier and Steger, Approximating Real-Time Recurrent Learning with Random Kronecker Factors
        (2018), algorithm 1.

    Example:
        >>> from linrec import mixers
        >>> learner = KFRTRL(mixers.build("elman", 4))
        >>> step = learner.step(torch.ones(1, 4), torch.ones(1, 4))
        >>> sorted(learner.memory["traces"][""]["A"])[:2]
        ['rnn.bias_hh_l0', 'rnn.bias_ih_l0']
    """

    name: ClassVar[str] = "kf_rtrl"

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        by_y = sample.jacobians()[1]
        units = range(sample.h.shape[1])
        require(
            all(
                y.shape == by_y[0].shape
                and y.equal(by_y[0])
                and y[units, :, units].count_nonzero() == y.count_nonzero()
                for y in by_y
            ),
            f"the weights of `{path or 'model'}` must multiply one vector, as in 'elman', for `{self.name}`. "
            "Take 'uoro' or 'snap'.",
        )
        n = len(units)
        return {"A": {name: a[0] * 0 for name, a in _inputs(sample).items()}, "B": sample.h.new_zeros(n, n)}

    @override
    def n_signs(self, sample: Opened) -> int:
        return 2

    @override
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        J, by_y = step.jacobians()
        JB, D, a = J @ held["B"], by_y[0].transpose(0, 1), _inputs(step)
        p_0, p_1 = balance([JB], [*held["A"].values()]), balance([D], [*a.values()])
        c_0, c_1 = noise.unbind(1)
        A = {name: scaled(c_0 * p_0, of) + scaled(c_1 * p_1, a[name]) for name, of in held["A"].items()}
        return {"A": A, "B": scaled(c_0 / p_0, JB) + scaled(c_1 / p_1, D)}

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        by_units = torch.einsum("bn,bnm->bm", error, traces["B"])
        return {
            name: torch.einsum("bn,bd->nd", by_units, a).view_as(step.weights[name])
            for name, a in traces["A"].items()
        }


def balance(above: list[Tensor], below: list[Tensor], epsilon: float = 0.0) -> Float[Tensor, "b"]:
    """Return sqrt(|above| / |below|) + epsilon of each row, the factor that makes both norms equal."""
    norms = [
        torch.stack([part.flatten(1).square().sum(1) for part in parts]).sum(0).sqrt()
        for parts in (above, below)
    ]
    return (norms[0] / norms[1].clamp(min=TINY)).sqrt().clamp(min=TINY) + epsilon


def rank_one(
    r_0: Tensor, r_1: Tensor, JA: Tensor, nu: Tensor, B: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return A and B of UORO after a step."""
    after = {name: scaled(1 / r_0, b) + scaled(1 / r_1, new[name]) for name, b in B.items()}
    return scaled(r_0, JA) + scaled(r_1, nu), after


def scaled(factor: Float[Tensor, "b"], tensor: Float[Tensor, "b *n"]) -> Tensor:
    """Return each row times its factor."""
    return factor.reshape(-1, *[1] * (tensor.dim() - 1)) * tensor


def _inputs(step: Opened) -> dict[str, Tensor]:
    """Return x of each weight, and 1 for each bias, (b, d), of those that learn."""
    found: dict[str, Tensor] = {}
    for product in step.products:
        one = product.x.new_ones(len(product.x), 1)
        for name, x in ((product.weight, product.x), (product.bias, one)):
            if name is not None and name in step.weights:
                found[name] = x
    return found
