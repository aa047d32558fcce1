"""Tasks of texts: classify reviews of IMDb, and pairs of papers of the ACL Anthology Network."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt8
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.corpora.rows import load_splits
from linrec.lab.tasks.base import Batch, SplitName, StoredSource
from linrec.lab.tasks.files import FileTask
from linrec.lab.tasks.labelled import ClassificationTask, LabelledTokens
from linrec.text import DataError

__all__ = ["AAN", "IMDb", "TextPairs", "as_tokens"]

VOCAB_SIZE = 256


def as_tokens(
    texts: Sequence[bytes | Sequence[int]], length: int, dtype: type[np.integer[Any]] = np.uint8
) -> tuple[Int[Tensor, "n t"], Int64[Tensor, "n"]]:
    """Return texts as padded tokens, and the lengths of the texts.

    Args:
        texts: bytes or tokens, of any length. An empty text becomes a single token 0, because sequences are
            never empty.
        length: t, the maximum number of tokens; longer texts are cut.
        dtype: dtype of the tokens.

    Returns:
        Tokens, padded with zeros, shape (n, t), of `dtype`; lengths, shape (n), int64.
    """
    tokens = np.zeros((len(texts), length), dtype)
    lengths = np.empty(len(texts), np.int64)
    for row, text in enumerate(texts):
        cut = np.array([*text[:length]], dtype)
        tokens[row, : len(cut)] = cut
        lengths[row] = max(1, len(cut))
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


# folders of the classes, in the order of their numbers
CLASSES = ("neg", "pos")
UNPACKED = (
    "Download and unpack https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz, and pass its "
    "folder aclImdb with --data.path"
)
OR_HUB = f"{UNPACKED}; or pass --data.dataset stanfordnlp/imdb."


# a word of letters, digits and apostrophes, or another character
WORD = re.compile(r"[^\W_']+(?:'[^\W_]+)*|[^\w\s]")
LINE_BREAK = "<br />"


class Review(NamedTuple):
    """A review and its class: 0 is negative, 1 is positive."""

    text: bytes
    label: int


@dataclass(frozen=True, kw_only=True)
class IMDb(FileTask, ClassificationTask):
    """Tell whether a film review is positive, from its bytes, as the Long Range Arena's Text task, or words.

        target = 0 or 1, given the bytes x_1, ..., x_n of the review in UTF-8, or its words

    Of the data set's 25,000 training reviews, `n_validation` random reviews are held out for validation. The
    test split has the data set's own 25,000 test reviews. Some reviews occur more than once: training reviews
    that also occur in the test split are removed, and so are training reviews that also occur in the
    validation split. The data are the same for `path` and `dataset`; pass exactly one of them.

    Args:
        path: the folder aclImdb, or its parent folder.
        dataset: name or path of a Hugging Face data set, such as stanfordnlp/imdb, with the columns "text"
            and "label"; needs the extra "text".
        length: maximum number of bytes or words per review; longer reviews are cut.
        n_validation: number of training reviews that are held out for validation.
        seed: seed of the choice of validation reviews.
        n_words: None reads bytes. A number reads words and punctuation marks in lower case, without line
            breaks: the n most frequent in the training split are tokens 1 to n, all others are token 0.

    Source: Maas et al. (2011), "Learning word vectors for sentiment analysis", for the data; Long Range Arena
    (Tay et al., 2020, arXiv:2011.04006), section 2.2.2, which reads 4,000 bytes. S4 (Gu, Goel and Ré,
    2022) reads 4,096 characters and an end token; characters that occur fewer than 15 times share a token.
    Both validate on the test split. coRNN (Rusch and Mishra, 2021, arXiv:2010.00951) reads 25,000 words.

    Example:
        >>> task = IMDb(path=Path("aclImdb"))
        >>> task.vocab_size, task.n_outputs, task.chance
        (256, 2, 0.5)
    """

    dataset: str | None = None
    length: int = 4096
    n_validation: int = 2500
    seed: int = 0
    n_words: int | None = None
    n_outputs: ClassVar[int] = len(CLASSES)
    least: ClassVar[Mapping[str, int]] = {"length": 1, "n_validation": 1, "seed": 0, "n_words": 1}
    wanted: ClassVar[str] = f"It must be the folder of the IMDb reviews. {OR_HUB}"

    def check(self) -> None:
        """Require a single source of the reviews."""
        if self.path is not None and self.dataset is not None:
            raise ValueError(
                f"exactly one of `path` and `dataset` must be given; got both: {self.path}, {self.dataset}."
            )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: 256 bytes, or the words and the token of other words."""
        return VOCAB_SIZE if self.n_words is None else self.n_words + 1

    def read(self) -> dict[SplitName, LabelledTokens]:
        """Read the reviews, and return all splits."""
        if self.path is None and self.dataset is None:
            raise DataError(f"exactly one of `path` and `dataset` must be given; got neither. {OR_HUB}")
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
        counts: Counter[str] = Counter()
        if self.n_words is not None:
            for review in train:
                counts.update(words_of(review.text))
        # equally frequent words by the alphabet
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: self.n_words]
        numbers = {word: number for number, word in enumerate(ranked, start=1)}
        return {
            "train": self._split(train, numbers),
            "validation": self._split(validation, numbers),
            "test": self._split(test, numbers),
        }

    def _split(self, reviews: Sequence[Review], numbers: Mapping[str, int]) -> LabelledTokens:
        texts: Sequence[bytes | Sequence[int]] = [review.text for review in reviews]
        if self.n_words is not None:
            texts = [[numbers.get(word, 0) for word in words_of(review.text)] for review in reviews]
        dtype = np.uint8 if self.n_words is None else np.int32
        tokens, lengths = as_tokens(texts, self.length, dtype)
        return LabelledTokens(tokens, torch.tensor([review.label for review in reviews]), lengths)

    def _reviews(self) -> tuple[list[Review], list[Review]]:
        """Return the reviews for training and the reviews for testing."""
        if self.dataset is not None:
            return _of_dataset(self.dataset)
        folder = self.folder()
        folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
        return _of_folder(folder / "train"), _of_folder(folder / "test")


