"""A check that custom operators return the layouts that their fake kernels declare."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from linrec.torch_private import TorchDispatchMode, fake_tensors
from linrec.trees import leaves, map_tree

__all__ = ["CheckFakeKernels"]


class CheckFakeKernels(TorchDispatchMode):
    """A dispatch mode that compares the output of every operator `linrec::*` with its fake kernel.

    `torch.compile` generates code from the fake kernel's output. If a stride differs, that code stops with an
    error or reads wrong numbers; tracing alone does not detect it.

    Raises:
        AssertionError: an output differs; the message gives the operator, the declared and the actual layout.

    Example:
        >>> import torch
        >>> from linrec.ops import scan
        >>> with CheckFakeKernels():
        ...     y, _ = scan(torch.ones(1, 3, 2), torch.ones(1, 3, 2))
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; if it belongs to linrec, compare its outputs with its fake kernel."""
        args, kwargs = tuple(args), dict(kwargs or {})
        returned = func(*args, **kwargs)
        if func.namespace == "linrec":
            with fake_tensors() as mode:
                args, kwargs = map_tree(mode.from_tensor, (args, kwargs))
                said = func(*args, **kwargs)
            said, found = ([_layout(tensor) for tensor in leaves(tree)] for tree in (said, returned))
            assert said == found, f"{func}: its fake kernel says {said}, it returned {found}"
        return returned


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    # strides of axes of size 1, and of empty tensors, may have any value
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tuple(tensor.shape), strides if tensor.numel() else []
