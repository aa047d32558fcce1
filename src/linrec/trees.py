"""Trees of tensors: a tensor, None, or a dict, tuple, list or named tuple of trees."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = ["Tree", "differentiable", "double", "leaves", "map_tree", "replaced"]

Tree: TypeAlias = Any
T = TypeVar("T", bound=Any)


def map_tree(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each tensor; other leaves stay as they are.

    Example:
        >>> import torch
        >>> map_tree(len, {"a": torch.zeros(2), "b": (torch.zeros(3), None)})
        {'a': 2, 'b': (3, None)}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: map_tree(function, branch) for name, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        branches = [map_tree(function, branch) for branch in tree]
        # a named tuple takes its fields as separate arguments
        return type(tree)(branches) if type(tree) in (tuple, list) else type(tree)(*branches)
    return tree


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of the tree, in order."""
    found: list[Tensor] = []
    map_tree(found.append, tree)
    return found


def replaced(fields: T, **changes: Any) -> T:
    """Return a copy of a named tuple with other values of some fields.

    torch 2.11 compiles the tuple's own `_replace` to an empty tuple where the result leaves the graph.
    """
    values = (changes.get(name, value) for name, value in zip(fields._fields, fields, strict=True))
    return type(fields)(*values)


def differentiable(tree: Tree) -> Tree:
    """Return the tree detached; floating and complex tensors become new leaves that require gradients."""

    def leaf(tensor: Tensor) -> Tensor:
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().clone().requires_grad_(floating)

    return map_tree(leaf, tree)


def double(tree: Tree) -> Tree:
    """Return the tree with floating and complex tensors in double precision."""

    def widen(tensor: Tensor) -> Tensor:
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.to(torch.promote_types(tensor.dtype, torch.float64)) if floating else tensor

    return map_tree(widen, tree)
