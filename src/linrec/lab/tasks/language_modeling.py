"""Language modelling: predict the next token of a text from local files or a Hugging Face data set.

The text is tokenised once, into memory-mapped files. A split is a long array of tokens. A sequence is a
window of this array: `length` inputs, whose targets are the tokens shifted by a position.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.errors import unknown
from linrec.lab.corpora import DatasetRows, Shards, TextCounts, TextFiles, Texts, tokenised
from linrec.lab.corpora.genomes import Genome, is_genome
from linrec.lab.corpora.texts import CutFile, WithoutSpaces
from linrec.lab.tasks.base import NO_TARGET, SPLIT_NAMES, Batch, ObjectiveName, SplitName
from linrec.lab.tasks.fields import CheckedTask
from linrec.text import DataError, Tokenizer

__all__ = ["LanguageModeling", "TokenSplit"]

# maximum size in bytes of a split that is copied to the device as a whole
MOVED = 64 * 2**20
# signed dtypes of the same width, because torch cannot index with most unsigned dtypes
VIEWS = {2: np.dtype("<i2"), 4: np.dtype("<i4")}


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """Windows over the tokens x of a split: a `Source`.

        inputs_i = x_{o+i L}, ..., x_{o+i L+L-1}      targets_i = x_{o+i L+1}, ..., x_{o+i L+L}

    By default, for evaluation, o = 0, and the last window is padded with positions without a target, so that
    every token except the first is predicted exactly once. `of_epoch` shifts the windows for training.

    Attributes:
        ids: tokens, shape (n), int16 or int32; a view of the stored uint16 or uint32 tokens.
        length: tokens per window, L.
        starts: indices where documents begin, ascending, shape (m), int64; None for a single stream.
        counts: amount of text in the split.
        offset: index of the first window's first token, o.
        n_windows: number of windows; None is the number that predicts all following tokens.

    Example:
        >>> split = TokenSplit.of(np.arange(10, 18, dtype=np.uint16), length=3)
        >>> batch = split.rows(torch.tensor([0, 2]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[10, 11, 12], [16, 0, 0]], [[11, 12, 13], [17, -100, -100]])
        >>> split.of_epoch(seed=0, epoch=0).rows(torch.tensor([0])).inputs.tolist()
        [[14, 15, 16]]
    """

    ids: Int[Tensor, "n"]
    length: int
    starts: Int64[Tensor, "m"] | None = None
    counts: TextCounts = field(default_factory=TextCounts)
    offset: int = 0
    n_windows: int | None = None

    @classmethod
    def of(
        cls,
        tokens: NDArray[np.unsignedinteger],
        *,
        length: int,
        starts: NDArray[np.int64] | None = None,
        counts: TextCounts | None = None,
    ) -> "TokenSplit":
        """Return the windows over an array of tokens, uint16 or uint32, without copying it."""
        ids = torch.from_numpy(tokens.view(VIEWS[tokens.itemsize]))
        places = None if starts is None else torch.from_numpy(starts)
        return cls(ids, length, places, TextCounts(tokens=len(tokens)) if counts is None else counts)

    def __len__(self) -> int:
        if self.n_windows is not None:
            return self.n_windows
        # every token except the first is a target
        return -(-max(0, len(self.ids) - 1 - self.offset) // self.length)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return windows as a batch, on the device of the tokens.

        Returns:
            Inputs and targets, shape (b, length); after the end of the text, inputs are 0 and targets -100.
            `reset` is true at the first token of every document, or None for a single stream.
        """
        device = self.ids.device
        first = self.offset + index.to(device) * self.length
        place = first[:, None] + torch.arange(self.length + 1, device=device)
        last = len(self.ids) - 1
        beyond = place > last
        # the sign bit of the view is the highest bit of the token
        tokens = self.ids[place.clamp(max=last)].long() & (2 ** (8 * self.ids.itemsize) - 1)
        inputs = tokens[:, :-1].masked_fill(beyond[:, 1:], 0)
        targets = tokens[:, 1:].masked_fill(beyond[:, 1:], NO_TARGET)
        return Batch(inputs, targets, self._reset(place[:, :-1]))

    def of_epoch(self, *, seed: int, epoch: int) -> "TokenSplit":
        """Return the windows of a training epoch, without padding and with the same number in every epoch.

            o uniform on 0 .. n - 1 - L w     with w = max(1, floor((n - L) / L)) windows over n tokens

        The first window begins at a random token, so that fewer than 2 L tokens are left out in an epoch.
        Over many epochs, every token is predicted with contexts of every length up to L. A text of fewer than
        L + 1 tokens has no window.

        Args:
            seed: the run's seed.
            epoch: number of the epoch, from 0.
        """
        n_targets = max(0, len(self.ids) - 1)
        if n_targets < self.length:
            return dataclasses.replace(self, offset=0, n_windows=0)
        # this number of windows fits for every start within the first L tokens
        n_windows = max(1, (n_targets - self.length + 1) // self.length)
        spare = n_targets - n_windows * self.length
        # the last number separates this random stream from the order of the windows
        offset = int(np.random.default_rng([seed, epoch, 1]).integers(spare + 1))
        return dataclasses.replace(self, offset=offset, n_windows=n_windows)

    def to(self, device: torch.device | str) -> "TokenSplit":
        """Return the split with its tokens on a device, or the split itself if it is larger than 64 MiB."""
        if self.ids.nbytes > MOVED or torch.device(device) == self.ids.device:
            return self
        starts = None if self.starts is None else self.starts.to(device)
        return dataclasses.replace(self, ids=self.ids.to(device), starts=starts)

    def tokens(self) -> NDArray[np.unsignedinteger]:
        """Return all tokens of the split, uint16 or uint32, as a view of the memory-mapped file."""
        ids = self.ids.cpu().numpy()
        return ids.view(f"<u{ids.itemsize}")

    def with_length(self, length: int) -> "TokenSplit":
        """Return the same tokens in windows of another length, for evaluation."""
        if length < 1:
            raise ValueError(f"`length` must be at least 1; got {length}.")
        return dataclasses.replace(self, length=length, offset=0, n_windows=None)

    def _reset(self, place: Int64[Tensor, "b t"]) -> Tensor | None:
        if self.starts is None:
            return None
        nearest = torch.searchsorted(self.starts, place.contiguous()).clamp(max=len(self.starts) - 1)
        return self.starts[nearest] == place


@dataclass(frozen=True)
class LanguageModeling(CheckedTask):
    """Predict the next token of a text.

        target_n = x_{n+1}

    Pass the text as `path` or as `dataset`. The splits are the source's own. A missing validation or test
    split is cut from the end of the training text. The text is tokenised on first use, and cached for every
    combination of text, tokenizer and splits. The data depend on the fields and on the files.

    Every token of a split except the first is a target. With `documents`, the first token of a document is
    also a target, predicted at the last token of the document before, as is common.

    Args:
        path: a text file, a folder of text files, or a glob; see `TextFiles`.
        dataset: name or path of a Hugging Face data set; see `DatasetRows`.
        dataset_config: configuration of the data set, if it has several.
        text_column: column of the data set that holds the text.
        tokenizer: "bytes"; "characters" or "words" for those of the training text; the name or path of a
            Hugging Face tokenizer, such as "gpt2"; or a run folder, for the run's tokenizer.
        length: tokens of context, which is the length of training sequences.
        documents: whether every file, or every row of the data set, is a document. Documents are separated by
            `reset`, and end with the tokenizer's end-of-document token, if it has this token. If False, the
            text of a split is a single stream.
        validation_share: fraction of the training text that is held out for validation, if the source has no
            validation split.
        test_share: fraction of the training text that is held out for testing, if the source has no test
            split.
        cache: folder for tokens; None is `linrec` in the user's cache folder.
        vocab_size: vocabulary size of the model; None is the tokenizer's. A larger size pads the vocabulary,
            which is faster on some hardware.
        drop_spaces: whether the spaces of the text are dropped, for files that separate characters by spaces,
            such as Mikolov's ptb.char.train.txt.
        held_out_bytes: number of bytes at the end of the single file `path` for testing, and before them for
            validation, in place of the shares: 5,000,000 for the 100,000,000 of enwik8 and of text8. 0
            disables it.
        intervals: a BED file with the intervals of `path`, a document each. A `path` that ends in .fa, .fasta
            or .fna is a FASTA file; see `Genome`.

    Raises:
        DataError: a field is out of range, or both `path` and `dataset` are given.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "rose.txt").write_text("a rose is a rose is a rose")
        >>> path = folder / "rose.txt"
        >>> task = LanguageModeling(path=path, tokenizer="characters", length=4, cache=folder).prepared()
        >>> task.vocab_size
        7
        >>> batch = task.split("train").rows(torch.tensor([0]))
        >>> decode = task.tokenizer_object().decode
        >>> decode(batch.inputs[0]), decode(batch.targets[0])
        ('a ro', ' ros')
    """

    path: Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    text_column: str = "text"
    tokenizer: str = "bytes"
    length: int = 256
    documents: bool = False
    validation_share: float = 0.1
    test_share: float = 0.0
    cache: Path | None = None
    vocab_size: int | None = None
    drop_spaces: bool = False
    held_out_bytes: int = 0
    intervals: Path | None = None
    section: ClassVar[str] = "data"
    n_features: ClassVar[int | None] = None
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"

    def check(self) -> None:
        """Require a single source of the text, and shares."""
        if self.path is not None and self.dataset is not None:
            raise DataError(
                f"exactly one of `path` and `dataset` must be given; got both: {self.path}, {self.dataset}."
            )
        if self.length < 1:
            raise DataError(f"`length` must be at least 1; got {self.length}.")
        if self.held_out_bytes < 0 or (self.held_out_bytes and self.dataset is not None):
            raise DataError(
                f"`held_out_bytes` must be at least 0, and 0 for a `dataset`; got {self.held_out_bytes} and "
                f"`dataset` = {self.dataset}. Pass a file as `path`."
            )
        shares = (self.validation_share, self.test_share)
        if min(shares) < 0 or sum(shares) >= 1:
            raise DataError(
                "`validation_share` and `test_share` must be at least 0, with a sum below 1; "
                f"got {self.validation_share} and {self.test_share}."
            )

    @property
    def n_outputs(self) -> int | None:
        """Number of target classes: the vocabulary size."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess: 1 / vocab_size."""
        if self.vocab_size is None:
            raise DataError("`vocab_size` must be set; got None. Call `prepared()` first.")
        return 1 / self.vocab_size

    @cached_property
    def trivial_score(self) -> float:
        """Accuracy of always predicting the most frequent training token, on the test or validation split."""
        held_out = next(
            (name for name in ("test", "validation") if self._shards.counts(name).tokens > 1), "train"
        )
        majority = _histogram(self._shards.tokens("train")).argmax()
        targets = self._shards.tokens(held_out)[1:]
        return float(_histogram(targets, at_least=int(majority) + 1)[majority] / len(targets))

    @property
    def reset_token(self) -> None:
        """Always None: `Batch.reset` marks the beginnings of documents."""
        return None

    def prepared(self) -> "LanguageModeling":
        """Return the task with `vocab_size` set; tokenises the text if its tokens are not cached.

        Raises:
            DataError: the text does not exist, cannot be tokenised, or is shorter than a window; or
                `vocab_size` is less than the tokenizer's vocabulary.
        """
        n_tokens = self._shards.counts("train").tokens
        if n_tokens <= self.length:
            raise DataError(
                f"the training text has {n_tokens} tokens, too few for a window of `length` = {self.length} "
                "and the token after it. Pass a smaller length or more text."
            )
        needed = self.tokenizer_object().vocab_size
        if self.vocab_size is not None and self.vocab_size < needed:
            raise DataError(
                f"`vocab_size` must be at least the {needed} tokens of the tokenizer {self.tokenizer!r}; "
                f"got {self.vocab_size}. Leave it out."
            )
        return self.passing_on("_shards", vocab_size=self.vocab_size or needed)

    def at_length(self, length: int) -> "LanguageModeling":
        """Return the task with windows of another length."""
        return self.passing_on("_shards", length=length)

    def split(self, name: SplitName) -> TokenSplit:
        """Return the windows over the text of a split; no windows if the text does not have this split.

        Raises:
            ValueError: `name` is not the name of a split.
            DataError: the text cannot be read or tokenised.
        """
        if name not in SPLIT_NAMES:
            raise unknown("split", name, SPLIT_NAMES)
        return TokenSplit.of(
            self._shards.tokens(name),
            length=self.length,
            starts=self._shards.starts(name) if self.documents else None,
            counts=self._shards.counts(name),
        )

    def tokenizer_object(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return self._shards.tokenizer

    @cached_property
    def _shards(self) -> Shards:
        texts: Texts
        if self.intervals is not None and (self.path is None or not is_genome(self.path)):
            raise DataError(f"`intervals` needs a FASTA file as `path`; got {self.path}. Leave it out.")
        if self.path is not None and self.held_out_bytes:
            texts = CutFile(self.path, self.held_out_bytes)
        elif self.path is not None:
            texts = Genome(self.path, self.intervals) if is_genome(self.path) else TextFiles(self.path)
        elif self.dataset is not None:
            texts = DatasetRows(self.dataset, config=self.dataset_config, column=self.text_column)
        else:
            raise DataError(
                "exactly one of `path` and `dataset` must be given; got neither. Pass --data.path FILE, or "
                "--data.dataset NAME."
            )
        if self.drop_spaces:
            texts = WithoutSpaces(texts)
        shares = {"validation": self.validation_share, "test": self.test_share}
        return tokenised(texts, self.tokenizer, documents=self.documents, shares=shares, cache=self.cache)


def _histogram(tokens: NDArray[np.unsignedinteger], *, at_least: int = 0) -> NDArray[np.int64]:
    """Count every token, in chunks, because `np.bincount` converts its input to 64-bit integers."""
    total = np.zeros(at_least, dtype=np.int64)
    for start in range(0, len(tokens), 2**24):
        counts = np.bincount(tokens[start : start + 2**24], minlength=len(total))
        counts[: len(total)] += total
        total = counts
    return total
