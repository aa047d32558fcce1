"""torch.func.vmap for the scan."""

from typing import Any

import torch

from linrec.ops.vmap import batch_of, fold


def register(forward: Any, backward: Any) -> None:
    """Teach a pair of scan operators to run under vmap.

    Args:
        forward: (a, x, state, cut, reverse) -> (y, last).
        backward: (a, y, state, cut, dy, dlast, reverse, needs_a) -> (da, dx, dstate).
    """

    def mapped_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        tensors, (reverse,) = arguments[:4], arguments[4:]
        batch = batch_of(tensors[1], in_dims[1])
        folded = [fold(t, dim, info.batch_size, batch) for t, dim in zip(tensors, in_dims, strict=False)]
        outputs = forward(*folded, reverse)
        return tuple(output.unflatten(0, (info.batch_size, batch)) for output in outputs), (0, 0)

    def mapped_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        tensors, (reverse, needs_a) = arguments[:6], arguments[6:]
        a, y = tensors[:2]
        batch = batch_of(y, in_dims[1])
        folded = [fold(t, dim, info.batch_size, batch) for t, dim in zip(tensors, in_dims, strict=False)]
        da, dx, dstate = backward(*folded, reverse, needs_a)
        dx, dstate = (gradient.unflatten(0, (info.batch_size, batch)) for gradient in (dx, dstate))
        if not needs_a:
            return (da, dx, dstate), (None, 0, 0)
        da = da.unflatten(0, (info.batch_size, batch))
        if batch_of(a, in_dims[0]) < batch:
            da = da.sum(1, keepdim=True)
        return (da, dx, dstate), (0, 0, 0)

    torch.library.register_vmap(forward, mapped_forward)
    torch.library.register_vmap(backward, mapped_backward)
