"""The state of a generation, and the names of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Bool, Int64
from torch import Tensor

from linrec.mixers import State

__all__ = ["GenerationState", "filled", "named"]


@dataclass(frozen=True)
class GenerationState:
    """The state of a generation: the model's state, and the newest token, which the model has yet to process.

    Args:
        layers: the model's state after all tokens except the newest, an entry per layer, or a
            `RaggedState`.
        token: the newest token of each sequence, (b).
        reset: whether `token` begins a document, (b); None if it begins a document in no sequence.
        drawn: number of tokens generated so far, which is the index of the next random number.
    """

    layers: tuple[State, ...]
    token: Int64[Tensor, "b"]
    reset: Bool[Tensor, "b"] | None = None
    drawn: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the model's state in bytes, summed over layers and sequences."""
        return sum(tensor.nbytes for tensor in named(self.layers, "layers").values())


def named(tree: State, name: str) -> dict[str, Tensor]:
    """Return the tensors of a state by dotted names, made of tuple indices and named tuple fields.

    Args:
        tree: a tensor, a (named) tuple of states, or None.
        name: name of the tree itself.
    """
    if tree is None:
        return {}
    if isinstance(tree, Tensor):
        return {name: tree}
    found: dict[str, Tensor] = {}
    for field, branch in zip(_fields(tree), tree, strict=True):
        found |= named(branch, f"{name}.{field}")
    return found


def filled(tree: State, name: str, tensors: Mapping[str, Tensor]) -> State:
    """Return a tree of the same structure with other tensors; a missing name becomes None.

    Args:
        tree: a tensor, a (named) tuple of states, or None.
        name: name of the tree itself.
        tensors: the new tensors, by the names that `named` gives.
    """
    if tree is None or isinstance(tree, Tensor):
        return tensors.get(name)
    branches = [filled(b, f"{name}.{f}", tensors) for f, b in zip(_fields(tree), tree, strict=True)]
    # the constructor of a named tuple takes its fields as separate arguments
    return tuple(branches) if type(tree) is tuple else type(tree)(*branches)


def _fields(tree: State) -> tuple[str, ...]:
    return tuple(map(str, range(len(tree)))) if type(tree) is tuple else tree._fields
