"""Pairs of steps that see each other, for mixers that weigh steps by their positions and have a cache."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from linrec.nn.positions import positions
from linrec.ops.core.isolation import Isolation, beside, documents

__all__ = ["SeenSteps"]


class SeenSteps:
    """Positions of s cached and t new steps, and the pairs of steps that a mixer may combine.

    A cache has the positions of its steps, (b, s) int64, and -1 where a reset has cut a step off.

    Args:
        cached: positions of the cached steps (b, s).
        time: new steps t.
        reset: (b, t) bool; true where a new sequence starts.
        causal: whether a step sees the steps up to itself, or its whole document.

    Attributes:
        new: position of each new step, (b, t).
        position: position of each cached and new step, (b, s + t); -1 where the cache says so.
        visible: whether each new step sees each step, (b, t, s + t).
    """

    new: Int[Tensor, "b t"]
    position: Int[Tensor, "b n"]
    visible: Bool[Tensor, "b t n"]

    def __init__(self, cached: Tensor, time: int, *, reset: Tensor | None, causal: bool = True) -> None:
        self.cached = cached.shape[1]
        last = functional.pad(cached, (1, 0), value=-1)[:, -1]
        self.new, _ = positions(last + 1, time, reset=reset)
        self.position = torch.cat([cached, self.new], 1)
        document = torch.zeros_like(self.new) if reset is None else documents(reset)
        # of cached steps 0, or -1 where a reset has cut it off
        self._document = torch.cat([cached.clamp(max=0), document], 1)
        same = document[:, :, None] == self._document[:, None]
        self.causal, self.visible = causal, same.tril(self.cached) if causal else same
        # a weight of zero would let NaN pass a reset
        self._isolation = None if reset is None else Isolation(self._document)

    def entered(self, x: Float[Tensor, "b n *d"], *, carried: bool = True) -> Float[Tensor, "b n *d"]:
        """Return inputs of the last n steps without non-finite numbers, if there are resets.

        Args:
            x: the inputs (b, n, ..).
            carried: whether an input has an influence on the outputs of other steps.
        """
        if self._isolation is None:
            return x
        return self._isolation.enter(x, begin=self.position.shape[1] - x.shape[1], carried=carried)

    def left(self, y: Float[Tensor, "b t *d"]) -> Float[Tensor, "b t *d"]:
        """Return outputs of the new steps, with NaN where `entered` removed an input that they depend on."""
        if self._isolation is None:
            return y
        return self._isolation.leave(y, begin=self.cached, causal=self.causal)

    def kept(self, x: Shaped[Tensor, "b n *d"], *, fill: int = 0) -> Shaped[Tensor, "b n *d"]:
        """Return a tensor of cached and new steps with `fill` in the steps before the last reset."""
        if self._isolation is None:
            return x
        cut = self._document != self._document[:, -1:]
        return x.masked_fill(beside(cut, x), fill)

    @property
    def kept_position(self) -> Int[Tensor, "b n"]:
        """Positions for the next cache."""
        return self.kept(self.position, fill=-1)
