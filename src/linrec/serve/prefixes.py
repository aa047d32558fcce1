"""A prefix tree of states: requests that share a prefix with an earlier request start from its state."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from linrec.mixers import State
from linrec.rules import at_least
from linrec.trees import leaves

__all__ = ["Hit", "PrefixTree"]

# bytes of a token in the tree
WIDTH = 8
# bytes of the objects of a snapshot and of each of its tensors, beside their content, as measured
OBJECTS, TENSOR = 500, 300


class Hit(NamedTuple):
    """The longest prefix that the tree has a state of.

    Attributes:
        length: number of tokens of the prefix; 0 without a state.
        state: the state after these tokens, of one row; None without a state.
    """

    length: int
    state: State


@dataclass(eq=False)
class _Node:
    edge: bytes = b""
    above: "_Node | None" = None
    below: "dict[bytes, _Node]" = field(default_factory=dict)
    state: State = None
    nbytes: int = 0


class PrefixTree:
    """States by the tokens that led to them, within a budget of bytes; the least recently used leave first.

    Trees of different salts share nothing, so that the time of an answer tells nobody what others have asked.

    Args:
        budget: the most bytes of states and tokens. A state that alone is larger is not kept.

    Attributes:
        nbytes: bytes of states and tokens.

    Example:
        >>> import torch
        >>> tree = PrefixTree(10_000)
        >>> tree.put([5, 6], torch.zeros(1, 3))
        >>> tree.put([5, 6, 7, 8], torch.ones(1, 3))
        >>> tree.find([5, 6, 7, 9]).length, tree.find([5, 6, 7, 8, 9]).length, len(tree)
        (2, 4, 2)
    """

    def __init__(self, budget: int) -> None:
        at_least(0, budget=budget)
        self.budget, self.nbytes = budget, 0
        self._roots: dict[str, _Node] = {}
        # nodes with a state, the least recently used first
        self._used: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._used)

    def find(self, tokens: Sequence[int], *, salt: str = "") -> Hit:
        """Return the state of the longest prefix of the tokens, which counts as used."""
        path, _ = self._walk(_packed(tokens), salt)
        length, best = 0, None
        read = 0
        for node in path:
            read += len(node.edge)
            if node in self._used:
                length, best = read // WIDTH, node
        if best is None:
            return Hit(0, None)
        self._used.move_to_end(best)
        return Hit(length, best.state)

    def put(self, tokens: Sequence[int], state: State, *, salt: str = "") -> None:
        """Keep the state of one row after the tokens, at least one; an earlier state of them stays."""
        key, nbytes = _packed(tokens), OBJECTS + sum(TENSOR + tensor.nbytes for tensor in leaves(state))
        if nbytes + len(key) > self.budget:
            return
        path, read = self._walk(key, salt)
        node = path[-1] if path else self._roots.setdefault(salt, _Node())
        if read < len(key):
            node = self._branch(node, key[read:])
        if node not in self._used:
            node.state, node.nbytes = state, nbytes
            self.nbytes += nbytes
        self._used[node] = None
        self._used.move_to_end(node)
        while self.nbytes > self.budget:
            self._forget(next(iter(self._used)))

    def snapshots(self) -> Iterator[tuple[str, list[int], State]]:
        """Yield salt, tokens and state of each snapshot, the least recently used first."""
        salts = {root: salt for salt, root in self._roots.items()}
        for node in self._used:
            edges, above = [], node
            while above.above is not None:
                edges.append(above.edge)
                above = above.above
            yield salts[above], np.frombuffer(b"".join(reversed(edges)), np.int64).tolist(), node.state

    def _walk(self, key: bytes, salt: str) -> tuple[list[_Node], int]:
        """Return the nodes whose tokens begin the key, and the bytes of these tokens."""
        node, path, read = self._roots.get(salt), [], 0
        while node is not None:
            path.append(node)
            read += len(node.edge)
            child = node.below.get(key[read : read + WIDTH])
            node = child if child is not None and key.startswith(child.edge, read) else None
        return path, read

    def _branch(self, node: _Node, rest: bytes) -> _Node:
        """Return the new node of further tokens, and split an edge that begins like them."""
        child = node.below.get(rest[:WIDTH])
        if child is not None:
            shared = WIDTH * _shared(child.edge, rest)
            middle = _Node(rest[:shared], node)
            node.below[rest[:WIDTH]], child.edge, child.above = middle, child.edge[shared:], middle
            middle.below[child.edge[:WIDTH]] = child
            node, rest = middle, rest[shared:]
        if not rest:
            return node
        made = node.below[rest[:WIDTH]] = _Node(rest, node)
        self.nbytes += len(rest)
        return made

    def _forget(self, node: _Node) -> None:
        """Drop the state of a node, and the nodes that then lead to no state."""
        del self._used[node]
        self.nbytes -= node.nbytes
        node.state, node.nbytes = None, 0
        while node.above is not None and node not in self._used and len(node.below) < 2:
            above, first = node.above, node.edge[:WIDTH]
            if node.below:
                (child,) = node.below.values()
                child.edge, child.above = node.edge + child.edge, above
                above.below[first] = child
                return
            self.nbytes -= len(node.edge)
            del above.below[first]
            node = above
        if node.above is None and not node.below:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node}


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int64).tobytes()


def _shared(one: bytes, other: bytes) -> int:
    """Return the number of tokens with which both begin."""
    n = min(len(one), len(other)) // WIDTH
    a, b = (np.frombuffer(x, np.int64, n) for x in (one, other))
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else n