def words_of(text: bytes) -> list[str]:
    """Return the words and punctuation marks of a review in lower case, without its line breaks."""
    return WORD.findall(text.decode(errors="replace").replace(LINE_BREAK, " ").lower())


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
        raise DataError(f"{folder} must contain reviews in files that end in .txt; it has none. {OR_HUB}")
    return files


def _of_dataset(dataset: str) -> tuple[list[Review], list[Review]]:
    try:
        splits = load_splits(dataset)
    except DataError as error:
        raise DataError(f"{error} {UNPACKED}.") from error
    for part in ("train", "test"):
        if part not in splits:
            raise DataError(f"`dataset` = {dataset} has no split {part!r}. {OR_HUB}")
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


# file names in the Arena's release
FILES: dict[SplitName, str] = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
WHERE = (
    "They are in the folder lra_release/lra_release/tsv_data of the tar archive "
    "https://storage.googleapis.com/long-range-arena/lra_release.gz; pass this folder with --data.path."
)


@dataclass(frozen=True, eq=False)
class TextPairs(StoredSource):
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
        """Return pairs as a batch: inputs (b, 2, t), int64; targets (b), int64; and lengths (b, 2)."""
        index = index.to(self.labels.device)
        pairs = self.pairs[index]
        return Batch(self.texts[pairs].long(), self.labels[index], None, self.lengths[pairs])


@dataclass(frozen=True, kw_only=True)
class AAN(FileTask, ClassificationTask):
    """Tell from the bytes of two papers whether a citation links them; the Long Range Arena's Retrieval.

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

    Source: Radev, Muthukrishnan, Qazvinian and Abu-Jbara (2013), "The ACL anthology network corpus", for the
    data; Long Range Arena (Tay et al., 2020, arXiv:2011.04006), section 2.2.3: 4,000 bytes of each paper; the
    two papers are encoded separately.

    Example:
        >>> task = AAN(path=Path("lra_release/lra_release/tsv_data"))
        >>> task.vocab_size, task.n_outputs, task.pairs
        (256, 2, True)
    """

    length: int = 4000
    pairs: ClassVar[bool] = True
    vocab_size: ClassVar[int] = VOCAB_SIZE
    n_outputs: ClassVar[int] = 2
    least: ClassVar[Mapping[str, int]] = {"length": 1}
    wanted: ClassVar[str] = f"It must be the folder with {', '.join(FILES.values())}. {WHERE}"

    def read(self) -> dict[SplitName, TextPairs]:
        """Read the three files, and return all splits."""
        folder = self.folder()
        folder = folder / "tsv_data" if (folder / "tsv_data").is_dir() else folder
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
