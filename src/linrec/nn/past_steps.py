"""A memory of the last steps before a segment."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["PastSteps"]


class PastSteps(NamedTuple):
    """The last m steps before a segment, oldest first; steps that do not exist are zeros and not alive.

    Attributes:
        h: a vector for each step (b, m, d).
        alive: whether a step is of the row's current sequence (b, m).
    """

    h: Float[Tensor, "b m d"]
    alive: Bool[Tensor, "b m"]

    @classmethod
    def empty(cls, batch: int, length: int, width: int, **factory: Any) -> "PastSteps":
        """Return m = `length` steps that do not exist, in the dtype and on the device given."""
        h = torch.zeros(batch, length, width, **factory)
        return cls(h, torch.zeros(batch, length, dtype=torch.bool, device=h.device))

    def then(self, h: Float[Tensor, "b t d"], alive: Bool[Tensor, "b t"]) -> "PastSteps":
        """Return the last m steps after t more steps.

        Example:
            >>> memory = PastSteps.empty(1, 3, 1)
            >>> memory.then(torch.ones(1, 2, 1), torch.ones(1, 2, dtype=torch.bool)).h.flatten()
            tensor([0., 1., 1.])
        """
        return self.evicting(h, alive)[1]

    def evicting(
        self, h: Float[Tensor, "b t d"], alive: Bool[Tensor, "b t"]
    ) -> tuple["PastSteps", "PastSteps"]:
        """Return the t steps that leave the memory, oldest first, and the memory after t more steps."""
        steps, both = h.shape[1], (torch.cat([self.h, h], 1), torch.cat([self.alive, alive], 1))
        # views would keep the memory of the other steps
        old, new = zip(*((x[:, :steps].clone(), x[:, steps:].clone()) for x in both), strict=True)
        return PastSteps(*old), PastSteps(*new)
