"""Conversion of texts to byte tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

VOCAB_SIZE = 256


def as_tokens(texts: Sequence[bytes], length: int) -> tuple[UInt8[Tensor, "n t"], Int64[Tensor, "n"]]:
    """Return texts as padded byte tokens, and the lengths of the texts.

    Args:
        texts: texts of any length. An empty text becomes a single byte 0, because sequences are never empty.
        length: t, the maximum number of bytes; longer texts are cut.

    Returns:
        Bytes, padded with zeros, shape (n, t), uint8; lengths, shape (n), int64.

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
