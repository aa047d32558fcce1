"""Language modelling: predict the next token of a text, from local files or a data set of Hugging Face.

The text is tokenised once, into files that are mapped into memory. A split is one long array of tokens, and a
sequence is a window of it: `length` inputs, whose targets are the tokens one further on.
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
from linrec.tasks.base import NO_TARGET, SPLIT_NAMES, Batch, ObjectiveName, SplitName
from linrec.text import DataError, DatasetRows, Shards, TextCounts, TextFiles, Tokenizer, tokenised

__all__ = ["LanguageModeling", "TokenSplit"]

# a split of at most so many bytes of tokens goes to the device whole
MOVED = 64 * 2**20
# signed types of the same width: torch indexes few unsigned ones
VIEWS = {2: np.dtype("<i2"), 4: np.dtype("<i4")}


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """Windows over the tokens x of a split: a `Source`.

        inputs_i = x_{o + i L}, ..., x_{o + i L + L - 1}      targets_i = the tokens one further on

    As it comes, for evaluation, o = 0 and the last window is filled up with positions without target, so that
    every token but the first is predicted exactly once. `of_epoch` moves the windows for training.

    Attributes:
        ids: tokens, shape (n), int16 or int32 with the bits of the unsigned type that they are stored in.
        length: tokens of a window, L.
        starts: places where documents begin, ascending, shape (m), int64; None where documents do not count.
        counts: how much text the split has.
        offset: where the first window begins, o.
        n_windows: number of windows; None is as many as it takes to predict all that follows.

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
        # one target for every token but the first
        return -(-max(0, len(self.ids) - 1 - self.offset) // self.length)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return windows as a batch, on the device that the tokens are on.

        Args:
            index: numbers of windows, shape (b), int64, on any device.

        Returns:
            Inputs and targets, shape (b, length); beyond the end inputs are 0 and targets -100. `reset` is
            true at the first token of every document, None where documents do not count.
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
        """Return the windows of a training epoch: all full, and as many in every epoch.

            o uniform on 0 .. n - 1 - L w     with w = max(1, floor((n - L) / L)) windows over n tokens

        The first window begins at a pseudo-random place, which leaves out fewer than 2 L tokens. Over the
        epochs every token is predicted from contexts of every length, and none is left out for good. Where
        there are fewer than L + 1 tokens, there is no window.

        Args:
            seed: the run's seed.
            epoch: which epoch, from 0.
        """
        n_targets = max(0, len(self.ids) - 1)
        if n_targets < self.length:
            return dataclasses.replace(self, offset=0, n_windows=0)
        # wherever in the first L places the windows begin, there is room for so many
        n_windows = max(1, (n_targets - self.length + 1) // self.length)
        spare = n_targets - n_windows * self.length
        # the last number makes it another stream than that of the order of the windows
        offset = int(np.random.default_rng([seed, epoch, 1]).integers(spare + 1))
        return dataclasses.replace(self, offset=offset, n_windows=n_windows)

    def to(self, device: torch.device | str) -> "TokenSplit":
        """Return the split with its tokens on a device, or itself where they take more than 64 MB."""
        if self.ids.nbytes > MOVED or torch.device(device) == self.ids.device:
            return self
        starts = None if self.starts is None else self.starts.to(device)
        return dataclasses.replace(self, ids=self.ids.to(device), starts=starts)

    def tokens(self) -> NDArray[np.unsignedinteger]:
        """Return all tokens of the split, uint16 or uint32; a view of the mapped file."""
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
class LanguageModeling:
    """Predict the next token of a text, and the configuration that says of which text.

        target_n = x_{n+1}

    One of `path` and `dataset` says where the text is. The splits are the source's own; a validation or test
    split that it does not have is cut from the end of its training text. The text is tokenised when it is
    first needed, once for each text, tokenizer and way of cutting. The data depends on the fields and on the
    files.

    Every token but the first of a split is a target. With `documents` the first token of a document is
    predicted too, from the end of the one before, as is usual.

    Args:
        path: a text file, a folder of text files, or a glob; see `TextFiles`.
        dataset: name or path of a data set of Hugging Face; see `DatasetRows`.
        dataset_config: which configuration of the data set, where it has several.
        text_column: the column of the data set that holds the text.
        tokenizer: "bytes"; "characters", those of the training text; name or path of one of Hugging Face's,
            such as "gpt2"; or a run folder, for that run's.
        length: tokens of context: inputs of one sequence.
        documents: whether every file, or every row of the data set, is a document: followed by the
            tokenizer's end-of-document token, where it has one, and kept from the others by `reset`. If not,
            all text of a split is one stream.
        validation_share: share of the training text that validates, where the source has no such split.
        test_share: the same for testing.
        cache: where tokens are kept; None is `linrec` in the user's folder for caches.
        vocab_size: number of tokens of the model; None is the tokenizer's. A larger one is padding, which
            some hardware is faster with.

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
    section: ClassVar[str] = "data"
    n_features: ClassVar[int | None] = None
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"

    def __post_init__(self) -> None:
        # a configuration that was stored as JSON has strings
        for name in ("path", "cache"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else Path(value))
        if self.path is not None and self.dataset is not None:
            raise DataError(
                f"one of `path` and `dataset` must be given; got both, {self.path} and {self.dataset}."
            )
        if self.length < 1:
            raise DataError(f"`length` must be at least 1; got {self.length}.")
        shares = (self.validation_share, self.test_share)
        if min(shares) < 0 or sum(shares) >= 1:
            raise DataError(
                "`validation_share` and `test_share` must be at least 0 and together less than 1; "
                f"got {self.validation_share} and {self.test_share}."
            )

    @property
    def n_outputs(self) -> int | None:
        """Number of target classes: as many as input tokens."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess: 1 / vocab_size."""
        if self.vocab_size is None:
            raise DataError("`vocab_size` is known after `prepared()`; got None. Prepare the task first.")
        return 1 / self.vocab_size

    @cached_property
    def trivial_score(self) -> float:
        """Accuracy of always the most frequent training token: on the test split, or else on validation."""
        held_out = next(
            (name for name in ("test", "validation") if self._shards.counts(name).tokens > 1), "train"
        )
        majority = _histogram(self._shards.tokens("train")).argmax()
        targets = self._shards.tokens(held_out)[1:]
        return float(_histogram(targets, at_least=int(majority) + 1)[majority] / len(targets))

    @property
    def reset_token(self) -> None:
        """There is none: `reset` says where documents begin."""
        return None

    def prepared(self) -> "LanguageModeling":
        """Return the task with its `vocab_size`, after tokenising the text where that was not done before.

        Raises:
            DataError: there is no text, it cannot be tokenised, or it is shorter than one window; or
                `vocab_size` is less than the tokenizer's.
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
        task = dataclasses.replace(self, vocab_size=self.vocab_size or needed)
        # the files need not be looked at again
        task.__dict__["_shards"] = self._shards
        return task

    def split(self, name: SplitName) -> TokenSplit:
        """Return the windows over the text of a split.

        Args:
            name: "train", "validation" or "test".

        Returns:
            The windows; none where the text has no such split.

        Raises:
            ValueError: there is no such name.
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
        if self.path is not None:
            texts: TextFiles | DatasetRows = TextFiles(self.path)
        elif self.dataset is not None:
            texts = DatasetRows(self.dataset, config=self.dataset_config, column=self.text_column)
        else:
            raise DataError(
                "one of `path` and `dataset` must be given; got neither. Pass --data.path FILE, or "
                "--data.dataset NAME."
            )
        shares = {"validation": self.validation_share, "test": self.test_share}
        return tokenised(texts, self.tokenizer, documents=self.documents, shares=shares, cache=self.cache)


def _histogram(tokens: NDArray[np.unsignedinteger], *, at_least: int = 0) -> NDArray[np.int64]:
    """Count each token in pieces, since counting makes integers of 64 bits."""
    total = np.zeros(at_least, dtype=np.int64)
    for start in range(0, len(tokens), 2**24):
        counts = np.bincount(tokens[start : start + 2**24], minlength=len(total))
        counts[: len(total)] += total
        total = counts
    return total
