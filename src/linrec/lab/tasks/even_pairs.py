"""Even pairs: tell whether the number of changes between neighbouring symbols is even or odd.

Source: Delétang and others (2023, arXiv:2207.02098), "Even Pairs": the pairs 01 and 10 are counted together.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.state_tracking import Lengths, StateTracking, Steps

__all__ = ["EvenPairs"]


@dataclass(frozen=True, kw_only=True)
class EvenPairs(StateTracking):
    """Tell whether the number of changes in a string is odd; equivalently, whether its ends differ.

        y = [x_1 != x_2] + ... + [x_{L-1} != x_L]   (mod 2)   =   [x_1 != x_L]

    Tokens are the bits 0 and 1, and the padding 2. A model may count the changes, or keep the first symbol.
    See `StateTracking` for the fields.

    Source: Delétang and others (2023), "Even Pairs".

    Example:
        >>> task = EvenPairs(length=7, min_length=5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[1, 0, 1, 1, 1, 2, 2]], [[-100, -100, -100, -100, 0, -100, -100]])
    """

    @property
    def n_symbols(self) -> int:
        """Number of distinct symbols: two bits."""
        return 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: 0 even, 1 odd."""
        return 2

    def n_strings(self, length: int) -> int:
        """Return the number of strings of a length."""
        return 2**length

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw bits; the answer at a step is 1 if its symbol differs from the first symbol."""
        bits = random.integers(0, 2, (len(lengths), self.length))
        return bits, bits ^ bits[:, :1]
