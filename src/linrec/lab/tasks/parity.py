"""Parity: tell whether the number of ones in a string is odd.

Source: Delétang and others (2023, arXiv:2207.02098), "Parity Check". Grazzi and others (2024,
arXiv:2411.12537) count modulo other numbers: linear recurrences with real, positive eigenvalues cannot
compute the parity of long strings, and linear recurrences with real eigenvalues cannot count modulo 3.
"""

from dataclasses import dataclass

import numpy as np

from linrec.lab.tasks.base import require_at_least
from linrec.lab.tasks.state_tracking import Lengths, StateTracking, Steps

__all__ = ["Parity"]


@dataclass(frozen=True, kw_only=True)
class Parity(StateTracking):
    """Count the ones in a string modulo 2, or modulo another number.

        y = x_1 + ... + x_L   (mod modulus)

    Tokens are the bits 0 and 1, and the padding 2. See `StateTracking` for the other fields.

    Args:
        modulus: modulus of the count.

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
        """Number of distinct symbols: two bits."""
        return 2

    @property
    def n_outputs(self) -> int:
        """Number of target classes: remainders."""
        return self.modulus

    def n_strings(self, length: int) -> int:
        """Return the number of strings of a length."""
        return 2**length

    def strings(self, random: np.random.Generator, lengths: Lengths) -> tuple[Steps, Steps]:
        """Draw bits; the answer at a step is the sum so far."""
        bits = random.integers(0, 2, (len(lengths), self.length))
        return bits, bits.cumsum(1) % self.modulus
