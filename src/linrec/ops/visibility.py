"""Whether a check may look at the values of a tensor."""

import torch
from torch import Tensor


def visible(x: Tensor) -> bool:
    """Whether the values can be read without waiting for a device, and without breaking a graph.

    Example:
        >>> visible(torch.ones(1)), visible(torch.ones(1, device="meta"))
        (True, False)
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active()
