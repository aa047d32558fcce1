"""The selective scan on the CPU by Numba: states stay in the caches of threads."""

import math
from typing import Any

from torch import Tensor

from linrec.ops.core.kernel import Gradients, Space, add_up, terms
from linrec.ops.kernels import launch
from linrec.ops.kernels.launch import Kernels
from linrec.ops.selective_scan.torch import Group, Outputs, kernel, outputs

CHUNK = 32
"""Number of steps between saved states; the states that the adjoint recomputes fit into the L2 cache."""

# entries of a state that cost as much as an element of the operators with which `launch.SERIAL` was measured
_ENTRIES = 4
# entries of the states of a lane, which fit into the L1 cache
_OF_A_LANE = 2048

KERNELS = Kernels("selective.numba")


def width_of(x: Tensor, n: int, threads: int) -> int:
    """Return the number of channels per lane: whole cache lines, with states that fit into the L1 cache."""
    batch, _, channels = x.shape
    blocks = threads // math.gcd(batch, threads)
    width = min(math.ceil(channels / blocks / 16), max(_OF_A_LANE // n // 16, 1))
    return 16 * max(width, 1)


def _memory(given: Group, keep: bool) -> tuple[Space, Space, Space]:
    chunks = math.ceil(given.x.shape[1] / CHUNK) if keep else 0
    return outputs(given, chunks, given.A.shape[1], given.state.dtype)


def _lanes(given: Group) -> launch.Lanes:
    (batch, _, channels), n = given.x.shape, given.A.shape[1]
    threads = launch.threads_for(given.x.numel() * n // _ENTRIES)
    return launch.divided(batch, channels, width_of(given.x, n, threads), threads)


def _forward(out: Outputs, given: Group) -> None:
    work = _lanes(given)
    arrays = *_arrays(given), launch.array(given.state), out.last.numpy(), out.starts.numpy(), out.y.numpy()
    work.run(KERNELS, "forward", *arrays, CHUNK, work.width)


def _adjoint(out: Gradients, given: Group, kept: Outputs, d: Outputs) -> None:
    out.state.copy_(d.last)
    work = _lanes(given)
    # partial sums over batch rows, and over the lanes of a row
    totals = out.A, out.B[None], out.C[None], out.D
    counts = work.rows, work.blocks, work.blocks, work.rows
    parts = [terms(g, (count, *g.shape[1:])) for g, count in zip(totals, counts, strict=True)]
    # the kernel adds to the partial sums
    parts[0].zero_(), parts[3].zero_()
    found = (g.numpy() for g in (out.x, out.dt, *parts, out.state))
    arrays = *_arrays(given), launch.array(kept.starts), launch.array(d.y), *found
    work.run(KERNELS, "backward", *arrays, CHUNK, work.width)
    add_up(totals, parts)


def _arrays(given: Group) -> list[Any]:
    return [*map(launch.array, given[:6]), launch.cut_array(given.reset)]


recurrent = kernel("selective_scan_numba", memory=_memory, forward=_forward, adjoint=_adjoint)
