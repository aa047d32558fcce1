"""torch.func.vmap for the custom operators: the mapped axis is folded into the batch."""

from typing import Any

import torch
from torch import Tensor


def register(forward: Any, backward: Any) -> None:
    """Teach a pair of fused operators to run under vmap.

    Args:
        forward: (q, k, v, what may be None..., state, cut), and flags -> (y, last, starts).
        backward: (q, k, v, what may be None..., state, cut, starts, dy, dlast) -> the gradients of all up to
            the state.
    """

    def mapped_forward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        outer, batch = info.batch_size, batch_of(inputs[0], in_dims[0])
        tensors = [x for x in inputs if not isinstance(x, bool)]
        folded = (fold(x, dim, outer, batch) for x, dim in zip(tensors, in_dims, strict=False))
        outputs = forward(*folded, *inputs[len(tensors) :])
        return tuple(x.unflatten(0, (outer, batch)) for x in outputs), (0, 0, 0)

    def mapped_backward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        outer, batch = info.batch_size, batch_of(inputs[0], in_dims[0])
        gradients = backward(*(fold(x, dim, outer, batch) for x, dim in zip(inputs, in_dims, strict=True)))
        unfolded = []
        for x, dim, gradient in zip(inputs, in_dims, gradients, strict=False):
            if x is not None:
                gradient = gradient.unflatten(0, (outer, batch))
                if batch_of(x, dim) < batch:
                    gradient = gradient.sum(1, keepdim=True)
            unfolded.append(gradient)
        return tuple(unfolded), tuple(None if x is None else 0 for x in inputs[:-4])

    torch.library.register_vmap(forward, mapped_forward)
    torch.library.register_vmap(backward, mapped_backward)


def batch_of(tensor: Tensor, dim: int | None) -> int:
    """Return the size of the batch, the first axis but for the mapped one."""
    return tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]


def fold(tensor: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """Return the tensor with the mapped axis and the batch as one."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    return tensor.expand(size, batch, *tensor.shape[2:]).flatten(0, 1)
