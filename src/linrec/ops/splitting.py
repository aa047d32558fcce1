"""Who runs an operator while the steps of its sequences are split over processes.

Every operator looks here once its arguments are checked. `linrec.parallel.time_parallel` puts something here;
without it, nothing happens.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from linrec.ops.dispatch import Pair


class Split(ABC):
    """Runs operators on this process's part of the steps; arguments and results are those of the operator."""

    @abstractmethod
    def scan(
        self, a: Tensor, x: Tensor, state: Tensor | None, reset: Tensor | None, reverse: bool, pair: Pair
    ) -> tuple[Tensor, Tensor]:
        """Run `linrec.ops.scan`."""

    @abstractmethod
    def gate_loop(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        phase: Tensor | None,
        bonus: Tensor | None,
        state: Tensor | None,
        reset: Tensor | None,
        pair: Pair,
    ) -> tuple[Tensor, Tensor]:
        """Run `linrec.ops.gate_loop`."""


# of the process, not of a thread: a checkpointed forward pass runs again in a thread of autograd's
current: Split | None = None


@contextlib.contextmanager
def using(split: Split | None) -> Iterator[None]:
    """Let operators run by `split`, or, where it is None, on all steps that they are given, by themselves."""
    global current
    before, current = current, split
    try:
        yield
    finally:
        current = before


def refuse(name: str) -> None:
    """Raise where steps are split: for what needs all steps of a sequence at once.

    Args:
        name: what cannot run, as its users call it.

    Raises:
        ValueError: a split is in use.

    Example:
        >>> refuse("attention")
    """
    if current is not None:
        raise ValueError(
            f"`{name}` needs all steps of a sequence in one process; within `time_parallel` each has a part. "
            "Use causal mixers on `scan` or `gate_loop`, or give each process some of the batch instead."
        )
