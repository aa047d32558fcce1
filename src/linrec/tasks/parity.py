"""Parity: is the number of ones odd?

Source: Delétang and others (2023, arXiv:2207.02098), "Parity Check". A count modulo another number than two
is in Grazzi and others (2024, arXiv:2411.12537): linear recurrences whose eigenvalues are real and positive
cannot keep the parity of long strings, and those whose eigenvalues are real cannot count modulo three.
"""

from dataclasses import dataclass

import numpy as np

from linrec.tasks.base import require_at_least
from linrec.tasks.state_tracking import Lengths, StateTracking, Steps

__all__ = ["Parity"]


@dataclass(frozen=True, kw_only=True)
class Parity(StateTracking):
    """Count ones modulo two, or another number.

        y = x_1 + ... + x_L   (mod modulus)

    Tokens are the bits 0 and 1, and the padding 2. The other fields are those of all tasks of state tracking.

    Args:
        modulus: modulo what the ones are counted.

    Source: Delétang and others (2023), "Parity Check".

    Example:
        >>> task = Parity(length=7, min_length=5, n_train=1, n_validation=1, n_test=1)
        >>> task.split("test").inputs.tolist(), task.split("test").targets.tolist()
        ([[1, 1, 1, 1, 1, 1, 2]], [[-100, -100, -100, -100, -100, 0, -100]])
    """

    modulus: int = 2

    def __post_init__(self) -> None:
        require_at_least(self, modulus=2)
        super().__post_init__()

    @property
    def n_symbols(self) -> int:
        """Number of different symbols: two bits."""
        return 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: remainders."""
        return self.modulus

    def n_strings(self, length: int) -> int:
        """Count the strings of a length."""
        return 2**length

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw bits; the answers are the sums so far."""
        bits = random.integers(0, 2, (len(lengths), self.length))
        return bits, bits.cumsum(1) % self.modulus
