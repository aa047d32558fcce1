"""The convolution as a plain loop over time and taps: the reference for tests of the other modes."""

import torch
from torch import Tensor

from linrec.ops.core.precision import wide
from linrec.ops.long_conv.torch import Convolution


def long_conv_reference(given: Convolution, before: int) -> Tensor:
    """Return y_n = sum_j K_j u_{n-j}, over the steps of the same document, from step `before` on."""
    u, kernel, document = given
    u, kernel = wide(u), wide(kernel)
    # depends on both inputs, so that both have gradients for empty time
    outputs = [u[:, :0] * kernel.sum()]
    for n in range(before, u.shape[1]):
        y = torch.zeros_like(u[:, 0])
        for j in range(min(kernel.shape[1], n + 1)):
            seen = u[:, n - j]
            if document is not None:
                # before the product, whose other factor gets no gradient then, even beside NaN
                seen = torch.where((document[:, n - j] == document[:, n])[:, None], seen, 0)
            y = y + kernel[:, j] * seen
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1)
