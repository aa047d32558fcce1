"""The convolution as a plain loop over time: the oracle that the other mode is tested against."""

import torch
from torch import Tensor


def short_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y_n = sum_j w_j x_{n-j} + b.

    Args:
        x: (b, t, c).
        weight: (c, width).
        bias: None or (c,).
        state: the inputs before, (b, width - 1, c), oldest first.
        reset: None or (b, t) bool.

    Returns:
        y (b, t, c), and the last width - 1 inputs.
    """
    outputs = [x[:, :0]]
    for n in range(x.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None], 0, state)
        window = torch.cat([state, x[:, n : n + 1]], dim=1)
        y = torch.einsum("bjc,cj->bc", window.flip(1), weight)
        outputs.append((y if bias is None else y + bias)[:, None])
        state = window[:, 1:]
    # of no steps, a copy of the given state
    return torch.cat(outputs, dim=1), state.clone()
