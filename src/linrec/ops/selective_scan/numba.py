"""The selective scan on the CPU by Numba: states stay in the caches of threads."""

import math
from typing import Any

from torch import Tensor

from linrec.ops.kernels import Kernels, lanes
from linrec.ops.selective_scan.torch import Outputs, add_up, kernel, outputs, terms

CHUNK = 32
"""Steps from one kept state to the next: what the adjoint makes for them stays in the second cache."""

# entries of a state that take as long as one element of the operators that `lanes` was measured with
_ENTRIES = 4
# entries of the states of a lane: they stay in the first cache
_OF_A_LANE = 2048

KERNELS = Kernels("selective_numba")


def width_of(x: Tensor, n: int, threads: int) -> int:
    """Return how many channels a lane has: whole cache lines, as many as keep its states in the first one."""
    batch, _, channels = x.shape
    blocks = threads // math.gcd(batch, threads)
    width = min(math.ceil(channels / blocks / 16), max(_OF_A_LANE // n // 16, 1))
    return 16 * max(width, 1)


def _memory(given: Any, keep: bool) -> Any:
    chunks = math.ceil(given.x.shape[1] / CHUNK) if keep else 0
    return outputs(given, chunks, given.A.shape[1], given.state.dtype)


def _forward(out: Outputs, given: Any) -> None:
    x, n = given.x, given.A.shape[1]
    out.last.copy_(given.state)
    with lanes.threads_for(x.numel() * n // _ENTRIES) as threads:
        width = width_of(x, n, threads)
        arrays = *_arrays(given), out.last.numpy(), out.starts.numpy(), out.y.numpy()
        lanes.run(KERNELS, "forward", (*arrays, CHUNK, width), lanes.count(x, width), threads)


def _adjoint(out: Any, given: Any, kept: Outputs, d: Outputs) -> None:
    x, n = given.x, given.A.shape[1]
    out.state.copy_(d.last)
    # sums over batch rows, and over the lanes of a row
    totals = out.A, out.B[None], out.C[None], out.D
    with lanes.threads_for(x.numel() * n // _ENTRIES) as threads:
        width = width_of(x, n, threads)
        counts = len(x), *[math.ceil(x.shape[2] / width)] * 2, len(x)
        parts = [terms(g, (count, *g.shape[1:])) for g, count in zip(totals, counts, strict=True)]
        # what the kernel adds up, it does not write first
        parts[0].zero_(), parts[3].zero_()
        found = (g.numpy() for g in (out.x, out.dt, *parts, out.state))
        arrays = *_arrays(given), lanes.array(kept.starts), lanes.array(d.y), *found
        lanes.run(KERNELS, "backward", (*arrays, CHUNK, width), lanes.count(x, width), threads)
    for total, part in zip(totals, parts, strict=True):
        add_up(total, part)


def _arrays(given: Any) -> list[Any]:
    return [*map(lanes.array, given[:6]), lanes.cut_array(given.reset)]


recurrent = kernel("selective_scan_numba", memory=_memory, forward=_forward, adjoint=_adjoint)
