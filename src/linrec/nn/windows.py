"""Windows on the steps before each step: pairs of steps in memory linear in the length."""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.loop import blocks, joined
from linrec.ops.core.machine import exporting

__all__ = ["Windows"]


class Windows:
    """Blocks of consecutive steps; each sees itself and the `size` steps before it.

    Args:
        time: steps t.
        size: steps that a block sees before itself, and the longest block.

    Attributes:
        block: steps of a block.

    Example:
        >>> windows = Windows(4, 2)
        >>> x = torch.arange(4.0).reshape(1, 4, 1)
        >>> windows.steps(x)[..., 0].tolist()
        [[[0.0, 1.0], [2.0, 3.0]]]
        >>> windows.behind(torch.cat([-torch.ones(1, 2, 1), x], 1)).tolist()
        [[[[-1.0, -1.0, 0.0, 1.0]], [[0.0, 1.0, 2.0, 3.0]]]]
        >>> windows.age().tolist()
        [[2, 1, 0, -1], [3, 2, 1, 0]]
    """

    def __init__(self, time: int, size: int) -> None:
        self.time, self.size = time, size
        # one exported program serves all lengths
        self.block = size if exporting() else max(1, min(time, size))
        # without steps there is a block of zeros
        self._missing = 0 if exporting() else max(self.block - time, -time % self.block)

    def steps(self, x: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b count block *d"]:
        """Return the steps of every block, with zeros after the last one."""
        if exporting():
            return blocks(x, self.size, 1)
        return self._padded(x).unflatten(1, (-1, self.block))

    def behind(self, x: Shaped[Tensor, "b size+t d"]) -> Shaped[Tensor, "b count d size+block"]:
        """Return the part of `x` that every block sees; the first block begins after `size` steps."""
        if exporting():
            return blocks(x, self.size, 1, overlap=self.size).mT
        return self._padded(x).unfold(1, self.size + self.block, self.block)

    def age(self, device: torch.device | None = None) -> Int[Tensor, "block size+block"]:
        """Return how many steps each step of a block comes after each step that the block sees."""
        step = torch.arange(self.size, self.size + self.block, device=device)[:, None]
        return step - torch.arange(self.size + self.block, device=device)

    def joined(self, x: Shaped[Tensor, "b count block d"]) -> Shaped[Tensor, "b t d"]:
        """Return the steps of all blocks."""
        return joined(x, self.time, 1) if exporting() else x.flatten(1, 2)[:, : self.time]

    def _padded(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0) * (x.dim() - 2) + (0, self._missing))
