"""Checks of what `delta_rule` takes beyond what `gate_loop` does: real numbers alone, and beta."""

import torch
from torch import Tensor

from linrec.ops.gate_loop.inputs import check_precision
from linrec.ops.visibility import visible


def check_real(**tensors: Tensor | None) -> None:
    """Raise where one of the tensors, passed by the names of arguments, is complex."""
    for name, x in tensors.items():
        if x is not None and x.is_complex():
            raise TypeError(
                f"`{name}` of `delta_rule` must be real; got {x.dtype}. Pass real and imaginary "
                "parts as channels, or use `gate_loop`, which takes complex q and k."
            )


def check_beta(beta: Tensor, q: Tensor) -> None:
    """Raise unless `beta` is (b, t, h) beside q (b, t, h, dk), in its precision, and in [0, 2].

    Values are looked at where that costs no waiting: on the CPU, and not while a graph is made.
    """
    if beta.shape != q.shape[:3]:
        raise ValueError(
            f"`beta` must have shape (b, t, h) = {tuple(q.shape[:3])}; got {tuple(beta.shape)}. "
            "Pass one value per step and head."
        )
    check_precision("beta", beta, q)
    if beta.numel() == 0 or not visible(beta):
        return
    low, high = (float(x) for x in torch.aminmax(beta.detach()))
    if low < 0 or high > 2:
        raise ValueError(
            f"`beta` must be in [0, 2]; got values from {low:.4g} to {high:.4g}. "
            "Pass `sigmoid(...)`, or `2 * sigmoid(...)` for transitions with negative eigenvalues."
        )
