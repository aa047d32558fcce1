"""A memory of the last steps before a segment, with their keys and values in inference."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.projections import projected
from linrec.trees import replaced

__all__ = ["PastSteps", "all_keys_and_values", "keys_and_values"]


class PastSteps(NamedTuple):
    """The last m steps before a segment, oldest first; steps that do not exist are zeros and not alive.

    Attributes:
        h: a vector for each step (b, m, d).
        alive: whether a step is of the row's current sequence (b, m).
        kv: keys, then values, of each step (b, m, 2 w), as `keys_and_values` returns them; (b, m, 0) if they
            are not known.
    """

    h: Float[Tensor, "b m d"]
    alive: Bool[Tensor, "b m"]
    kv: Float[Tensor, "b m c"]

    @classmethod
    def of(cls, h: Float[Tensor, "b m d"], alive: Bool[Tensor, "b m"]) -> "PastSteps":
        """Return steps whose keys and values are not known."""
        return cls(h, alive, h.new_zeros(*h.shape[:2], 0))

    @classmethod
    def empty(cls, batch: int, length: int, width: int, **factory: Any) -> "PastSteps":
        """Return m = `length` steps that do not exist, in the dtype and on the device given."""
        h = torch.zeros(batch, length, width, **factory)
        return cls.of(h, torch.zeros(batch, length, dtype=torch.bool, device=h.device))

    def keyed(self, k: nn.Linear, v: nn.Linear) -> "PastSteps":
        """Return the steps with their keys and values, or without them where gradients are recorded."""
        return replaced(self, kv=keys_and_values(self.h, self.kv, k, v))

    def then(self, steps: "PastSteps") -> "PastSteps":
        """Return the last m steps after t more steps.

        Example:
            >>> memory = PastSteps.empty(1, 3, 1)
            >>> more = PastSteps.of(torch.ones(1, 2, 1), torch.ones(1, 2, dtype=torch.bool))
            >>> memory.then(more).h.flatten()
            tensor([0., 1., 1.])
        """
        return self.evicting(steps)[1]

    def evicting(self, steps: "PastSteps") -> tuple["PastSteps", "PastSteps"]:
        """Return the t steps that leave the memory, oldest first, and the memory after t more steps."""
        time, both = steps.h.shape[1], [torch.cat(parts, 1) for parts in zip(self, steps, strict=True)]
        # views would keep the memory of the other steps
        old, new = zip(*((x[:, :time].clone(), x[:, time:].clone()) for x in both), strict=True)
        return PastSteps(*old), PastSteps(*new)


def keys_and_values(
    h: Float[Tensor, "b n d"], known: Float[Tensor, "b m c"], k: nn.Linear, v: nn.Linear
) -> Float[Tensor, "b n c"]:
    """Return [h W_k | h W_v] for a state, or a tensor of width 0 where gradients are recorded.

    A call with gradients takes keys and values from `h`, so that the gradients of W_k and W_v are whole.

    Args:
        h: the steps (b, n, d).
        known: the result for the first m steps, m <= n; of width 0 if it is not known.
        k: W_k.
        v: W_v.

    Example:
        >>> k, v = nn.Linear(3, 4), nn.Linear(3, 4)
        >>> h, none = torch.zeros(1, 5, 3), torch.zeros(1, 2, 0)
        >>> with torch.no_grad():
        ...     keys_and_values(h, none, k, v).shape
        torch.Size([1, 5, 8])
        >>> keys_and_values(h, none, k, v).shape
        torch.Size([1, 5, 0])
    """
    if torch.is_grad_enabled():
        return h.new_zeros(*h.shape[:2], 0)
    done = known.shape[1] if known.shape[2] else 0
    if 0 < done == h.shape[1]:
        return known
    new = torch.cat(projected(h[:, done:], k, v), -1)
    # a state from outside of autocast has another dtype
    return torch.cat([known.to(new.dtype), new], 1) if done else new


def all_keys_and_values(
    steps: Sequence[tuple[Tensor, Tensor]], k: nn.Linear, v: nn.Linear
) -> tuple[Float[Tensor, "b s w"], Float[Tensor, "b s w"]]:
    """Return keys and values of joined steps: [h_1 | h_2 | ..] W_k and [h_1 | h_2 | ..] W_v.

    Args:
        steps: pairs of steps h_i and of `keys_and_values` of them, newest steps last.
        k: W_k.
        v: W_v.
    """
    h, kv = zip(*steps, strict=True)
    if torch.is_grad_enabled():
        keys, values = projected(torch.cat(h, 1), k, v)
    else:
        keys, values = torch.cat([part.to(kv[-1].dtype) for part in kv], 1).chunk(2, -1)
    return keys, values
