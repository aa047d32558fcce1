"""Memory of a device: its peak, giving it back, and having too little of it."""

import gc
import traceback

import torch

from perf.peers import UnsuitedError, reason

OUT_OF_MEMORY = "out of memory"


def why(error: Exception) -> str:
    """Return why something was not measured, as one short line: "out of memory" where that is the reason.

    An error that hides another, as one of capturing a CUDA graph does, is looked through.

    Example:
        >>> why(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."))
        'out of memory'
        >>> why(ValueError("no such thing"))
        'ValueError: no such thing'
    """
    found: BaseException | None = error
    while found is not None:
        # the frameworks' other parts, such as Triton and cuBLAS, have no type of error for it
        spoken = str(found)
        if (
            isinstance(found, torch.OutOfMemoryError)
            or OUT_OF_MEMORY in spoken
            or "CUBLAS_STATUS_ALLOC_FAILED" in spoken
        ):
            return OUT_OF_MEMORY
        found = found.__cause__ or found.__context__
    if not isinstance(error, UnsuitedError):
        # where it was raised, for the reader of a long run's output
        traceback.print_exception(error)
    return reason(error)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more, cycles included, and begin a new peak; on CUDA alone."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors take now; None where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that tensors took since `release`; None where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
