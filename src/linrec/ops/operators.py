"""Custom operators: functions that torch.compile, fake tensors and vmap take as one operation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.ops.dispatch import exporting

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


def differentiated(*inputs: Tensor | None) -> bool:
    """Return whether autograd has to see what is made of these tensors.

    A call that it need not see is spared what `torch.autograd.Function` does, which takes longer than a small
    recurrence.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> differentiated(x, None), differentiated(x.detach(), None)
        (True, False)
    """
    # autograd differentiates an exported program operation by operation
    if not torch.is_grad_enabled() or exporting():
        return False
    # while torch.compile traces, calls cost nothing; within torch.func, only its own layers know
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any(x is not None and x.requires_grad for x in inputs)


def differentiable_gradients(
    outputs: tuple[Tensor, ...],
    inputs: Sequence[Any],
    needed: Sequence[bool],
    gradients: tuple[Tensor, ...],
) -> list[Tensor | None]:
    """Return what a backward pass returns where its gradients are to be differentiated again.

    Args:
        outputs: what torch operations made of `inputs` in place of a kernel.
        inputs: of the forward pass.
        needed: which of them, from the first on, have a gradient.
        gradients: those of the outputs.

    Returns:
        One gradient, or None, for each of `needed`.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> (dx, _) = differentiable_gradients((x**2,), (x, None), (True, False), (torch.tensor(1.0),))
        >>> torch.autograd.grad(dx, x)
        (tensor(2.),)
    """
    wanted = [x for x, need in zip(inputs, needed, strict=False) if need]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]
