"""Backpropagation through time: of whole sequences, and truncated at windows."""

from typing import Any, ClassVar

import torch
from typing_extensions import override

from linrec.learning.learner import Learner, Learnt, Piece
from linrec.rules import at_least
from linrec.trees import Tree

__all__ = ["BPTT", "TBPTT"]


class TBPTT(Learner):
    """Backpropagation through time, truncated: gradients do not pass the boundaries of windows.

    The state is carried over a boundary, and held constant there. Between windows, the memory is the state;
    within a window, also its activations. The bias: steps before the window get no credit.

    Args:
        window: steps K of a window, counted from the start of the stream. None makes each chunk a window.

    The other arguments are those of `Learner`.

    Source:
        Williams and Peng, An Efficient Gradient-Based Algorithm for On-Line Training of Recurrent Network
        Trajectories (1990).

    Example:
        >>> from linrec import mixers
        >>> learner = TBPTT(mixers.build("lru", 4), window=2)
        >>> learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4)).loss.shape
        torch.Size([1, 6])
    """

    name: ClassVar[str] = "tbptt"

    def __init__(self, *args: Any, window: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        at_least(1, window=window, or_none=True, cure="None makes each chunk a window.")
        self.window = window

    @override
    def step(self, *args: Any, **options: Any) -> Any:
        """Learn from one step, which is a window of its own: only with `window` 1 or None."""
        if self.window not in (1, None):
            raise ValueError(
                f"`{self.name}` with windows of {self.window} steps learns from chunks. Call `chunk`, or "
                "build it with `window=1`."
            )
        return super().step(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"window": self.window}

    @override
    def piece_end(self, step: int) -> int | None:
        return None if self.window is None else (step // self.window + 1) * self.window

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        prediction, state = self.run(piece.inputs, memory["state"], piece.reset)
        loss = self.loss(prediction, piece.targets)
        gradients = torch.autograd.grad(self.weighted(loss, piece.weight), self.parameters, allow_unused=True)
        return Learnt(prediction, loss, gradients, {"state": state})


class BPTT(TBPTT):
    """Backpropagation through time: each chunk is a whole sequence, from the initial state on. Exact.

    The arguments are those of `Learner`.

    Example:
        >>> from linrec import mixers
        >>> learner = BPTT(mixers.build("gru", 4))
        >>> learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4)).updated
        False
    """

    name: ClassVar[str] = "bptt"
    chunk_only: ClassVar[str | None] = "the gradient of a sequence needs all of its steps at once."

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.update_every != "chunk":
            raise ValueError(f"`update_every` of `bptt` must be 'chunk'; got {self.update_every}.")

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        return super().learn(piece, self.first_memory(len(piece.inputs), piece.inputs.device))
