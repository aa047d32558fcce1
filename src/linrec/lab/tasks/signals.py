"""Tasks of speech: classify words of Speech Commands, and generate spoken digits, SC09."""

import abc
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int16
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.tasks.audio import N_MFCC, mfcc, mu_law, read_wav
from linrec.lab.tasks.base import SPLIT_NAMES, SplitName
from linrec.lab.tasks.files import FileTask, kept
from linrec.lab.tasks.labelled import ClassificationTask, LabelledSeries, stratified
from linrec.lab.tasks.pixels import ByteSplit, ByteTask
from linrec.text import DataError

__all__ = ["Sc09", "SpeechCommands", "SpeechTask"]

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
class SpeechTask(FileTask):
    """Base class of tasks that read words of Speech Commands; a subclass defines `words` and `read`.

    The folder is the unpacked version 0.02: a folder of wav files for each word, with 16 bits and 16 kHz, and
    the files validation_list.txt and testing_list.txt. Shorter clips are padded with zeros.

    Args:
        path: the folder.
        cache: folder for cached samples; None is `linrec/tasks` in the user's cache folder.
    """

    cache: Path | None = None
    version: ClassVar[int] = 1
    """Version of the cached data, increased when the same files give different samples."""
    wanted: ClassVar[str] = (
        "Download http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz, unpack it into a new "
        "folder, and pass this folder with --data.path."
    )

    @property
    @abc.abstractmethod
    def words(self) -> tuple[str, ...]:
        """The words, in the order of their classes."""

    @property
    def drawn_by(self) -> int | None:
        """Seed of random splits of clips of a second; None takes the splits of the lists."""
        return None

    @cached_property
    def _whole(self) -> dict[SplitName, LabelledSeries]:
        folder = self.folder()
        clips = [clip for label, word in enumerate(self.words) for clip in self._clips(folder, word, label)]
        listed = self._listed(folder, clips) if self.drawn_by is None else {}
        # files are identified by name, size and modification time
        files = "\n".join(f"{c.name} {c.size} {c.changed} {listed.get(c.name, '')}" for c in clips)
        about = {
            "task": type(self).__name__,
            "version": self.version,
            "seed": self.drawn_by,
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
                f"{folder} must have a folder for each of {len(self.words)} words; the folder {word!r} "
                f"cannot be read: {error.strerror or error}. {self.wanted}"
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
                names = [clip for clip in names if clip.split("/")[0] in self.words]
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
        if self.drawn_by is None:
            return {
                name: [clip for clip in clips if listed.get(clip.name, "train") == name]
                for name in SPLIT_NAMES
            }
        # clips shorter than a second are left out
        whole = [clip for clip in clips if len(_samples(folder / clip.name)) == RATE]
        labels = np.array([clip.label for clip in whole], dtype=np.int64)
        parts = stratified(labels, SHARES, np.random.default_rng(self.drawn_by))
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


@dataclass(frozen=True, kw_only=True)
class SpeechCommands(SpeechTask, ClassificationTask):
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
        n_words: 35 for all words, or 10.
        every: subsampling factor; 2 gives 8 kHz.
        test_every: subsampling factors of additional test sets; see `probes`.
        seed: seed of the splits of SC10 only.
        mfcc: whether a step has 20 mel-frequency cepstral coefficients of 200 samples, 161 steps a second, in
            place of a sample; see `linrec.lab.tasks.audio.mfcc`. They are normalised with the mean and the
            standard deviation of each coefficient. There are no probes.

    Source: Warden (2018, arXiv:1804.03209) for the recordings and the lists of SC35; Romero and others (2021,
    arXiv:2102.02611), CKConv, after Kidger and others (2020, arXiv:2005.08926), for SC10 and the
    coefficients. S4 (Gu, Goel and Ré 2022, arXiv:2111.00396) uses both, also at half the sampling rate; its
    code has the normalisation of each step, and SC10 with 34,975 clips, whose splits also depend on the order
    of files on the disk.

    Example:
        >>> task = SpeechCommands(path=Path("speech_commands_v0.02"))
        >>> task.n_features, task.n_outputs
        (1, 35)
    """

    n_words: Literal[10, 35] = 35
    every: int = 1
    test_every: tuple[int, ...] = (2,)
    seed: int = 0
    mfcc: bool = False
    vocab_size: ClassVar[int | None] = None
    least: ClassVar[Mapping[str, int]] = {"every": 1, "seed": 0}

    def check(self) -> None:
        """Require a number of words, and factors that fit."""
        if self.n_words not in WORDS:
            raise ValueError(f"`n_words` must be 10 or 35; got {self.n_words}.")
        if min(self.test_every, default=1) < 1:
            raise ValueError(f"`test_every` must have factors of at least 1; got {self.test_every}.")
        if self.mfcc and self.every > 1:
            raise ValueError(f"`mfcc` needs `every` = 1; got {self.every}. Leave it out.")

    @property
    def n_features(self) -> int | None:
        """Number of input features per step: the sample, or the coefficients."""
        return N_MFCC if self.mfcc else 1

    @property
    def drawn_by(self) -> int | None:
        """Seed of the random splits of SC10; None for SC35."""
        return self.seed if self.n_words == 10 else None

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
        if self.mfcc:
            return {}
        return {str(-(-RATE // k)): self._whole["test"].every(k) for k in self.test_every}

    def read(self) -> dict[SplitName, LabelledSeries]:
        """Read the files or the cache, and return all splits."""
        if not self.mfcc:
            return {name: split.every(self.every) for name, split in self._whole.items()}
        found = {name: _coefficients(split.values) for name, split in self._whole.items()}
        std, mean = torch.std_mean(found["train"].double(), (0, 1), correction=0)
        mean, std = mean.float()[None], std.float()[None] + 1e-5
        return {name: LabelledSeries(x, self._whole[name].labels, mean, std) for name, x in found.items()}


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, kw_only=True)
class Sc09(SpeechTask, ByteTask):
    """Predict every sample of a spoken digit from the samples before it.

        target_t = m_t, given 256, m_1, ..., m_{t-1}      bits per sample = loss / ln 2

    m are the samples with 8 bits by the mu-law, see `linrec.lab.tasks.audio.mu_law`: sequences of 16,000
    tokens, of the words zero to nine of Speech Commands. The lists define the validation and test splits.

    Args:
        length: number of samples of a clip, from its start.

    Source: Donahue, McAuley and Puckette (2019, arXiv:1802.04208) for the data; SaShiMi (Goel, Gu, Donahue
    and Ré, 2022, arXiv:2202.09729) for the task; Mamba (Gu and Dao, 2023), table 4, for scores.

    Example:
        >>> Sc09().vocab_size, Sc09().words[:2]
        (257, ('zero', 'one'))
    """

    length: int = RATE
    least: ClassVar[Mapping[str, int]] = {"length": 1}

    def check(self) -> None:
        """Require at most a second."""
        if self.length > RATE:
            raise ValueError(f"`length` must be at most {RATE}, a second; got {self.length}.")

    @property
    def words(self) -> tuple[str, ...]:
        """The words zero to nine."""
        return DIGITS

    def read(self) -> dict[SplitName, ByteSplit]:
        """Read the files or the cache, and return all splits."""
        clips = {name: split.values[:, : self.length, 0] for name, split in self._whole.items()}
        return {
            name: ByteSplit(torch.cat([mu_law(piece / 2**15) for piece in samples.split(AT_ONCE)]))
            for name, samples in clips.items()
        }


def _coefficients(samples: Int16[Tensor, "n t 1"]) -> Float[Tensor, "n s k"]:
    """Return the coefficients of clips, in pieces, because their spectra take much memory."""
    return torch.cat([mfcc(piece[..., 0] / 2**15, rate=RATE) for piece in samples.split(AT_ONCE)])


def _samples(path: Path) -> NDArray[np.int16]:
    """Return the samples of a wav file of 16 bits and 16 kHz, at most a second."""
    samples, rate = read_wav(path)
    if samples.shape[1] != 1 or rate != RATE:
        raise DataError(
            f"{path} must have 1 channel of 16 bits at {RATE} Hz; it has {samples.shape[1]} of 16 bits at "
            f"{rate} Hz."
        )
    if len(samples) > RATE:
        raise DataError(f"{path} must have at most {RATE} samples, a second; it has {len(samples)}.")
    return samples[:, 0]
