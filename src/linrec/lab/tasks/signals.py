"""Tasks of recorded signals: words of Speech Commands, and activities of a smartphone's owner."""

import hashlib
import os
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.tasks.base import SPLIT_NAMES, SplitName, require_at_least
from linrec.lab.tasks.files import FileTask, kept
from linrec.lab.tasks.labelled import ClassificationTask, LabelledSeries, stratified
from linrec.text import DataError

__all__ = ["Har2", "SpeechCommands"]

RATE = 16_000
"""Samples per second, and samples per clip."""
WORDS: Mapping[int, tuple[str, ...]] = {
    10: ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"),
    35: (
        *("backward", "bed", "bird", "cat", "dog", "down", "eight", "five", "follow", "forward", "four"),
        *("go", "happy", "house", "learn", "left", "marvin", "nine", "no", "off", "on", "one", "right"),
        *("seven", "sheila", "six", "stop", "three", "tree", "two", "up", "visual", "wow", "yes", "zero"),
    ),
}
LISTS: Mapping[SplitName, str] = {"validation": "validation_list.txt", "test": "testing_list.txt"}
SHARES = (0.7, 0.15, 0.15)
SMALL = 1e-5 * 2**15
"""Constant 1e-5 that the literature adds to the standard deviation, in units of 16-bit samples."""
AT_ONCE = 500


class Clip(NamedTuple):
    """A recording.

    Args:
        name: folder and file name, as in the lists.
        label: class of the word.
        size: size of the file in bytes.
        changed: modification time of the file, in nanoseconds.
    """

    name: str
    label: int
    size: int
    changed: int


