"""A projection whose matrix is block-diagonal."""

from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.parameters import Float32Module
from linrec.nn.projections import readable
from linrec.ops.core.precision import without_autocast

__all__ = ["BlockDiagonalLinear", "block_projected", "widened"]

# rows of a matrix that tensor cores multiply at once
WIDE = 64


class BlockDiagonalLinear(Float32Module):
    """y = W x + b with W = diag(W_1, .., W_n): neighbouring channels are projected together.

    Args:
        d: width of input and output.
        n_blocks: blocks n.
        std: standard deviation of the normal distribution that W is drawn from.
        bias: whether there is a b, which starts at 0.
        exact: whether y is in float32 (float64 for float64 weights), under autocast too; see `GateLinear`.

    Source:
        xLSTM (Beck and others, 2024), the figures of its blocks.
    """

    def __init__(self, d: int, n_blocks: int, *, std: float, bias: bool = False, exact: bool = False) -> None:
        super().__init__()
        if n_blocks < 1 or d % n_blocks:
            raise ValueError(
                f"`n_blocks` of a block-diagonal projection must be a positive divisor of its width {d}; "
                f"got {n_blocks}."
            )
        self.exact = exact
        self.weight = nn.Parameter(torch.empty(n_blocks, d // n_blocks, d // n_blocks).normal_(std=std))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None
        if bias and exact:
            self.keep_float32("bias")

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Apply the projection to `x` (..., d)."""
        return _projected(x, self)[0]

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        n_blocks, size, _ = self.weight.shape
        return f"d={n_blocks * size}, n_blocks={n_blocks}, bias={self.bias is not None}, exact={self.exact}"


def block_projected(
    x: Float[Tensor, "*batch d"], *layers: BlockDiagonalLinear
) -> tuple[Float[Tensor, "*batch d"], ...]:
    """Return the outputs of layers for the same input, as one product if all are plain layers.

    All layers have equal blocks and `exact`.
    """
    if readable(BlockDiagonalLinear, *layers):
        return _projected(x, *layers)
    return tuple(layer(x) for layer in layers)


def _projected(x: Tensor, *layers: BlockDiagonalLinear) -> tuple[Tensor, ...]:
    """Return the outputs of layers as one product of their tensors."""
    weights = [widened(layer.weight) if x.is_cuda else layer.weight for layer in layers]
    weight = torch.cat(weights, 1) if len(weights) > 1 else weights[0]
    blocks = x.unflatten(-1, (len(weight), -1))
    exact = layers[0].exact
    dtype = torch.promote_types(weight.dtype, torch.float32) if exact else weight.dtype
    with without_autocast(x.device.type) if exact else nullcontext():
        # without `exact`, autocast chooses the dtype
        blocks, weight = (blocks.to(dtype), weight.to(dtype)) if exact else (blocks, weight)
        y = torch.einsum("...ni,noi->...no", blocks, weight)
        parts = (part.flatten(-2) for part in y.chunk(len(layers), -1))
        return tuple(
            part if layer.bias is None else part + (layer.bias.to(dtype) if exact else layer.bias)
            for part, layer in zip(parts, layers, strict=True)
        )


def widened(weight: Float[Tensor, "n o i"]) -> Float[Tensor, "m wide_o wide_i"]:
    """Return small blocks side by side in blocks of up to 64 channels, with zeros between them.

    A GPU multiplies many tiny blocks slower than a few of these.
    """
    n, size = len(weight), weight.shape[-1]
    beside = max(1, WIDE // size)
    while n % beside:
        beside -= 1
    if beside == 1:
        return weight
    diagonal = torch.eye(beside, dtype=weight.dtype, device=weight.device)
    blocks = weight.unflatten(0, (-1, beside))[:, :, :, None] * diagonal[:, None, :, None]
    return blocks.flatten(3).flatten(1, 2)
