"""The elementwise recurrence on GPUs by Triton."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.kernel import NOTHING, Gradients, Space, add_up, like, terms
from linrec.ops.core.precision import accumulation
from linrec.ops.kernels.launch import Kernels, Tiling, grouping, mask, n_tiles, power_of_2, real, run_tiled
from linrec.ops.scan.torch import Scan, Values, kernel

KERNELS = Kernels("elementwise.scan_triton")


def _forward(out: Values, given: Scan) -> None:
    y, last = out
    a, x = _read(given.a, y.dtype).expand(y.shape), _read(given.x, y.dtype)
    start = last if given.state is None else given.state.contiguous()
    run_tiled(
        KERNELS.forward, tiling(y), y.shape, last.dtype, y.device, 168 if y.element_size() <= 4 else None,
        real(a), real(x), real(start), mask(given.reset, y), real(y), real(last),
        scalars=(a.stride(0), x.stride(0)), A_STEP=a.stride(1), A_CHANNEL=a.stride(2),
        X_STEP=x.stride(1), X_CHANNEL=x.stride(2), **_constants(given, y),
    )  # fmt: skip


def _gradients(given: Scan, kept: Values, d: Values, needs: Sequence[bool]) -> tuple[Space, ...]:
    a, y = given.a, kept.y
    # a gradient that is summed over steps or rows is accumulated in full precision
    dtype = torch.promote_types(a.dtype, y.dtype) if a.shape == y.shape else accumulation(y.dtype)
    return like(a if needs[0] else None, dtype), like(y), like(d.last), NOTHING


def _adjoint(out: Gradients, given: Scan, kept: Values, d: Values) -> None:
    y, dy, plan = kept.y, d.y.to(kept.y.dtype), tiling(kept.y)
    a = _read(given.a, y.dtype).expand(y.shape)
    # if `a` is constant over time, the kernel sums its gradient over a tile
    summed = given.a.shape[1] < y.shape[1] or y.shape[1] == 1
    da = out.a
    if da is not None:
        steps = n_tiles(y.shape[1], plan) if summed else y.shape[1]
        da = terms(da, (y.shape[0], steps, y.shape[2]))
    start = out.state if given.state is None else given.state.contiguous()
    run_tiled(
        KERNELS.backward, plan, y.shape, out.state.dtype, y.device, None,
        real(a), real(y.contiguous()), real(start), mask(given.reset, y), real(dy), real(d.last.contiguous()),
        real(y if da is None else da), real(out.x), real(out.state),
        scalars=(a.stride(0), dy.stride(0)), A_STEP=a.stride(1), A_CHANNEL=a.stride(2),
        DY_STEP=dy.stride(1), DY_CHANNEL=dy.stride(2), NEEDS_A=da is not None, SUMMED=summed,
        **_constants(given, y),
    )  # fmt: skip
    add_up((out.a,), (da,))


def _read(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor that kernels can read: real in any precision, but complex if y is complex."""
    return tensor.to(dtype) if dtype.is_complex else tensor


def _constants(given: Scan, y: Tensor) -> dict[str, Any]:
    """Return the constants that both kernels share.

    With AGAIN a kernel loads its inputs a second time, from a cache, instead of holding them until the
    carried value arrives. This doubles the number of tiles in flight. It pays for a single long sequence,
    whose tiles mostly wait, and for 16-bit inputs, which leave enough cache bandwidth. Tuned on an H200.
    """
    again = y.element_size() == 2 and y.shape[0] * -(-y.shape[2] // 64) < 4
    # the kernels process complex128 numbers as pairs
    flags = {"UNIT": 2 if y.dtype == torch.complex128 else 1, "REVERSE": given.reverse, "AGAIN": again}
    return flags | {"HAS_STATE": given.state is not None, "HAS_CUT": given.reset is not None}


def tiling(y: Tensor) -> Tiling:
    """Return the division of time for a recurrence with outputs like y (b, t, c), tuned on an H200."""
    batch, time, channels = y.shape
    size = y.element_size()
    columns = 64 if size < 16 and channels > 32 else 32
    rows = min({2: 32, 4: 32, 8: 16, 16: 8}[size], power_of_2(time))
    pieces = min(4, power_of_2(-(-time // rows)))
    groups = grouping(batch * -(-channels // columns))
    return Tiling(pieces, rows, columns, columns // 32, *groups, warps=pieces)


scan = kernel("scan_triton", forward=_forward, adjoint=_adjoint, gradients=_gradients)
