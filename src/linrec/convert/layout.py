"""Layouts: how the tensors of a checkpoint hold the parameters of a model, in both directions.

A layout is a list of pieces. A piece pairs some tensors of the checkpoint with some parameters of the model,
and maps each side to the other side.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linrec.convert.checkpoint import Tensors

__all__ = [
    "MINUS",
    "ONE_MINUS",
    "PLUS_ONE",
    "TAPS",
    "TRANSPOSED",
    "Change",
    "Part",
    "Piece",
    "constants",
    "flat",
    "grouped",
    "multiplied",
    "pairs",
    "read",
    "rows",
    "same",
    "within",
    "write",
]


class Change(NamedTuple):
    """An invertible change of a tensor.

    Attributes:
        read: maps the checkpoint's tensor to the model's parameter.
        write: maps the parameter to the tensor.
    """

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


MINUS = Change(torch.neg, torch.neg)
TRANSPOSED = Change(lambda weight: weight.mT, lambda weight: weight.mT)
ONE_MINUS = Change(lambda share: 1 - share, lambda share: 1 - share)
PLUS_ONE = Change(lambda weight: weight + 1, lambda weight: weight - 1)
"""For norms whose weight is stored minus 1."""
TAPS = Change(lambda taps: taps[:, 0].flip(-1), lambda taps: taps.flip(-1)[:, None])
"""For taps (channels, 1, taps) of torch's convolution, which stores the tap of the current step last."""


def flat(groups: int) -> Change:
    """Return the change from a tensor (groups, n) to a vector."""
    return Change(Tensor.flatten, lambda vector: vector.unflatten(0, (groups, -1)))


