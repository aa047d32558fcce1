"""The loop on GPUs by Triton: a kernel runs all steps, and holds the recurrent weights where they fit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.nn.slstm_steps.torch import Ends, Steps, by_step
from linrec.ops.core.kernel import NOTHING, Memory, Space, by_autograd, kernel_op, like
from linrec.ops.core.precision import without_autocast
from linrec.ops.kernels import Kernels
from linrec.ops.kernels.launch import mask, on_device, power_of_2

KERNELS = Kernels("nonlinear.slstm_triton")
LARGEST = 256
"""Channels of a head at most: the loops over tiles are unrolled."""
ROWS = 16
"""Batch rows of a program, the fewest that matrix units multiply. More programs keep more of a GPU busy."""
TILE = 64
"""Channels of a tile at most."""
HELD = 2**17
"""Bytes of a head's weights that a program holds over all steps, at most: half of its registers."""


class Outputs(NamedTuple):
    """Outputs of the kernel.

    Attributes:
        hidden: h of every step (b, t, h, d).
        last: h after the last step (b, h, d), and so on.
        cell: c exp(-m).
        normalizer: n exp(-m).
        largest: m.
        gates: arguments of the gates (b, t, 4, h, d); without `keep` this and the rest are empty.
        cells: c exp(-m) that each step starts from, (b, t, h, d).
        normalizers: n exp(-m), likewise.
        largests: m, likewise.
    """

    hidden: Tensor
    last: Tensor
    cell: Tensor
    normalizer: Tensor
    largest: Tensor
    gates: Tensor
    cells: Tensor
    normalizers: Tensor
    largests: Tensor


KEPT = ("largest", "gates", "cells", "normalizers", "largests")


def fits(given: Steps) -> bool:
    """Return whether the kernel takes these dtypes and this head size."""
    allowed = (torch.float32, torch.bfloat16, torch.float16)
    return given.Wx.shape[-1] <= LARGEST and given.Wx.dtype in allowed and given.R.dtype in allowed


def fused(given: Steps) -> tuple[Tensor, Ends]:
    """Return h of every step, and the last states."""
    # not differentiated by m, as in the loop
    out = kernel(given._replace(largest=given.largest.detach()))
    return out.hidden, (out.last, out.cell, out.normalizer, out.largest)


def _memory(given: Steps, keep: bool) -> Sequence[Space]:
    batch, time, _, heads, size = given.Wx.shape
    steps, end = (
        Memory(shape, torch.float32) for shape in ((batch, time, heads, size), (batch, heads, size))
    )
    kept = [like(given.Wx, torch.float32), *[steps] * 3] if keep else [NOTHING] * 4
    return steps, *[end] * 4, *kept


def _forward(out: Outputs, given: Steps) -> None:
    starts = (part.float().contiguous() for part in given[2:6])
    _launch(
        KERNELS.slstm, given, given.Wx.contiguous(), given.R.contiguous(), *starts,
        mask(given.reset, given.Wx), *out, KEEP=out.gates.numel() > 0,
    )  # fmt: skip


def _gradients(given: Steps, kept: Outputs, d: Outputs, needs: Sequence[bool]) -> Sequence[Space]:
    of_R = like(given.R) if needs[1] else NOTHING
    return like(given.Wx), of_R, *map(like, given[2:5]), NOTHING, NOTHING


def _adjoint(out: Any, given: Steps, kept: Outputs, d: Outputs) -> None:
    starts = [torch.empty_like(x, dtype=torch.float32) for x in (d.last, d.cell, d.normalizer)]
    _launch(
        KERNELS.slstm_gradients, given, kept.gates, given.R.contiguous(), kept.cells, kept.normalizers,
        kept.largests, mask(given.reset, given.Wx), *(x.contiguous() for x in d[:4]), out.Wx, *starts,
    )  # fmt: skip
    for total, x in zip((out.hidden, out.cell, out.normalizer), starts, strict=True):
        total.copy_(x)
    if out.R is not None:
        before = torch.cat([given.hidden[:, None].to(kept.hidden.dtype), kept.hidden], 1)[:, :-1]
        if given.reset is not None:
            before = before.masked_fill(given.reset[..., None, None], 0)
        with without_autocast(before.device.type):
            total = torch.einsum("bthk,btghj->hkgj", *(x.to(given.R.dtype) for x in (before, out.Wx)))
        out.R.copy_(total.flatten(-2))


def _launch(run: Any, given: Steps, *tensors: Tensor, **options: Any) -> None:
    """Run a kernel for all heads and blocks of batch rows."""
    batch, time, _, heads, size = given.Wx.shape
    block = max(16, min(TILE, power_of_2(size)))
    programs = heads * -(-batch // ROWS)
    if programs and size:
        with on_device(given.Wx.device):
            run[(programs,)](
                *tensors, batch, time, HEADS=heads, SIZE=size, ROWS=ROWS, BLOCK=block,
                TILES=-(-size // block), HAS_RESET=given.reset is not None, SIGMOID=given.sigmoid,
                HELD=given.R[0].nbytes <= HELD, PRECISION=_precision(given.R.dtype),
                num_warps=4 if size <= TILE else 8, num_stages=1, **options,
            )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """Return the precision of products on tensor cores: three tf32 products or one, for float32."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _plain(given: Steps) -> Outputs:
    hidden, end, kept = by_step(given, keep=True)
    return Outputs(hidden, *end, *kept)


def _twin(given: Steps) -> tuple[Tensor, ...]:
    """Return the outputs that have gradients, in torch operations."""
    hidden, (h, c, n, _), _ = by_step(given)
    return hidden, h, c, n


kernel = kernel_op(
    "slstm_triton", Steps, Outputs, _memory, _forward, _adjoint,
    gradients=_gradients, again=by_autograd(_twin), plain=_plain, kept=KEPT,
    saves=("Wx", "R", "hidden", "cell", "normalizer", "largest", "reset", *KEPT[1:]),
)  # fmt: skip
