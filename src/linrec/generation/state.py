"""What a generation carries from token to token, and its tensors by name."""

from dataclasses import dataclass

from jaxtyping import Bool, Int64
from torch import Tensor

from linrec.mixers import State

__all__ = ["GenerationState", "filled", "named"]


@dataclass(frozen=True)
class GenerationState:
    """Where a generation stands: the model's state, and the newest token, which the model has not read yet.

    Args:
        layers: the model's state after all tokens but the newest, one entry per layer.
        token: the newest token of each sequence, (b).
        reset: whether `token` begins a document, (b); None where it does in no sequence.
        drawn: tokens that were generated so far; places in the sequence of random numbers.
    """

    layers: tuple[State, ...]
    token: Int64[Tensor, "b"]
    reset: Bool[Tensor, "b"] | None = None
    drawn: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the model's state, over all layers and sequences."""
        return sum(tensor.nbytes for tensor in named(self.layers, "layers").values())


def named(tree: State, name: str) -> dict[str, Tensor]:
    """Return the tensors of a state by dotted names, the numbers of tuples and the fields of named ones.

    Args:
        tree: a tensor, a (named) tuple of states, or None.
        name: what the tree itself is called.

    Example:
        >>> import torch
        >>> list(named((torch.zeros(1), (None, torch.zeros(1))), "layers"))
        ['layers.0', 'layers.1.1']
    """
    if tree is None:
        return {}
    if isinstance(tree, Tensor):
        return {name: tree}
    found: dict[str, Tensor] = {}
    for field, branch in zip(_fields(tree), tree, strict=True):
        found |= named(branch, f"{name}.{field}")
    return found


def filled(tree: State, name: str, tensors: dict[str, Tensor]) -> State:
    """Return a tree of the same structure with other tensors; where there is none of that name, None.

    Args:
        tree: a tensor, a (named) tuple of states, or None.
        name: what the tree itself is called.
        tensors: by the names that `named` gives.

    Example:
        >>> import torch
        >>> filled((torch.zeros(1), (None, None)), "layers", {"layers.1.0": torch.ones(2)})
        (None, (tensor([1., 1.]), None))
    """
    if tree is None or isinstance(tree, Tensor):
        return tensors.get(name)
    branches = [filled(b, f"{name}.{f}", tensors) for f, b in zip(_fields(tree), tree, strict=True)]
    # a named tuple takes its fields one by one
    return tuple(branches) if type(tree) is tuple else type(tree)(*branches)


def _fields(tree: State) -> tuple[str, ...]:
    return tuple(map(str, range(len(tree)))) if type(tree) is tuple else tree._fields
