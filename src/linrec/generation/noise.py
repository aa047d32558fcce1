"""Uniform random numbers as a function of (seed, row, index), generated in blocks."""

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

# number of steps whose random numbers are copied to the device at once
BLOCK = 256
# Philox generates four numbers for each value of its counter
WORDS = 4
LARGEST_SEED = 2**64 - 1


def check_seed(seed: int) -> None:
    """Raise a ValueError unless the seed is in 0 .. 2^64 - 1."""
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"`seed` must be in 0 .. 2^64 - 1; got {seed}.")


def uniforms(seed: int, row: int, start: int, n: int) -> NDArray[np.float64]:
    """u_i = Philox_{seed, row}(i) for i = start .. start + n - 1, uniform on [0, 1).

    Any part of the sequence can be computed without the numbers before it. An interrupted generation thus
    continues with the same numbers, and the numbers of a row do not depend on the other rows.

    Args:
        seed: in 0 .. 2^64 - 1.
        row: index of the sequence in its batch.
        start: index of the first number.
        n: how many numbers.

    Returns:
        (n), float64, multiples of 2^-53.

    Source: Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3 (2011): Philox4x64-10, with NumPy.
    """
    key = np.array([seed, row], dtype=np.uint64)
    skipped = start % WORDS
    words = np.random.Philox(counter=start // WORDS, key=key).random_raw(skipped + n)[skipped:]
    return (words >> np.uint64(11)) * 2.0**-53


class Noise:
    """The uniform random numbers of a batch, a column per step, in a buffer of fixed address for CUDA graphs.

    Args:
        seed: in 0 .. 2^64 - 1.
        batch: number of rows.
        start: index of the first step.
        device: device of the buffer.
    """

    def __init__(self, seed: int, batch: int, *, start: int, device: torch.device) -> None:
        check_seed(seed)
        self._seed, self._start = seed, start
        self.drawn = start
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._block = torch.empty(batch, BLOCK, dtype=dtype, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)

    def advance(self) -> None:
        """Fill the buffer if the next step needs it; called before each step, outside of CUDA graphs."""
        if (self.drawn - self._start) % BLOCK == 0:
            columns = [uniforms(self._seed, row, self.drawn, BLOCK) for row in range(len(self._block))]
            drawn = np.stack(columns) if columns else np.empty((0, BLOCK))
            self._block.copy_(torch.from_numpy(drawn))
            self._place.zero_()
        self.drawn += 1

    def column(self) -> Float[Tensor, "b 1"]:
        """Return the random numbers of the current step, by device operations that a graph can capture."""
        column = self._block.index_select(1, self._place)
        self._place.add_(1)
        return column
