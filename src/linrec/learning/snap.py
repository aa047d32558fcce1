"""SnAp: the influence of weights on the units that they reach within n steps."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from linrec.learning.cells import Opened
from linrec.learning.influence import Influence, Traces
from linrec.rules import at_least

__all__ = ["SnAp"]


class SnAp(Influence):
    """Sparse n-step approximation of real-time recurrent learning.

        M_t = mask * (J_t M_{t-1} + I_t)

    The mask keeps the influence of weight z on unit k where z reaches k within n steps. It is computed from
    the nonzero entries of I and J at a random state when the learner is built. With dense recurrent weights,
    n = 2 is exact, and saves no time. n = 1 is exact for element-wise recurrences.

    `memory["traces"][path][name]` is M (b, state, *shape of the parameter), zeros included. For n = 1, the
    learner `ostl` with `recurrent=True` stores a number per weight.

    Args:
        n: steps within which an influence counts.

    Source:
        Menick, Elsen, Evci, Osindero, Simonyan and Graves, Practical Real Time Recurrent Learning with a
        Sparse Approximation (2020), equation 4.

    Example:
        >>> from linrec import mixers
        >>> learner = SnAp(mixers.build("elman", 4), n=1)
        >>> step = learner.step(torch.ones(1, 4), torch.ones(1, 4))
        >>> learner.memory["traces"][""]["rnn.weight_hh_l0"].shape
        torch.Size([1, 4, 4, 4])
    """

    name: ClassVar[str] = "snap"

    def __init__(self, *args: Any, n: int = 1, **options: Any) -> None:
        at_least(1, n=n)
        self.n = n
        self.masks: dict[str, dict[str, Tensor]] = {}
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"n": self.n}

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        J, direct = _jacobians(sample)
        reaches, masks = J.ne(0).any(0).to(J.dtype), {name: i.ne(0).any(0) for name, i in direct.items()}
        for _ in range(self.n - 1):
            masks = {
                name: mask | torch.einsum("nm,m...->n...", reaches, mask.to(J.dtype)).ne(0)
                for name, mask in masks.items()
            }
        self.masks[path] = masks
        return {name: i.new_zeros(i.shape[1:]) for name, i in direct.items()}

    @override
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        J, direct = _jacobians(step)
        return {
            name: mask * (torch.einsum("bnm,bm...->bn...", J, held[name]) + direct[name])
            for name, mask in self.masks[path].items()
        }

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        return {name: torch.einsum("bn,bn...->...", error, M) for name, M in traces.items()}


def _jacobians(step: Opened) -> tuple[Tensor, dict[str, Tensor]]:
    """Return J (b, n, n), and I (b, n, *shape) of each weight and bias."""
    J, by_y = step.jacobians()
    return J, {name: of.transpose(0, 1) for name, of in step.by_weights(by_y).items()}
