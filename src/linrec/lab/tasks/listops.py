"""ListOps: evaluate nested operations on lists of digits, as in the Long Range Arena.

Source: Nangia and Bowman (2018), arXiv:1804.06028, in the longer form of the Long Range Arena (Tay et al.,
2020), arXiv:2011.04006, section 2.2.1, with the settings of its code. The Arena's generator has no seed, so
its files cannot be reproduced; this task generates new samples from a seed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from linrec.lab.tasks.base import require_at_least
from linrec.lab.tasks.labelled import LabelledTask, LabelledTokens

__all__ = ["ListOps", "expression"]

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""The symbol of each token."""


@dataclass(frozen=True, kw_only=True)
class ListOps(LabelledTask):
    """Evaluate an expression in prefix notation, whose value is a digit.

        [MAX 2 9 [MIN 4 7 ] 0 ]   ->   9

    A node is an operator with probability 1/4 and a digit otherwise; nodes at the maximum depth are digits.
    Operators are MIN, MAX, MED (the median, rounded down) and SM (the sum modulo 10). The number of arguments
    is uniform from 2 to `n_arguments`. Expressions outside of the range of lengths are rejected, and so are
    repeated expressions. Tokens are the digits 0 to 9, then [MIN, [MAX, [MED, [SM and ].

    Classes are not equally frequent: MIN and MAX produce many 0 and 9, about 17% and 16%; other digits have 7
    to 10%.

    Args:
        length: maximum number of tokens in an expression.
        min_length: minimum number of tokens in an expression.
        depth: maximum depth of the tree, counting the root and the digits.
        n_arguments: maximum number of arguments of an operator.
        n_train: number of training samples.
        n_validation: number of validation samples.
        n_test: number of test samples.
        seed: seed of the data only.
        cache: folder for generated samples; None is `linrec/tasks` in the user's cache folder.

    Raises:
        ValueError: a field is out of range, or there are too few distinct samples.

    Source: Long Range Arena (Tay et al., 2020), section 2.2.1: more than 500 and fewer than 2,000 tokens, ten
    levels, up to ten arguments, 96,000 samples for training and 2,000 each for validation and testing.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> sizes = {"n_train": 3, "n_validation": 1, "n_test": 1, "cache": Path(tempfile.mkdtemp())}
        >>> task = ListOps(length=9, min_length=5, depth=3, n_arguments=3, **sizes)
        >>> batch = task.split("train").rows(torch.tensor([0]))
        >>> expression(batch.inputs[0, : batch.lengths[0]].tolist()), batch.targets[0].item()
        ('[SM 6 [MED 9 4 ] 8 ]', 0)
    """

    length: int = 1999
    min_length: int = 501
    depth: int = 10
    n_arguments: int = 10
    n_train: int = 96_000
    n_validation: int = 2_000
    n_test: int = 2_000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, min_length=1, depth=1, n_arguments=2)
        if self.length < self.min_length:
            raise ValueError(
                f"`length` must be at least `min_length` = {self.min_length}; got {self.length}."
            )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: ten digits, four operators and the closing bracket."""
        return len(SYMBOLS)

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the digits."""
        return 10

    def draw(self, random: np.random.Generator, n: int) -> LabelledTokens:
        """Draw at most n expressions and their values; fewer if expressions of these lengths are rare."""
        # imported here, so that the kernels are compiled only when samples are generated
        from linrec.lab.tasks import listops_kernels

        tokens = np.empty((n, self.length), np.uint8)
        values, lengths = np.empty(n, np.int64), np.empty(n, np.int64)
        found = listops_kernels.draw(
            random, self.depth, self.n_arguments, self.min_length, tokens, values, lengths
        )
        tensors = (torch.from_numpy(array[:found]) for array in (tokens, values, lengths))
        return LabelledTokens(*tensors)


def expression(tokens: Iterable[int]) -> str:
    """Return an expression as text.

    Args:
        tokens: a sequence of tokens without padding.

    Example:
        >>> expression([11, 2, 9, 10, 4, 7, 14, 0, 14])
        '[MAX 2 9 [MIN 4 7 ] 0 ]'
    """
    return " ".join(SYMBOLS[token] for token in tokens)
