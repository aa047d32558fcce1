"""Texts as sequences of bytes, for tasks whose texts are read from files."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

VOCAB_SIZE = 256


def as_tokens(texts: Sequence[bytes], length: int) -> tuple[UInt8[Tensor, "n t"], Int64[Tensor, "n"]]:
    """Return texts as tokens, and how many each has.

    Args:
        texts: of any length. An empty one is a single byte 0, for no sequence is empty.
        length: t, bytes of a text at most; what follows them is left out.

    Returns:
        Bytes, followed by zeros, shape (n, t), uint8; lengths, shape (n), int64.

    Example:
        >>> tokens, lengths = as_tokens([b"abc", b"abcdef"], 4)
        >>> tokens.tolist(), lengths.tolist()
        ([[97, 98, 99, 0], [97, 98, 99, 100]], [3, 4])
    """
    tokens = np.zeros((len(texts), length), np.uint8)
    lengths = np.empty(len(texts), np.int64)
    for row, text in enumerate(texts):
        cut = np.frombuffer(text[:length], np.uint8)
        tokens[row, : len(cut)] = cut
        lengths[row] = max(1, len(cut))
    return torch.from_numpy(tokens), torch.from_numpy(lengths)
