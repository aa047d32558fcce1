"""Several mixers that run over one sequence."""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.mixer import Mixer, State
from linrec.rules import require
from linrec.trees import leaves

__all__ = ["ParallelMixers"]


class ParallelMixers(nn.ModuleList):
    """C^f = mixer^f(x), f = 1 .. F, with states of constant size.

    Args:
        mixers: mixers of one kind.
        name: the argument that names the kind, for the error.

    Raises:
        ValueError: mixers with a growing state or with segments.

    Example:
        >>> from linrec.mixers import build
        >>> filters = ParallelMixers((build("s5", 4) for _ in range(3)), name="ssm")
        >>> C, states = filters(torch.zeros(2, 5, 4), filters.init_state(2))
        >>> len(C), C[0].shape, len(states)
        (3, torch.Size([2, 5, 4]), 3)
    """

    def __init__(self, mixers: Iterable[Mixer], *, name: str) -> None:
        super().__init__(mixers)
        first = next(self.each())
        require(
            first.segment_length is None
            and all(x.numel() for x in leaves(first.init_state(1, device="meta"))),
            f"`{name}` must be a mixer with a state of constant size and without segments; got "
            f'{type(first).__name__}. Choose a recurrence, such as "s5" or "s4d".',
        )

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        states: tuple[State, ...],
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[list[Float[Tensor, "b t d"]], tuple[State, ...]]:
        """Return the outputs and the states of all mixers; the arguments are those of a mixer."""
        each = zip(self.each(), states, strict=True)
        C, states = zip(*(mixer(x, state, reset=reset) for mixer, state in each), strict=True)
        return list(C), states

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> tuple[State, ...]:
        """Return the states of all mixers at the start of `batch` sequences."""
        return tuple(mixer.init_state(batch, device=device) for mixer in self.each())

    def each(self) -> Iterator[Mixer]:
        """Return the mixers."""
        return cast(Iterator[Mixer], iter(self))

    @property
    def recurrence(self) -> str | None:
        """Return the operator that is the memory of a mixer, as in `Mixer`."""
        return next(self.each()).recurrence