def pairs(heads: int, turned: int) -> Change:
    """Return the change of the order of rotary channels, for tensors (heads d_head, ..).

    In transformers, channel j of the first half of the `turned` channels and channel j of their second half
    turn together. In linrec these two channels are neighbours.
    """

    def ordered(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
        tensor = tensor.unflatten(0, (heads, -1))
        first = tensor[:, :turned].unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return torch.cat([first, tensor[:, turned:]], dim=1).flatten(0, 1)

    return Change(lambda tensor: ordered(tensor, (2, -1)), lambda tensor: ordered(tensor, (-1, 2)))


def grouped(groups: int, sizes: Sequence[int]) -> Change:
    """Return the change from rows that are stored group by group to rows of the first part, the second, ...

    Args:
        groups: number of groups, such as heads.
        sizes: rows of each part within a group.
    """

    def together(tensor: Tensor) -> Tensor:
        parts = tensor.unflatten(0, (groups, -1)).split(list(sizes), dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    def apart(tensor: Tensor) -> Tensor:
        parts = tensor.split([groups * size for size in sizes])
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

    return Change(together, apart)


class Piece(NamedTuple):
    """Some tensors of a checkpoint, and the parameters that they hold.

    Attributes:
        theirs: names and shapes of the tensors.
        ours: names of the parameters.
        read: maps the tensors to the parameters, both in these orders.
        write: maps the parameters to the tensors.
        older: other names that the first tensor has in some checkpoints.
        copies: names under which some checkpoints store the first tensor once more.
        constant: whether released code computes the tensors itself. They are dropped, and a checkpoint may
            lack them.
    """

    theirs: Mapping[str, tuple[int, ...]]
    ours: Sequence[str]
    read: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    write: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    older: Sequence[str] = ()
    copies: Sequence[str] = ()
    constant: bool = False


def same(theirs: str, ours: str, *shape: int, changes: Sequence[Change] = (), older: str = "") -> Piece:
    """Return the piece of a tensor that holds one parameter.

    Args:
        theirs: name of the tensor.
        ours: name of the parameter.
        shape: shape of the tensor.
        changes: applied in this order when reading, and in the opposite order when writing.
        older: another name of the tensor.
    """
    part = Part(ours, 0, changes)
    return Piece(
        {theirs: shape},
        [ours],
        lambda tensors: [part.read(tensors[0])],
        lambda tensors: [part.write(tensors[0])],
        older=[older] if older else [],
    )


class Part(NamedTuple):
    """A parameter that is some rows of a tensor.

    Attributes:
        ours: name of the parameter.
        rows: number of rows in the tensor.
        changes: as in `same`.
    """

    ours: str
    rows: int
    changes: Sequence[Change] = ()

    def read(self, tensor: Tensor) -> Tensor:
        """Return the parameter of these rows."""
        for change in self.changes:
            tensor = change.read(tensor)
        return tensor

    def write(self, tensor: Tensor) -> Tensor:
        """Return the rows of this parameter."""
        for change in reversed(self.changes):
            tensor = change.write(tensor)
        return tensor


def constants(shapes: Mapping[str, tuple[int, ...]]) -> Piece:
    """Return the piece of tensors that released code computes itself, by name and shape."""
    return Piece(shapes, [], lambda tensors: [], lambda tensors: [], constant=True)


def rows(theirs: str, parts: Sequence[Part], *columns: int, order: Sequence[Change] = ()) -> Piece:
    """Return the piece of a tensor that stacks the rows of several parameters.

    Args:
        theirs: name of the tensor.
        parts: parameters, in the order of their rows.
        columns: shape of a row.
        order: changes of the whole tensor before it is split.
    """
    sizes = [part.rows for part in parts]
    whole = Part(theirs, sum(sizes), order)

    def read(tensors: Sequence[Tensor]) -> list[Tensor]:
        taken = whole.read(tensors[0]).split(sizes)
        return [part.read(tensor) for part, tensor in zip(parts, taken, strict=True)]

    def write(tensors: Sequence[Tensor]) -> list[Tensor]:
        stacked = torch.cat([part.write(tensor) for part, tensor in zip(parts, tensors, strict=True)])
        return [whole.write(stacked)]

    return Piece({theirs: (whole.rows, *columns)}, [part.ours for part in parts], read, write)


def within(theirs: str, ours: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield pieces with a prefix in front of all names of tensors, and another in front of all parameters."""
    for piece in pieces:
        yield piece._replace(
            theirs={theirs + name: shape for name, shape in piece.theirs.items()},
            ours=[ours + name for name in piece.ours],
            older=[theirs + name for name in piece.older],
            copies=[theirs + name for name in piece.copies],
        )


def multiplied(pieces: Iterable[Piece], factors: Mapping[str, float | Tensor]) -> Iterator[Piece]:
    """Yield pieces whose tensors released code multiplies, and whose parameters contain the factors.

    Args:
        pieces: pieces without the factors.
        factors: factors by name of the tensor, or by name of the layer for its weight and its bias; a factor
            broadcasts against the tensor.
    """
    for piece in pieces:
        found = [factors.get(name, factors.get(name.rpartition(".")[0])) for name in piece.theirs]
        if any(factor is not None for factor in found):
            piece = _multiplied(piece, [1.0 if factor is None else factor for factor in found])
        yield piece


def _multiplied(piece: Piece, factors: Sequence[float | Tensor]) -> Piece:
    def read(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return piece.read([tensor * factor for tensor, factor in zip(tensors, factors, strict=True)])

    def write(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor / factor for tensor, factor in zip(piece.write(tensors), factors, strict=True)]

    return piece._replace(read=read, write=write)


def read(layout: Iterable[Piece], tensors: Tensors) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, and take the tensors of all pieces."""
    found: dict[str, Tensor] = {}
    for piece in layout:
        if piece.constant and not any(name in tensors for name in piece.theirs):
            continue
        (first, shape), *others = piece.theirs.items()
        name = next((older for older in piece.older if older in tensors), first)
        taken = [tensors.take(name, *shape), *(tensors.take(name, *sizes) for name, sizes in others)]
        for copy in piece.copies:
            tensors.take_copy(copy, taken[0])
        found |= dict(zip(piece.ours, piece.read(taken), strict=True))
    return found


def write(layout: Iterable[Piece], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint from the `state_dict` of the model."""
    found: dict[str, Tensor] = {}
    for piece in layout:
        if piece.constant:
            continue
        made = piece.write([weights[name] for name in piece.ours])
        found |= {name: tensor.contiguous() for name, tensor in zip(piece.theirs, made, strict=True)}
    return found
