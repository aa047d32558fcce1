"""The state that a batch leaves to the next batch."""

import torch
from torch import Tensor

from linrec.trees import Tree, leaves, map_tree

__all__ = ["Carried"]


class Carried:
    """The state after a batch, with which the sequences of the next batch begin.

    The tensors stay where they are while the state has one form, also over `clear`. So a step that is
    captured as a CUDA graph can read and write them.

    Example:
        >>> import torch
        >>> carried = Carried()
        >>> carried.keep((torch.ones(2, 3), None))
        >>> before = carried.state[0]
        >>> carried.clear()
        >>> carried.state is None
        True
        >>> carried.keep((torch.zeros(2, 3), None))
        >>> carried.state[0] is before, before.sum()
        (True, tensor(0.))
    """

    def __init__(self) -> None:
        self._held: Tree = None
        self._is_empty = True

    @property
    def state(self) -> Tree:
        """The state after the last batch; None at the start of an epoch."""
        return None if self._is_empty else self._held

    def clear(self) -> None:
        """Let the next batch begin with the model's initial state."""
        self._is_empty = True

    def keep(self, state: Tree) -> None:
        """Keep a copy of a state without gradients, in place of the state before."""
        if _form(state) != _form(self._held):
            # contiguous: parts may be views of each other or expanded, and could not be written in place
            self._held = map_tree(lambda part: part.clone(memory_format=torch.contiguous_format), state)
        else:
            held = leaves(self._held)
            places = {part.untyped_storage().data_ptr() for part in held}
            for mine, part in zip(held, _apart(leaves(state), places), strict=True):
                mine.copy_(part)
        self._is_empty = False


def _apart(parts: list[Tensor], places: set[int]) -> list[Tensor]:
    """Return tensors, and copies of those in `places`, which would change while the parts are written."""
    return [part.clone() if part.untyped_storage().data_ptr() in places else part for part in parts]


def _form(state: Tree) -> Tree:
    return map_tree(lambda part: (part.shape, part.dtype), state)
