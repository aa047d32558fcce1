"""Python's garbage collector during captures of CUDA graphs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage be collected within the context.

    If an old CUDA graph is part of a cycle of garbage, and the cycle is collected while another graph is
    captured, the capture fails with `cudaErrorStreamCaptureInvalidated`.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