@dataclass(frozen=True, kw_only=True)
class SpeechCommands(FileTask, ClassificationTask):
    """Classify the spoken word in a second of audio.

        target = word, given x_1, ..., x_16000
        inputs_t = (x_t - mean_t) / (std_t + 0.00001), with statistics of the training clips for each step t

    The folder is the unpacked version 0.02: a folder of wav files for each word, with 16 bits and 16 kHz, and
    the files validation_list.txt and testing_list.txt. With 35 words (SC35), these lists define the
    validation and test splits, and shorter clips are padded with zeros. With 10 words (SC10), clips shorter
    than a second are left out; of each word, a random 70% of clips are for training, 15% for validation and
    15% for testing, regardless of the speaker.

    Files are read once, and cached as a single file of 3.4 GB, or 1.1 GB for SC10.

    Args:
        path: the folder.
        n_words: 35 for all words, or 10.
        every: subsampling factor; 2 gives 8 kHz.
        test_every: subsampling factors of additional test sets; see `probes`.
        seed: seed of the splits of SC10 only.
        cache: folder for cached samples; None is `linrec/tasks` in the user's cache folder.

    Source: Warden (2018, arXiv:1804.03209) for the recordings and the lists of SC35; Romero and others (2021,
    arXiv:2102.02611), CKConv, after Kidger and others (2020, arXiv:2005.08926), for SC10. S4 (Gu, Goel and Ré
    2022, arXiv:2111.00396) uses both, also at half the sampling rate; its code has the normalisation of each
    step, and SC10 with 34,975 clips, whose splits also depend on the order of files on the disk.

    Example:
        >>> task = SpeechCommands(path=Path("speech_commands_v0.02"))
        >>> task.n_features, task.n_outputs
        (1, 35)
    """

    n_words: Literal[10, 35] = 35
    every: int = 1
    test_every: tuple[int, ...] = (2,)
    seed: int = 0
    cache: Path | None = None
    vocab_size: ClassVar[int | None] = None
    n_features: ClassVar[int | None] = 1
    version: ClassVar[int] = 1
    """Version of the cached data, increased when the same files give different samples."""
    wanted: ClassVar[str] = (
        "Download http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz, unpack it into a new "
        "folder, and pass this folder with --data.path."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cache", None if self.cache is None else Path(self.cache))
        if self.n_words not in WORDS:
            raise ValueError(f"`n_words` must be 10 or 35; got {self.n_words}.")
        require_at_least(self, every=1, seed=0)
        if min(self.test_every, default=1) < 1:
            raise ValueError(f"`test_every` must have factors of at least 1; got {self.test_every}.")

    @property
    def n_outputs(self) -> int:
        """Number of target classes: the words, in the order of `words`."""
        return self.n_words

    @property
    def words(self) -> tuple[str, ...]:
        """The words, in the order of their classes."""
        return WORDS[self.n_words]

    @cached_property
    def probes(self) -> Mapping[str, LabelledSeries]:
        """The test split, subsampled by the factors in `test_every`, by the number of steps.

        The model is not told the sampling rate; a continuous-time model is not given a larger step size.
        """
        return {str(-(-RATE // k)): self._whole["test"].every(k) for k in self.test_every}

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files or the cache, and return all splits."""
        return {name: split.every(self.every) for name, split in self._whole.items()}

    @cached_property
    def _whole(self) -> dict[SplitName, LabelledSeries]:
        folder = self.folder()
        clips = [clip for label, word in enumerate(self.words) for clip in self._clips(folder, word, label)]
        listed = self._listed(folder, clips) if self.n_words == 35 else {}
        # files are identified by name, size and modification time
        files = "\n".join(f"{c.name} {c.size} {c.changed} {listed.get(c.name, '')}" for c in clips)
        about = {
            "task": type(self).__name__,
            "version": self.version,
            "seed": self.seed if self.n_words == 10 else None,
            "files": hashlib.sha256(files.encode()).hexdigest(),
        }
        tensors = kept("speechcommands", about, lambda: self._read(folder, clips, listed), cache=self.cache)
        values, mean, std = tensors["values"][..., None], tensors["mean"][:, None], tensors["std"][:, None]
        sizes = tensors["sizes"].tolist()
        parts = zip(values.split(sizes), tensors["labels"].split(sizes), strict=True)
        return {
            name: LabelledSeries(samples, labels, mean, std + SMALL)
            for name, (samples, labels) in zip(SPLIT_NAMES, parts, strict=True)
        }

    def _clips(self, folder: Path, word: str, label: int) -> list[Clip]:
        try:
            with os.scandir(folder / word) as entries:
                found = [entry for entry in entries if entry.name.endswith(".wav")]
                about = [(entry.name, entry.stat()) for entry in found]
        except OSError as error:
            raise DataError(
                f"{folder} must have a folder for each of {self.n_words} words; the folder {word!r} cannot "
                f"be read: {error.strerror or error}. {self.wanted}"
            ) from error
        if not about:
            raise DataError(f"{folder / word} has no wav files. {self.wanted}")
        return [Clip(f"{word}/{name}", label, s.st_size, s.st_mtime_ns) for name, s in sorted(about)]

    def _listed(self, folder: Path, clips: list[Clip]) -> dict[str, SplitName]:
        """Return the split of each clip in the lists."""
        there = {clip.name for clip in clips}
        split_of: dict[str, SplitName] = {}
        for split, name in LISTS.items():
            try:
                names = (folder / name).read_text(encoding="utf-8").split()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise DataError(f"{folder / name} cannot be read: {why}. {self.wanted}") from error
            missing = [clip for clip in names if clip not in there]
            if missing or not names:
                raise DataError(
                    f"{folder / name} must name existing wav files; it has {len(names)} names, of which "
                    f"{len(missing)} do not exist, such as {missing[0] if missing else 'none'}. {self.wanted}"
                )
            split_of |= dict.fromkeys(names, split)
        return split_of

    def _split(
        self, folder: Path, clips: list[Clip], listed: Mapping[str, SplitName]
    ) -> dict[SplitName, list[Clip]]:
        """Return the clips of each split."""
        if self.n_words == 35:
            return {
                name: [clip for clip in clips if listed.get(clip.name, "train") == name]
                for name in SPLIT_NAMES
            }
        # clips shorter than a second are left out
        whole = [clip for clip in clips if len(_samples(folder / clip.name)) == RATE]
        labels = np.array([clip.label for clip in whole], dtype=np.int64)
        parts = stratified(labels, SHARES, np.random.default_rng(self.seed))
        return {name: [whole[place] for place in part] for name, part in zip(SPLIT_NAMES, parts, strict=True)}

    def _read(self, folder: Path, clips: list[Clip], listed: Mapping[str, SplitName]) -> dict[str, Tensor]:
        """Return the samples of all clips, ordered by split, and the statistics of the training split."""
        parts = self._split(folder, clips, listed)
        for name, part in parts.items():
            if not part:
                raise DataError(f"{folder} has no clip for the split {name!r}. {self.wanted}")
        ordered = [clip for part in parts.values() for clip in part]
        values = torch.zeros(len(ordered), RATE, dtype=torch.int16)
        with ReadingDisplay().reading("reading Speech Commands", len(ordered)) as advance:
            for row, clip in zip(values.numpy(), ordered, strict=True):
                samples = _samples(folder / clip.name)
                row[: len(samples)] = samples
                advance(1)
        n = len(parts["train"])
        mean = sum(piece.double().sum(0) for piece in values[:n].split(AT_ONCE)) / n
        square = sum((piece.double() - mean).square().sum(0) for piece in values[:n].split(AT_ONCE)) / n
        return {
            "values": values,
            "labels": torch.tensor([clip.label for clip in ordered]),
            "sizes": torch.tensor([len(part) for part in parts.values()]),
            "mean": torch.as_tensor(mean).float(),
            "std": torch.as_tensor(square).sqrt().float(),
        }


def _samples(path: Path) -> NDArray[np.int16]:
    """Return the samples of a wav file of 16 bits and 16 kHz, at most a second."""
    try:
        with wave.open(str(path), "rb") as file:
            kind = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            n_bytes = file.getnframes() * file.getnchannels() * file.getsampwidth()
            content = file.readframes(file.getnframes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (EOFError, wave.Error) as error:
        why = str(error) or "it ends too soon"
        raise DataError(f"{path} is not a wav file, or it is damaged: {why}. Unpack it again.") from error
    if kind != (1, 16, RATE):
        raise DataError(
            f"{path} must have 1 channel of 16 bits at {RATE} Hz; it has {kind[0]} of {kind[1]} bits at "
            f"{kind[2]} Hz."
        )
    if len(content) != n_bytes:
        raise DataError(
            f"{path} must have {n_bytes} bytes of samples; it has {len(content)}. It is truncated: unpack it "
            "again."
        )
    samples = np.frombuffer(content, dtype="<i2")
    if len(samples) > RATE:
        raise DataError(f"{path} must have at most {RATE} samples, a second; it has {len(samples)}.")
    return samples


SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""Features of a step: acceleration without and with gravity, and angular velocity."""
STEPS = 128
GROUPS = (1, 0, 1, 0, 1, 0)
"""Class of walking, walking upstairs, walking downstairs, sitting, standing, laying: activities 1 to 6."""


@dataclass(frozen=True, kw_only=True)
class Har2(FileTask, ClassificationTask):
    """Tell two groups of activities apart, from the signals of a smartphone at the waist.

        class 0   sitting, laying, walking upstairs
        class 1   standing, walking, walking downstairs

    A series has 128 steps at 50 Hz, of 9 signals. The test split is the data's own: 2,947 series of 9
    persons. Of the 21 other persons, with 7,352 series, `n_validation_persons` validate. Two neighbouring
    series of a person share half of their steps, so a person is in a single split. Each signal is normalised
    with mean and standard deviation of the training split.

    Args:
        path: the folder of the data, with the folders train and test.
        n_validation_persons: number of persons whose series are for validation, 1 to 20.
        seed: seed of the choice of these persons.

    Source: Anguita and others (2013) for the data; Kusupati and others (2018, arXiv:1901.02358), FastGRNN,
    for the groups. coRNN (Rusch and Mishra 2021, arXiv:2010.00951) has the same task; its released code reads
    a validation split that is not published.

    Example:
        >>> task = Har2(path=Path("UCI HAR Dataset"))
        >>> task.n_features, task.n_outputs, task.chance
        (9, 2, 0.5)
    """

    n_validation_persons: int = 3
    seed: int = 0
    vocab_size: ClassVar[int | None] = None
    n_features: ClassVar[int | None] = len(SIGNALS)
    n_outputs: ClassVar[int] = 2
    wanted: ClassVar[str] = (
        "Download the data of https://archive.ics.uci.edu/dataset/240/"
        "human+activity+recognition+using+smartphones, unpack the archive in it too, and pass the folder "
        "UCI HAR Dataset with --data.path."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, n_validation_persons=1, seed=0)

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files, and return all splits."""
        folder = self.folder()
        values, labels, persons = self._part(folder, "train")
        names = np.unique(persons)
        if self.n_validation_persons >= len(names):
            raise DataError(
                f"`n_validation_persons` must be less than the {len(names)} persons of {folder / 'train'}; "
                f"got {self.n_validation_persons}."
            )
        held_out = np.random.default_rng(self.seed).choice(names, self.n_validation_persons, replace=False)
        validates = np.isin(persons, held_out)
        known = values[~validates].reshape(-1, len(SIGNALS)).astype(np.float64)
        mean, std = (torch.from_numpy(number).float()[None] for number in (known.mean(0), known.std(0)))

        def split(values: NDArray[np.float32], labels: NDArray[np.int64]) -> LabelledSeries:
            return LabelledSeries(torch.from_numpy(values), torch.from_numpy(labels), mean, std)

        return {
            "train": split(values[~validates], labels[~validates]),
            "validation": split(values[validates], labels[validates]),
            "test": split(*self._part(folder, "test")[:2]),
        }

    def _part(
        self, folder: Path, part: str
    ) -> tuple[Float[np.ndarray, "n t f"], Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Return the series of a part of the data, their classes and their persons."""
        numbers = [self._table(folder / part / f"{name}_{part}.txt", 1) for name in ("y", "subject")]
        activities, persons = (table[:, 0].astype(np.int64) for table in numbers)
        if not np.isin(activities, range(1, len(GROUPS) + 1)).all():
            path = folder / part / f"y_{part}.txt"
            raise DataError(f"{path} must have activities from 1 to 6. It is damaged: unpack it again.")
        signals = [
            self._table(folder / part / "Inertial Signals" / f"{name}_{part}.txt", STEPS) for name in SIGNALS
        ]
        if len(sizes := {len(table) for table in [*numbers, *signals]}) > 1:
            raise DataError(
                f"the files in {folder / part} must have equally many lines; got {sorted(sizes)}. They are "
                "truncated: unpack them again."
            )
        return np.stack(signals, axis=-1), np.array(GROUPS)[activities - 1], persons

    def _table(self, path: Path, columns: int) -> NDArray[np.float32]:
        """Return the numbers of a file, whose lines have equally many, separated by spaces."""
        if not path.is_file():
            raise DataError(f"{path} does not exist. {self.wanted}")
        try:
            table = np.loadtxt(path, dtype=np.float32, ndmin=2)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged: {error}. Unpack it again.") from error
        if table.shape[1] != columns or not np.isfinite(table).all():
            raise DataError(
                f"{path} must have {columns} finite numbers in each line; it has {table.shape[1]}. It is "
                "damaged: unpack it again."
            )
        return table
