"""Memory that the steps of a generation on the CPU write their states into, again and again."""

import contextlib

from torch import Tensor

from linrec.mixers import State
from linrec.ops.core.kernel import allocated, successors
from linrec.torch_private import references
from linrec.trees import leaves

__all__ = ["StateBuffers"]

# the C library reuses smaller memory by itself
LEAST = 1 << 17


class StateBuffers:
    """Two buffers for each large part of a state, which steps fill in turn.

    The operating system maps new memory page by page, which takes longer than a step of many rows. So a step
    writes its state into a buffer of an earlier one, unless anyone still refers to that: a state that a user,
    a snapshot or a hook holds stays as it is. Kernels without a successor, and GPUs, allocate.
    """

    def __init__(self) -> None:
        # the buffers of each part, and the references to a buffer that is free
        self._buffers: dict[int, list[tuple[Tensor, int]]] = {}

    def following(self, state: State) -> contextlib.AbstractContextManager[None]:
        """Return the context of a step, which may write the state that follows this one into the buffers."""
        large = [(n, part) for n, part in enumerate(leaves(state)) if part.is_cpu and part.nbytes >= LEAST]
        return (
            successors((part, self._free(n, part)) for n, part in large)
            if large
            else contextlib.nullcontext()
        )

    def _free(self, n: int, part: Tensor) -> Tensor:
        """Return a buffer for a part of this shape."""
        kept = [
            (buffer, count)
            for buffer, count in self._buffers.get(n, [])
            if (buffer.shape, buffer.dtype) == (part.shape, part.dtype)
        ]
        for buffer, count in kept:
            if references(buffer) == count:
                return buffer
        buffer = allocated(part, part.device)
        # one that a user holds is replaced
        self._buffers[n] = [*kept[-1:], (buffer, references(buffer))]
        return buffer
