"""Cycle navigation: track a position on a circle through moves forward and backward.

Source: Delétang and others (2023, arXiv:2207.02098), "Cycle Navigation", on a circle of five places.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import require_at_least
from linrec.lab.tasks.state_tracking import Lengths, StateTracking, Steps

__all__ = ["CycleNavigation"]

MOVES = np.array([0, 1, -1])


@dataclass(frozen=True, kw_only=True)
class CycleNavigation(StateTracking):
    """Add up moves on a circle, starting from place 0.

        y = m(x_1) + ... + m(x_L)   (mod n_places),   m(0) = 0, m(1) = 1, m(2) = -1

    Tokens are the moves 0 (stay), 1 (forward) and 2 (backward), and the padding 3. See `StateTracking` for
    the other fields.

    Args:
        n_places: number of places on the circle.

    Source: Delétang and others (2023), "Cycle Navigation".

    Example:
        >>> task = CycleNavigation(length=6, min_length=4, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[0, 2, 0, 1, 0, 3]], [[-100, -100, -100, -100, 0, -100]])
    """

    n_places: int = 5

    def __post_init__(self) -> None:
        require_at_least(self, n_places=2)
        super().__post_init__()

    @property
    def n_symbols(self) -> int:
        """Number of distinct symbols: three moves."""
        return len(MOVES)

    @property
    def n_outputs(self) -> int:
        """Number of target classes: places."""
        return self.n_places

    def n_strings(self, length: int) -> int:
        """Return the number of strings of a length."""
        return len(MOVES) ** length

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw moves; the answer at a step is the place after it."""
        moves = random.integers(0, len(MOVES), (len(lengths), self.length))
        return moves, MOVES[moves].cumsum(1) % self.n_places
