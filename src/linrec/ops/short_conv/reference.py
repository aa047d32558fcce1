"""The convolution as a plain loop over time: the reference for tests of the other mode."""

import torch
from torch import Tensor

from linrec.ops.short_conv.torch import ShortConv


def short_conv_reference(given: ShortConv) -> tuple[Tensor, Tensor]:
    """y_n = f(sum_j w_j x_{n-j} + b)."""
    x, weight, bias, state, reset, silu = given
    outputs = []
    for n in range(x.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None], 0, state)
        window = torch.cat([state, x[:, n : n + 1]], dim=1)
        y = torch.einsum("bjc,cj->bc", window.flip(1), weight)
        y = y if bias is None else y + bias
        outputs.append(y * torch.sigmoid(y) if silu else y)
        state = window[:, 1:]
    return torch.stack(outputs, dim=1), state.clone()
