"""Whether custom operators return what their fake kernels say."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from linrec.trees import leaves, map_tree

__all__ = ["CheckFakeKernels"]


class CheckFakeKernels(TorchDispatchMode):
    """Within it, every operator `linrec::*` must return what its fake kernel says.

    `torch.compile` makes code from the fake kernel. Where a stride is another one than it says, the code
    stops, or reads other numbers; tracing alone does not see it.

    Raises:
        AssertionError: the operator's name, what it said and what it returned.

    Example:
        >>> import torch
        >>> from linrec.ops import scan
        >>> with CheckFakeKernels():
        ...     y, _ = scan(torch.ones(1, 3, 2), torch.ones(1, 3, 2))
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and compare what it returns if it is one of linrec's."""
        args, kwargs = tuple(args), dict(kwargs or {})
        returned = func(*args, **kwargs)
        if func.namespace == "linrec":
            with FakeTensorMode() as mode:
                args, kwargs = map_tree(mode.from_tensor, (args, kwargs))
                said = func(*args, **kwargs)
            said, found = ([_layout(tensor) for tensor in leaves(tree)] for tree in (said, returned))
            assert said == found, f"{func}: its fake kernel says {said}, it returned {found}"
        return returned


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    # a stride that nothing is reached by may be any
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tuple(tensor.shape), strides if tensor.numel() else []
