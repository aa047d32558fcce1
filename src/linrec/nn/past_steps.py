"""A memory of the last steps before a segment, with their keys and values in inference."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from linrec.nn.projections import projected
from linrec.trees import replaced

__all__ = [
    "PastSteps",
    "Steps",
    "all_keys_and_values",
    "extended",
    "joined",
    "keys_and_values",
    "last_steps",
]

# steps of a segment (b, r, d), and `keys_and_values` of them
Steps: TypeAlias = tuple[Tensor, Tensor]


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
        return PastSteps(*map(last_steps, self, steps))

    def evicting(self, steps: "PastSteps") -> tuple["PastSteps", "PastSteps"]:
        """Return the t steps that leave the memory, oldest first, and the memory after t more steps."""
        time, left = steps.h.shape[1], max(0, steps.h.shape[1] - self.h.shape[1])
        old = (joined(x[:, :time], y[:, :left]) for x, y in zip(self, steps, strict=True))
        return PastSteps(*old), self.then(steps)

    @property
    def no_steps(self) -> Steps:
        """Return the cached steps of an empty segment."""
        return self.h[:, :0], self.kv[:, :0]


def joined(old: Shaped[Tensor, "b m *d"], new: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b n *d"]:
    """Return [old | new], a copy in the dtype of new: a state from outside of autocast has another dtype.

    Example:
        >>> joined(torch.zeros(1, 2), torch.ones(1, 1)).tolist()
        [[0.0, 0.0, 1.0]]
    """
    return torch.cat([old.to(new.dtype), new], 1)


def last_steps(old: Shaped[Tensor, "b m *d"], new: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b m *d"]:
    """Return the last m steps of [old | new], as many as `old` has: a copy, in the dtype of new.

    A view would keep the memory of the other steps.

    Example:
        >>> last_steps(torch.zeros(1, 3), torch.ones(1, 2)).tolist()
        [[0.0, 1.0, 1.0]]
    """
    time = new.shape[1]
    return joined(old[:, time:], new[:, max(0, time - old.shape[1]) :])


def extended(segment: Steps, x: Float[Tensor, "b t d"], k: nn.Linear, v: nn.Linear) -> Steps:
    """Return the cached steps of a segment with new steps x behind them, in the dtype of the cached steps.

    Args:
        segment: the cached steps.
        x: inputs at the new steps.
        k: W_k.
        v: W_v.
    """
    h = torch.cat([segment[0], x.to(segment[0].dtype)], 1)
    return h, keys_and_values(h, segment[1], k, v)


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
    return joined(known, new) if done else new


def all_keys_and_values(
    memories: Sequence[PastSteps], segment: Steps, k: nn.Linear, v: nn.Linear
) -> tuple[Float[Tensor, "b s w"], Float[Tensor, "b s w"]]:
    """Return keys and values of memories m_i and a segment h: [m_1 | m_2 | .. | h] W_k and W_v.

    Args:
        memories: memories with their keys and values, as `PastSteps.keyed` returns them, oldest first.
        segment: steps of the segment.
        k: W_k.
        v: W_v.
    """
    h, kv = segment
    if torch.is_grad_enabled():
        keys, values = projected(torch.cat([*(memory.h for memory in memories), h], 1), k, v)
    else:
        known = torch.cat([*(memory.kv.to(kv.dtype) for memory in memories), kv], 1)
        keys, values = known.chunk(2, -1)
    return keys, values
