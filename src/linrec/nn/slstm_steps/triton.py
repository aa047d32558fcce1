"""The loop on GPUs by Triton: a kernel runs all steps, and holds the recurrent weights where they fit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.nn.slstm_steps.torch import Ends, Steps, by_step
from linrec.ops.core.kernel import NOTHING, Memory, Space, by_autograd, kernel_op, like
from linrec.ops.core.precision import without_autocast
from linrec.ops.kernels.launch import Kernels, mask, on_device, power_of_2

KERNELS = Kernels("nonlinear.slstm_triton")
CHUNK_BYTES = 256
"""Bytes of a row of h, in the weights' dtype, that a program multiplies at a time if it shares a head."""
HELD_BYTES = 2**17
"""Bytes of weights that a program holds at most, in shared memory; products of tf32x3 hold them twice."""
NARROWEST = 16
"""Channels and batch rows of a program at least, the fewest that matrix units multiply."""
WIDEST = {16: 64, 32: 32, 64: 32}
"""Channels of a program at most, for each number of batch rows: more would need more registers than exist."""
WAIT = 1024
"""Channels times batch rows whose products take as long as the rest of a step; tuned on an H100."""
LARGEST = 1024
"""Channels of a head at most: 16 channels of larger heads exceed `HELD_BYTES`, in bfloat16 too."""


class Plan(NamedTuple):
    """How programs share the work.

    Attributes:
        rows: batch rows of a program.
        block: channels of a program.
        held: bytes of weights that a program holds; if 0, each step loads them.
    """

    rows: int
    block: int
    held: int


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
    """Return whether the kernel takes these dtypes and heads."""
    dtypes = {given.Wx.dtype, given.R.dtype}
    return dtypes <= {torch.float32, torch.bfloat16, torch.float16} and given.R.shape[1] <= LARGEST


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
    # the kernel reads c, n and m there, and replaces them by the last
    for end, start in zip(out[2:5], given[3:6], strict=True):
        end.copy_(start)
    _launch(
        KERNELS.slstm, given, given.Wx.contiguous(), given.R.contiguous(), given.hidden.float().contiguous(),
        mask(given.reset, given.Wx), *out, KEEP=out.gates.numel() > 0,
    )  # fmt: skip


def _gradients(given: Steps, kept: Outputs, d: Outputs, needs: Sequence[bool]) -> Sequence[Space]:
    of_R = like(given.R) if needs[1] else NOTHING
    return like(given.Wx), of_R, *map(like, given[2:5]), NOTHING, NOTHING


def _adjoint(out: Any, given: Steps, kept: Outputs, d: Outputs) -> None:
    dh, dc, dn = (x.clone(memory_format=torch.contiguous_format) for x in d[1:4])
    _launch(
        KERNELS.slstm_gradients, given, kept.gates, given.R.contiguous(), kept.cells, kept.normalizers,
        kept.largests, mask(given.reset, given.Wx), d.hidden.contiguous(), dh, dc, dn, out.Wx, parts_of=dh,
    )  # fmt: skip
    for total, x in zip((out.hidden, out.cell, out.normalizer), (dh, dc, dn), strict=True):
        total.copy_(x)
    if out.R is not None:
        before = torch.cat([given.hidden[:, None].to(kept.hidden.dtype), kept.hidden], 1)[:, :-1]
        if given.reset is not None:
            before = before.masked_fill(given.reset[..., None, None], 0)
        with without_autocast(before.device.type):
            total = torch.einsum("bthk,btghj->hkgj", *(x.to(given.R.dtype) for x in (before, out.Wx)))
        out.R.copy_(total.flatten(-2))


def _launch(run: Any, given: Steps, *tensors: Tensor, parts_of: Tensor | None = None, **options: Any) -> None:
    """Run a kernel for all heads and blocks of batch rows.

    Args:
        parts_of: a tensor that the programs of a head exchange as parts.
    """
    from triton.runtime.errors import OutOfResources

    batch, time, _, heads, size = given.Wx.shape
    if 0 in (batch, heads, size):
        return
    device, precision = given.Wx.device, _precision(given.R.dtype)
    processors, width = _multiprocessors(device), max(NARROWEST, power_of_2(size))
    plans = _plans(batch, heads, width, given.R.itemsize * (2 if precision == "tf32x3" else 1), processors)
    while plans:
        plan, *others = plans
        parts, groups = width // plan.block, heads * -(-batch // plan.rows)
        # GPUs of few multiprocessors have wide blocks
        most = CHUNK_BYTES // given.R.itemsize if plan.block <= max(WIDEST.values()) else NARROWEST
        chunk = width if parts == 1 else min(width, most)
        # programs that wait for others must all run at the same time
        at_once = groups if parts == 1 else processors // parts
        cooperative = {"launch_cooperative_grid": True} if parts > 1 else {}
        exchanged = () if parts_of is None else (_in_parts(parts_of, parts),)
        arrived = torch.zeros(groups if parts > 1 else 0, dtype=torch.int32, device=device)
        try:
            with on_device(device):
                for first in range(0, groups, at_once):
                    # a kernel that does not fit raises before it is launched
                    run[(min(at_once, groups - first) * parts,)](
                        *tensors, *exchanged, arrived, batch, time, first, HEADS=heads, SIZE=size,
                        ROWS=plan.rows, WIDTH=width, CHUNK=chunk, BLOCK=plan.block, PARTS=parts,
                        HELD=plan.held > 0, HAS_RESET=given.reset is not None, SIGMOID=given.sigmoid,
                        PRECISION=precision, num_warps=8, num_stages=1, **cooperative, **options,
                    )  # fmt: skip
            return
        except OutOfResources:
            # GPUs with little shared memory need less
            plans = [other for other in others if (other.held, other.rows) < (plan.held, plan.rows)]
            if not plans:
                raise


def _in_parts(x: Tensor, parts: int) -> Tensor:
    """Return (2, parts, *x.shape), of which the first half adds up to x; empty if there is one part."""
    if parts == 1:
        return x.new_empty(0)
    found = x.new_zeros(2, parts, *x.shape)
    found[0, 0] = x
    return found


def _multiprocessors(device: torch.device) -> int:
    """Return how many programs run at the same time at least; the interpreter runs one after another."""
    from triton import knobs

    if device.type != "cuda" or knobs.runtime.interpret:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plans(batch: int, heads: int, width: int, itemsize: int, processors: int) -> list[Plan]:
    """Return the plans that may fit, the fastest first; ties go to few rows.

    Args:
        batch: batch rows.
        heads: heads.
        width: channels of a head, a power of two.
        itemsize: bytes of a weight.
        processors: programs that can run at the same time, one for each multiprocessor.
    """

    def cost(plan: Plan) -> int:
        # the programs of a turn run at the same time
        turns = -(-heads * -(-batch // plan.rows) // (processors // (width // plan.block)))
        return turns * (WAIT + plan.rows * plan.block)

    # a head's programs run at the same time
    blocks = [max(NARROWEST, width >> (processors.bit_length() - 1))]
    while blocks[-1] < width:
        blocks.append(2 * blocks[-1])
    choices = [rows for rows in WIDEST if rows < 2 * max(batch, NARROWEST)]
    plans = [
        Plan(rows, block, 4 * width * block * itemsize)
        for rows in choices
        for block in blocks
        if block <= WIDEST[rows]
    ]
    held = sorted((plan for plan in plans if plan.held <= HELD_BYTES), key=cost)
    return [*held, *(Plan(rows, blocks[0], 0) for rows in reversed(choices))]


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
