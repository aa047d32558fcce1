"""Registered kernels keep what their declarations promise."""

from typing import Any

import torch

from linrec.ops.core.kernel import Differentiable

UTILITIES = ("test_schema", "test_faketensor")


def check_operators(kernel: Differentiable[Any, Any], given: Any) -> None:
    """Check schema and fake implementation of a kernel and of its adjoint, for some of the gradients each."""
    forward, backward = kernel.operators
    torch.library.opcheck(forward, (*given, True), test_utils=UTILITIES)
    outputs = kernel.forward(given, True)
    tensors = [isinstance(x, torch.Tensor) and x.dtype != torch.bool for x in given]
    for needs in (tensors, [False] * len(given)):
        d = [torch.ones_like(x) for x in outputs]
        torch.library.opcheck(backward, (*given, *outputs, *d, needs), test_utils=UTILITIES)
