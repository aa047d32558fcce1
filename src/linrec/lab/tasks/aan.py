"""Retrieval in the ACL Anthology Network: tell from the bytes of two papers whether a citation links them.

Source: Long Range Arena (Tay et al., 2020), arXiv:2011.04006, section 2.2.3. The data: Radev, Muthukrishnan,
Qazvinian and Abu-Jbara (2013), "The ACL anthology network corpus".
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from linrec.lab.corpora.progress import ReadingDisplay
from linrec.lab.tasks.base import Batch, SplitName, require_at_least
from linrec.lab.tasks.byte_texts import VOCAB_SIZE, as_tokens
from linrec.lab.tasks.classification import ClassificationTask
from linrec.lab.tasks.files import FileTask
from linrec.text import DataError

__all__ = ["AAN", "TextPairs"]

# file names in the Arena's release
FILES: dict[SplitName, str] = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
FOLDER = "tsv_data"
WHERE = (
    "They are in the folder lra_release/lra_release/tsv_data of the tar archive "
    "https://storage.googleapis.com/long-range-arena/lra_release.gz; pass this folder with --data.path."
)


@dataclass(frozen=True, eq=False)
class TextPairs:
    """Labelled pairs of texts: a `Source` of a `PairedTask`.

    Attributes:
        texts: bytes of the distinct texts, shape (m, t), uint8, padded at the end.
        lengths: number of bytes of each text, shape (m), int64.
        pairs: indices of the two texts of each pair, shape (n, 2), int64.
        labels: class of each pair, shape (n), int64.

    Example:
        >>> texts, lengths = as_tokens([b"abc", b"de"], 3)
        >>> split = TextPairs(texts, lengths, torch.tensor([[0, 1], [1, 1]]), torch.tensor([1, 0]))
        >>> batch = split.rows(torch.tensor([0]))
        >>> batch.inputs.tolist(), batch.targets.tolist(), batch.lengths.tolist()
        ([[[97, 98, 99], [100, 101, 0]]], [1], [[3, 2]])
    """

    texts: UInt8[Tensor, "m t"]
    lengths: Int64[Tensor, "m"]
    pairs: Int64[Tensor, "n 2"]
    labels: Int64[Tensor, "n"]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return pairs as a batch, on the device of the split.

        Args:
            index: indices of pairs, shape (b), int64, on any device.

        Returns:
            Inputs, shape (b, 2, t), int64; targets, shape (b), int64; `reset` None; lengths, shape (b, 2).
        """
        index = index.to(self.labels.device)
        pairs = self.pairs[index]
        return Batch(self.texts[pairs].long(), self.labels[index], None, self.lengths[pairs])

    def of_epoch(self, *, seed: int, epoch: int) -> "TextPairs":
        """Return the split itself: its pairs are the same in every epoch."""
        return self

    def to(self, device: torch.device | str) -> "TextPairs":
        """Return the split with its texts on a device."""
        tensors = (self.texts, self.lengths, self.pairs, self.labels)
        return TextPairs(*(tensor.to(device) for tensor in tensors))


@dataclass(frozen=True, kw_only=True)
class AAN(FileTask, ClassificationTask):
    """Tell whether a citation links two papers.

        target = 0 or 1, given the bytes x_1, ..., x_n and y_1, ..., y_m of two papers

    The folder contains three files of the Arena's release, a file per split: new_aan_pairs.train.tsv,
    new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv. A line is a pair: label, two names and two texts,
    separated by tabs. The texts in these files are written as Python bytes literals, b'...'; like the Arena
    and S4, this task reads the literal's characters unchanged.

    A paper occurs in several pairs, and pairs of different splits may share a paper. A pair that occurs in
    several files, in any order, is kept only in the test split, or else in the validation split.

    Args:
        path: the folder of the three files, or the folder that contains tsv_data.
        length: maximum number of bytes per paper; longer papers are cut.

    Raises:
        ValueError: a field is out of range.

    Source: Long Range Arena (Tay et al., 2020), section 2.2.3: 4,000 bytes of each paper; the two papers are
    encoded separately.

    Example:
        >>> task = AAN(path=Path("lra_release/lra_release/tsv_data"))
        >>> task.vocab_size, task.n_outputs, task.pairs
        (256, 2, True)
    """

    length: int = 4000
    pairs: ClassVar[bool] = True
    wanted: ClassVar[str] = f"It must be the folder with {', '.join(FILES.values())}. {WHERE}"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, length=1)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: 256 bytes."""
        return VOCAB_SIZE

    @property
    def n_outputs(self) -> int:
        """Number of target classes: 2, no citation or a citation."""
        return 2

    def read(self) -> dict[SplitName, TextPairs]:
        """Read the three files, and return all splits."""
        folder = self.folder()
        folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        for name in FILES.values():
            if not (folder / name).is_file():
                raise DataError(f"{folder} has no {name}. {self.wanted}")
        # test pairs are removed from the other splits, validation pairs from the training split
        seen: set[bytes] = set()
        test = self._split(folder / FILES["test"], seen)
        validation = self._split(folder / FILES["validation"], seen)
        return {
            "train": self._split(folder / FILES["train"], seen),
            "validation": validation,
            "test": test,
        }

    def _split(self, path: Path, seen: set[bytes]) -> TextPairs:
        """Return the pairs of a file that are not in `seen`, and add them to `seen`."""
        # a paper occurs in many pairs, but is stored once
        numbers: dict[bytes, int] = {}
        pairs, labels = [], []
        new: set[bytes] = set()
        for label, *pair in _lines(path):
            # identifies a pair by its whole texts, regardless of their order
            known_by = hashlib.sha256(b"\t".join(sorted(pair))).digest()
            if known_by in seen:
                continue
            new.add(known_by)
            pairs.append([numbers.setdefault(text[: self.length], len(numbers)) for text in pair])
            labels.append(label)
        if not labels:
            raise DataError(f"{path} has no pair that is not also in another split. {self.wanted}")
        seen |= new
        texts, lengths = as_tokens([*numbers], self.length)
        return TextPairs(texts, lengths, torch.tensor(pairs), torch.tensor(labels))


def _lines(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the label and the two texts of each pair in a file."""
    try:
        with (
            path.open("rb") as file,
            ReadingDisplay().reading(f"reading {path.name}", path.stat().st_size) as advance,
        ):
            for number, line in enumerate(file, start=1):
                yield _pair(line, f"line {number} of {path}")
                advance(len(line))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _pair(line: bytes, place: str) -> tuple[int, bytes, bytes]:
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != 5:
        raise DataError(
            f"{place} must have 5 fields, label, two names and two texts, separated by tabs; it has "
            f"{len(fields)}. The release's files only_ids.tsv have names without texts and cannot be used."
        )
    label, _, _, first, second = fields
    # the label may be written as an integer or as a float
    if label not in (b"0", b"1", b"0.0", b"1.0"):
        raise DataError(f"{place} must begin with the label 0 or 1; it begins with {label[:20]!r}.")
    return int(label[:1]), first, second
