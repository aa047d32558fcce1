"""Generation of raw audio: predict every sample of recordings from the samples before it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.tasks.audio import mu_law, read_wav
from linrec.lab.tasks.base import SplitName
from linrec.lab.tasks.pixels import ByteSplit, ByteTask
from linrec.text import DataError

__all__ = ["Recordings"]


@dataclass(frozen=True, kw_only=True)
class Recordings(ByteTask):
    """Predict every sample of sound recordings from the samples before it.

        target_t = m_t, given 256, m_1, ..., m_{t-1}      bits per sample = loss / ln 2

    The folder has wav files of 16 bits and of one rate, in it or below it, such as music. Channels are
    averaged. m are the samples with 8 bits by the mu-law, see `linrec.lab.tasks.audio.mu_law`. A sequence is
    a piece of `length` samples of a file; shorter ends are left out. Of all pieces, in the order of files and
    time, the last ones are for testing, and those before them for validation.

    Args:
        path: the folder.
        length: number of samples of a piece.
        validation_share: share of the pieces for validation, at least one.
        test_share: share of the pieces for testing, at least one.

    Source: SaShiMi (Goel, Gu, Donahue and Ré, 2022, arXiv:2202.09729), section 5.1, for the task, with pieces
    of 8 seconds to a minute at 16 kHz.

    Example:
        >>> Recordings(length=128_000).vocab_size
        257
    """

    length: int = 16_000
    validation_share: float = 0.06
    test_share: float = 0.06
    least: ClassVar[Mapping[str, int]] = {"length": 1}
    wanted: ClassVar[str] = "Pass a folder of wav files of 16 bits with --data.path."

    def check(self) -> None:
        """Require shares that leave samples for training."""
        shares = self.validation_share, self.test_share
        if min(shares) <= 0 or sum(shares) >= 1:
            raise ValueError(
                f"`validation_share` and `test_share` must be above 0, below 1 together; got {shares}."
            )

    def read(self) -> dict[SplitName, ByteSplit]:
        """Read the files, and return all splits."""
        folder = self.folder()
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".wav")
        if not paths:
            raise DataError(f"{folder} must have wav files in it or below it; it has none. {self.wanted}")
        rates, found = set(), []
        with ReadingDisplay().reading(f"reading {folder}", len(paths)) as advance:
            for path in paths:
                samples, rate = read_wav(path)
                rates.add(rate)
                found.append(_pieces(samples.mean(1), self.length))
                advance(1)
        if len(rates) > 1:
            raise DataError(
                f"{folder} must have recordings of one rate; it has {sorted(rates)} Hz. Convert the files."
            )
        pieces = torch.cat(found)
        sizes = [max(1, round(len(pieces) * s)) for s in (self.validation_share, self.test_share)]
        if len(pieces) <= sum(sizes):
            raise DataError(
                f"{folder} has {len(pieces)} pieces of {self.length:,} samples, too few for three splits. "
                "Pass a smaller --data.length."
            )
        train, validation, test = pieces.split([len(pieces) - sum(sizes), *sizes])
        return {"train": ByteSplit(train), "validation": ByteSplit(validation), "test": ByteSplit(test)}


def _pieces(samples: Float64[np.ndarray, "t"], length: int) -> UInt8[Tensor, "n length"]:
    """Return the whole pieces of a recording, by the mu-law."""
    n = len(samples) // length
    return mu_law(torch.from_numpy(samples[: n * length] / 2**15)).reshape(n, length)
