"""IMDb: tell from the bytes of a film review whether it is positive; the Long Range Arena's Text task.

Source: Long Range Arena (Tay et al., 2020), arXiv:2011.04006, section 2.2.2. The data: Maas et al. (2011),
"Learning word vectors for sentiment analysis".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from linrec.errors import unknown
from linrec.lab.corpora.progress import ReadingDisplay
from linrec.lab.corpora.rows import load_splits
from linrec.lab.tasks.base import SplitName, require_at_least
from linrec.lab.tasks.byte_texts import VOCAB_SIZE, as_tokens
from linrec.lab.tasks.classification import ClassificationTask
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled import LabelledTokens
from linrec.text import DataError

__all__ = ["IMDb"]

FOLDER = "aclImdb"
# folders of the classes, in the order of their numbers
CLASSES = ("neg", "pos")
UNPACKED = (
    "Download and unpack https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz, and pass its "
    "folder aclImdb with --data.path"
)
WHERE = f"{UNPACKED}; or pass --data.dataset stanfordnlp/imdb."


class Review(NamedTuple):
    """A review and its class: 0 is negative, 1 is positive."""

    text: bytes
    label: int


@dataclass(frozen=True, kw_only=True)
class IMDb(FileTask, ClassificationTask):
    """Tell whether a film review is positive.

        target = 0 or 1, given the bytes x_1, ..., x_n of the review in UTF-8

    Of the data set's 25,000 training reviews, `n_validation` random reviews are held out for validation. The
    test split has the data set's own 25,000 test reviews. Some reviews occur more than once: training reviews
    that also occur in the test split are removed, and so are training reviews that also occur in the
    validation split. The data are the same for `path` and `dataset`; pass exactly one of them.

    Args:
        path: the folder aclImdb, or its parent folder.
        dataset: name or path of a Hugging Face data set, such as stanfordnlp/imdb, with the columns "text"
            and "label"; needs the extra "text".
        length: maximum number of bytes per review; longer reviews are cut.
        n_validation: number of training reviews that are held out for validation.
        seed: seed of the choice of validation reviews.

    Raises:
        ValueError: a field is out of range, or both `path` and `dataset` are given.

    Source: Long Range Arena (Tay et al., 2020), section 2.2.2, which reads 4,000 bytes. S4 (Gu, Goel and Ré,
    2022) reads 4,096 characters and an end token; characters that occur fewer than 15 times share a token.
    Both validate on the test split.

    Example:
        >>> task = IMDb(path=Path("aclImdb"))
        >>> task.vocab_size, task.n_outputs, task.chance
        (256, 2, 0.5)
    """

    dataset: str | None = None
    length: int = 4096
    n_validation: int = 2500
    seed: int = 0
    wanted: ClassVar[str] = f"It must be the folder of the IMDb reviews. {WHERE}"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, length=1, n_validation=1, seed=0)
        if self.path is not None and self.dataset is not None:
            raise ValueError(
                f"exactly one of `path` and `dataset` must be given; got both: {self.path}, {self.dataset}."
            )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: 256 bytes."""
        return VOCAB_SIZE

    @property
    def n_outputs(self) -> int:
        """Number of target classes: negative and positive."""
        return len(CLASSES)

    def read(self) -> dict[SplitName, LabelledTokens]:
        """Read the reviews, and return all splits."""
        if self.path is None and self.dataset is None:
            raise DataError(f"exactly one of `path` and `dataset` must be given; got neither. {WHERE}")
        # sorted, so that the order does not depend on the source
        known, test = map(sorted, self._reviews())
        # test reviews must not occur in the training and validation splits
        known = _without(known, test)
        order = np.random.default_rng(self.seed).permutation(len(known)).tolist()
        validation = [known[number] for number in order[: self.n_validation]]
        train = _without([known[number] for number in order[self.n_validation :]], validation)
        if not train:
            raise DataError(
                f"`n_validation` must be less than the {len(known)} training reviews that are not also test "
                f"reviews; got {self.n_validation}."
            )
        return {
            "train": self._split(train),
            "validation": self._split(validation),
            "test": self._split(test),
        }

    def _split(self, reviews: Sequence[Review]) -> LabelledTokens:
        tokens, lengths = as_tokens([review.text for review in reviews], self.length)
        return LabelledTokens(tokens, torch.tensor([review.label for review in reviews]), lengths)

    def _reviews(self) -> tuple[list[Review], list[Review]]:
        """Return the reviews for training and the reviews for testing."""
        if self.dataset is not None:
            return _of_dataset(self.dataset)
        folder = self.folder()
        folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        return _of_folder(folder / "train"), _of_folder(folder / "test")


def _without(reviews: list[Review], others: list[Review]) -> list[Review]:
    texts = {review.text for review in others}
    return [review for review in reviews if review.text not in texts]


def _of_folder(folder: Path) -> list[Review]:
    found = [(file, label) for label, name in enumerate(CLASSES) for file in _files(folder / name)]
    reviews = []
    try:
        with ReadingDisplay().reading(f"reading {folder}", len(found)) as advance:
            for file, label in found:
                reviews.append(Review(file.read_bytes(), label))
                advance(1)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror or error}.") from error
    return reviews


def _files(folder: Path) -> list[Path]:
    files = [*folder.glob("*.txt")]
    if not files:
        raise DataError(f"{folder} must contain reviews in files that end in .txt; it has none. {WHERE}")
    return files


def _of_dataset(dataset: str) -> tuple[list[Review], list[Review]]:
    try:
        splits = load_splits(dataset)
    except DataError as error:
        raise DataError(f"{error} {UNPACKED}.") from error
    for part in ("train", "test"):
        if part not in splits:
            raise DataError(f"`dataset` = {dataset} has no split {part!r}. {WHERE}")
    return _of_rows(splits["train"], dataset), _of_rows(splits["test"], dataset)


def _of_rows(rows: Any, dataset: str) -> list[Review]:
    for column in ("text", "label"):
        if column not in rows.column_names:
            raise DataError(f"`dataset` = {dataset}: {unknown('column', column, rows.column_names)}")
    columns: dict[str, Any] = rows.with_format(None)[:]
    if wrong := {*columns["label"]} - {*range(len(CLASSES))}:
        raise DataError(f"the labels of `dataset` = {dataset} must be 0 and 1; got {wrong.pop()}.")
    texts = (text.encode() for text in columns["text"])
    return [Review(text, label) for text, label in zip(texts, columns["label"], strict=True)]
