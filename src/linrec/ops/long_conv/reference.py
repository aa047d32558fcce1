"""The convolution as a plain loop over time: the oracle that the other modes are tested against."""

import torch
from torch import Tensor

from linrec.ops.precision import widened


def long_conv_reference(u: Tensor, kernel: Tensor, document: Tensor | None, before: int) -> Tensor:
    """y_n = sum_j K_j u_{n-j}, over the steps of the same document.

    Args:
        u: (b, s + t, d), the steps of the state in front.
        kernel: (d, length).
        document: None or (b, s + t) integers that grow at resets.
        before: s.

    Returns:
        y (b, t, d) in float32 or float64.
    """
    u, kernel = widened(u, kernel)
    outputs = [u[:, :0]]
    for n in range(before, u.shape[1]):
        y = torch.zeros_like(u[:, 0])
        for j in range(min(kernel.shape[1], n + 1)):
            term = kernel[:, j] * u[:, n - j]
            if document is not None:
                term = torch.where((document[:, n - j] == document[:, n])[:, None], term, 0)
            y = y + term
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1)
