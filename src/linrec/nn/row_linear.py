"""Linear layers for few rows, as in a step of generation, which read each weight once."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.ops.core.ambient import exporting
from linrec.ops.core.backends import usable
from linrec.ops.core.kernel import Memory, Space, differentiated, forward_op
from linrec.ops.kernels.launch import Kernels, on_device, power_of_2

__all__ = ["RowLinear", "row_linear"]

KERNELS = Kernels("products.triton")
ROWS = 8
"""Rows of a program, which share the weights that it reads."""
CACHED = 2**23
"""Bytes of weights that programs of further rows may read again, from the GPU's cache. Above it, matrix units
are faster."""
PROGRAMS = 1024
"""Programs for which columns are divided, tuned on an H200: eight for each multiprocessor."""
SMALLEST = 2**10
"""Weights that a program reads at least."""
TILE = 2**15
"""Bytes of weights that a program holds in its registers."""


class Inputs(NamedTuple):
    """Inputs of the kernel.

    Attributes:
        x: (rows, k).
        weight: (n, k).
        bias: None or (n).
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None


class Outputs(NamedTuple):
    """Output of the kernel: y (rows, n)."""

    y: Tensor


def _forward(out: Outputs, given: Inputs) -> None:
    x, weight, bias = given
    (rows, k), n = x.shape, len(weight)
    size = min(power_of_2(k), 4096)
    fewest, most = -(-SMALLEST // size), TILE // (size * weight.element_size())
    block = power_of_2(max(1, min(max(n // PROGRAMS, fewest), most, n)))
    at_once = min(ROWS, power_of_2(rows))
    with on_device(x.device):
        KERNELS.row_products[(-(-n // block), -(-rows // at_once))](
            x, weight, x if bias is None else bias, out.y, rows, n, K=k, HAS_BIAS=bias is not None,
            ROWS=at_once, BLOCK_N=block, BLOCK_K=size, num_warps=8,
        )  # fmt: skip


def _memory(given: Inputs, keep: bool) -> tuple[Space]:
    return (Memory((len(given.x), len(given.weight)), given.x.dtype),)


row_products = forward_op("row_products_triton", Inputs, Outputs, _memory, _forward)


def row_linear(
    x: Float[Tensor, "*batch k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "*batch n"]:
    """y = x W^T + b, as `torch.nn.functional.linear`, faster for few rows on a GPU.

    With few rows, the time is that of reading W. Up to eight rows, or W of a few MiB for more rows, run as
    sums of products instead of on matrix units, which is faster. Sums are in float32. All other calls, and
    calls that autograd records, are `torch.nn.functional.linear`.

    Args:
        x: rows.
        weight: W.
        bias: b; None is no bias.
    """
    if not _suits(x, weight, bias):
        return functional.linear(x, weight, bias)
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = x.to(dtype).reshape(-1, x.shape[-1]).contiguous()
    return row_products(Inputs(rows, weight, bias)).y.unflatten(0, x.shape[:-1])


class RowLinear(nn.Linear):
    """y = x W^T + b by `row_linear`, for inference with constant weights.

    Args:
        linear: the layer whose weights are shared.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """Apply the layer to `x` (..., k)."""
        return row_linear(x, self.weight, self.bias)


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if not (x.is_cuda and usable("triton", x.device.type)) or exporting() or differentiated(x, weight, bias):
        return False
    rows = x.numel() // max(1, x.shape[-1])
    blocks = -(-rows // ROWS)
    # `nbytes` fails under torch.compile with sizes that vary
    n_bytes = weight.numel() * weight.element_size()
    return (
        rows > 0
        and weight.numel() > 0
        and weight.is_contiguous()
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and (blocks == 1 or blocks * n_bytes <= CACHED)
    )
