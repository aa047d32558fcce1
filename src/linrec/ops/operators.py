"""Custom operators: functions that torch.compile, fake tensors and vmap take as one operation."""

from collections.abc import Callable
from typing import Any

import torch

from linrec.ops.core.kernel import differentiable_gradients as differentiable_gradients
from linrec.ops.core.kernel import differentiated as differentiated

_LIBRARY = torch.library.Library("linrec", "FRAGMENT")


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function the operator `linrec::name`, with its annotations as schema.

    As `torch.library.custom_op` does, but without its layers for autograd, which linrec has functions of its
    own for: they take longer than a small recurrence, and the first call imports torch's compiler, which
    takes a second. The function must not change its inputs or return one of them.

    Args:
        name: the operator's name.

    Returns:
        A decorator whose result is called like the function; `torch.library.register_fake` and
        `register_vmap` take it.

    Example:
        >>> @operator("doubled_for_this_example")
        ... def doubled(x: torch.Tensor) -> torch.Tensor:
        ...     return x + x
        >>> doubled(torch.ones(2)), torch.ops.linrec.doubled_for_this_example.default is doubled
        (tensor([2., 2.]), True)
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.linrec, name).default

    return register
