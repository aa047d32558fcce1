"""Translation: predict a text from a text in another language, from files of lines or a data set of pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from linrec.extras import import_extra
from linrec.generation import GenerationState, beam_search
from linrec.lab.corpora.pairs import Pair, read_pairs
from linrec.lab.tasks.base import (
    NO_TARGET,
    Batch,
    ObjectiveName,
    SplitName,
    StoredSource,
)
from linrec.lab.tasks.fields import CheckedTask
from linrec.models import EncoderDecoder
from linrec.text import CharacterTokenizer, DataError, Tokenizer, load_tokenizer

__all__ = ["PairSplit", "Translation"]

# batches whose pairs are sorted by length together
POOL = 100
# sources that are translated at once
ROWS = 64


class Lines(NamedTuple):
    """The tokens of several texts, one after another.

    Attributes:
        ids: tokens (n), int32.
        starts: where each text begins, and where the last one ends (m + 1).
    """

    ids: Tensor
    starts: Tensor

    def lengths(self) -> Int64[Tensor, "m"]:
        """Return the number of tokens of each text."""
        return self.starts.diff()

    def padded(self, index: Tensor, value: int) -> tuple[Int64[Tensor, "b t"], Int64[Tensor, "b"]]:
        """Return texts, padded to the longest, and their lengths."""
        first, lengths = self.starts[index], self.lengths()[index]
        step = torch.arange(int(lengths.max()) if len(lengths) else 0)
        place = (first[:, None] + step).clamp(max=len(self.ids) - 1)
        return self.ids[place].long().masked_fill(step >= lengths[:, None], value), lengths

    def only(self, kept: Bool[Tensor, "m"]) -> "Lines":
        """Return some of the texts."""
        sizes = self.lengths()
        starts = torch.cat([self.starts[:1], sizes[kept].cumsum(0)])
        return Lines(self.ids[kept.repeat_interleave(sizes)], starts)


@dataclass(frozen=True, eq=False)
class PairSplit(StoredSource):
    """Pairs of token sequences, which end with an end token: a `Source` with batches of similar lengths.

    Attributes:
        sources: tokens of the sources.
        targets: tokens of the translations.
        end: the end token, which is also the first input of the decoder.
        pairs: the texts.

    Example:
        >>> split = PairSplit.of([Pair("ab", "c"), Pair("d", "ef")], CharacterTokenizer("abcdef"), end=6)
        >>> batch = split.rows(torch.tensor([0, 1]))
        >>> batch.source.tolist(), batch.source_lengths.tolist()
        ([[0, 1, 6], [3, 6, 0]], [3, 2])
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[6, 2, 6], [6, 4, 5]], [[2, 6, -100], [4, 5, 6]])
    """

    sources: Lines
    targets: Lines
    end: int
    pairs: Sequence[Pair]

    @classmethod
    def of(cls, pairs: Sequence[Pair], tokenizer: Tokenizer, end: int) -> "PairSplit":
        """Return the split of pairs of texts."""
        sources = _tokens([pair.source for pair in pairs], tokenizer, end)
        return cls(sources, _tokens([pair.target for pair in pairs], tokenizer, end), end, pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def rows(self, index: Int64[Tensor, "b"]) -> Batch:
        """Return pairs as a batch, padded to the longest source and the longest target."""
        source, source_lengths = self.sources.padded(index, 0)
        targets, lengths = self.targets.padded(index, self.end)
        begin = targets.new_full((len(targets), 1), self.end)
        inputs = torch.cat([begin, targets[:, :-1]], 1)
        padding = torch.arange(targets.shape[1]) >= lengths[:, None]
        targets = targets.masked_fill(padding, NO_TARGET)
        return Batch(inputs, targets, None, source=source, source_lengths=source_lengths)

    def order(self, *, batch_size: int, seed: int, epoch: int) -> Int64[Tensor, "n"]:
        """Return the order in which an epoch visits the pairs: batches of similar lengths, in a random order.

        Random pools of 100 batches are sorted by the lengths of targets and sources. The pairs of an
        incomplete batch come last.
        """
        random = np.random.default_rng([seed, epoch])
        order = random.permutation(len(self))
        lengths = self.targets.lengths().numpy() * (1 << 32) + self.sources.lengths().numpy()
        pools = [
            order[start : start + POOL * batch_size] for start in range(0, len(order), POOL * batch_size)
        ]
        order = np.concatenate([pool[lengths[pool].argsort(kind="stable")] for pool in pools])
        whole = len(order) // batch_size * batch_size
        batches = random.permutation(order[:whole].reshape(-1, batch_size))
        return torch.from_numpy(np.concatenate([batches.flatten(), order[whole:]]))

    def at_most(self, length: int) -> "PairSplit":
        """Return the pairs of which both sides have tokens, and at most `length` of them with the end."""
        sizes = torch.stack([self.sources.lengths(), self.targets.lengths()])
        kept = ((sizes > 1) & (sizes <= length)).all(0)
        pairs = [self.pairs[place] for place in kept.nonzero()[:, 0].tolist()]
        return PairSplit(self.sources.only(kept), self.targets.only(kept), self.end, pairs)


def _tokens(texts: Sequence[str], tokenizer: Tokenizer, end: int) -> Lines:
    encoded = [np.append(ids.astype(np.int32), np.int32(end)) for ids in tokenizer.encode_batch(texts)]
    starts = np.cumsum([0, *map(len, encoded)])
    ids = np.concatenate(encoded) if encoded else np.empty(0, np.int32)
    return Lines(torch.from_numpy(ids), torch.from_numpy(starts))


@dataclass(frozen=True)
class Translation(CheckedTask):
    """Translate a text; the model is an encoder-decoder.

        target_n = y_{n+1}, given y_1, .., y_n and the source x_1, .., x_s

    Pass the pairs as `path` or as `dataset`. A folder has a file per split and language, named by both, such
    as train.de and train.en; the n-th lines of two files are a pair. The validation split may also be called
    "valid", "val" or "dev". A missing validation or test split is cut from the end of the training pairs.
    Source and target share one tokenizer. Both end with its end-of-document token, or else with a token
    behind its vocabulary; the first input of the decoder is the end token.

    Training leaves out pairs that occur in another split, pairs with an empty side, and pairs with more than
    `length` tokens on a side. Other splits keep all pairs. The score is BLEU of the test translations by
    sacreBLEU, beside the loss of each token.

    Args:
        path: a folder of text files.
        dataset: name or path of a Hugging Face data set, such as "wmt/wmt14"; needs the extra "text". It has
            a column "translation" of texts by language, or a column for each language.
        dataset_config: configuration of the data set, if it has several, such as "de-en".
        source: the source language, as files and columns name it.
        target: the target language.
        tokenizer: "bytes"; "characters" for the characters of the training pairs; the name or path of a
            Hugging Face tokenizer; or a run folder, for the run's tokenizer.
        length: tokens of a side in training at most, the end token included, and of a translation.
        validation_share: fraction of the training pairs that is held out for validation, if the data have no
            validation split.
        test_share: fraction of the training pairs that is held out for testing, if the data have no test
            split.
        n_beams: beams of the search for the translations that are scored.
        length_penalty: of the search; see `linrec.generation.beam_search`.
        vocab_size: vocabulary of the model; None is the tokenizer's with the end token.

    Raises:
        DataError: a field is out of range, both `path` and `dataset` are given, or the pairs cannot be read.

    Source:
        Post, A Call for Clarity in Reporting BLEU Scores (2018), for sacreBLEU. Papineni and others, BLEU
        (2002).

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "train.de").write_text("ja\\nnein\\nja ja\\nnein\\n")
        >>> _ = (folder / "train.en").write_text("yes\\nno\\nyes yes\\nno\\n")
        >>> task = Translation(path=folder, source="de", target="en", validation_share=0.25)
        >>> batch = task.split("train").rows(torch.tensor([0]))
        >>> task.tokenizer_object().decode(batch.source[0]), batch.targets.tolist()
        ('ja', [[121, 101, 115, 256]])
    """

    path: Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    source: str = "de"
    target: str = "en"
    tokenizer: str = "bytes"
    length: int = 256
    validation_share: float = 0.05
    test_share: float = 0.05
    n_beams: int = 4
    length_penalty: float = 0.6
    vocab_size: int | None = None
    section: ClassVar[str] = "data"
    n_features: ClassVar[int | None] = None
    per_sequence: ClassVar[bool] = False
    objective: ClassVar[ObjectiveName] = "classification"
    reset_token: ClassVar[int | None] = None
    least: ClassVar[Mapping[str, int]] = {"length": 2, "n_beams": 1}

    def check(self) -> None:
        """Require a single source of the pairs, and shares."""
        if self.path is not None and self.dataset is not None:
            raise DataError(
                f"exactly one of `path` and `dataset` must be given; got both: {self.path}, {self.dataset}."
            )
        shares = self.validation_share, self.test_share
        if min(shares) < 0 or sum(shares) >= 1:
            raise DataError(
                f"`validation_share` and `test_share` must be at least 0, with a sum below 1; got {shares}."
            )

    @property
    def n_outputs(self) -> int | None:
        """Number of target tokens; None before `prepared`."""
        return self.vocab_size

    @property
    def source_vocab_size(self) -> int | None:
        """Number of source tokens; None before `prepared`."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess of a token."""
        return 1 / self._vocab_size

    @cached_property
    def trivial_score(self) -> float:
        """Test accuracy of always predicting the most frequent token of the training targets."""
        train, test = (self.split(name).targets.ids for name in ("train", "test"))
        best = torch.bincount(train).argmax()
        return float((test == best).double().mean())

    def prepared(self) -> "Translation":
        """Return the task with `vocab_size` set; reads and tokenises the pairs.

        Raises:
            DataError: the pairs cannot be read or tokenised, sacreBLEU is missing, or `vocab_size` is less
                than the tokenizer's vocabulary with the end token.
        """
        # scores are made at the end of training; a missing package is reported at its start
        import_extra("sacrebleu", "the score of translations")
        needed = self._vocab_size
        if not len(self.split("train")):
            raise DataError(f"no training pair has text on both sides and at most {self.length} tokens.")
        if self.vocab_size is not None and self.vocab_size < needed:
            raise DataError(
                f"`vocab_size` must be at least the {needed} tokens of the tokenizer {self.tokenizer!r} and "
                f"the end token; got {self.vocab_size}. Leave it out."
            )
        return self.passing_on("_pairs", "_tokenizer", "_splits", vocab_size=self.vocab_size or needed)

    def tokenizer_object(self) -> Tokenizer:
        """Return the tokenizer of both languages."""
        return self._tokenizer

    def translate(
        self, model: EncoderDecoder, texts: Sequence[str], *, tokenizer: Tokenizer | None = None
    ) -> list[str]:
        """Return the translations that a beam search finds.

        Args:
            model: a model in evaluation mode.
            texts: texts of the source language.
            tokenizer: the model's tokenizer, as of a run folder; None is that of the task's data.
        """
        tokenizer = self._tokenizer if tokenizer is None else tokenizer
        end, device = _end_of(tokenizer), next(model.parameters()).device
        lines, found = _tokens(texts, tokenizer, end), [""] * len(texts)
        # texts of similar lengths need little padding
        for index in lines.lengths().argsort(stable=True).split(ROWS):
            source, lengths = lines.padded(index, 0)
            with torch.no_grad():
                state = model.encode(source.to(device), lengths)
            begin = torch.full((len(index),), end, device=device)
            beams = beam_search(
                model,
                state=GenerationState(state, begin),
                n_tokens=self.length,
                end=end,
                n_beams=self.n_beams,
                length_penalty=self.length_penalty,
            )
            for place, tokens in zip(index.tolist(), beams.tokens[:, 0].tolist(), strict=True):
                # a padded vocabulary has tokens without text
                found[place] = tokenizer.decode(
                    token for token in tokens if token < tokenizer.vocab_size and token != end
                )
        return found

    def generated_scores(self, model: EncoderDecoder, split: PairSplit) -> dict[str, Any]:
        """Return "bleu" of the model's translations, from 0 to 100, and sacreBLEU's signature of it."""
        sacrebleu = import_extra("sacrebleu", "the score of translations")
        metric = sacrebleu.BLEU()
        found = self.translate(model, [pair.source for pair in split.pairs])
        score = metric.corpus_score(found, [[pair.target for pair in split.pairs]])
        return {"bleu": score.score, "bleu_signature": str(metric.get_signature())}

    @cached_property
    def _splits(self) -> dict[SplitName, PairSplit]:
        end = _end_of(self._tokenizer)
        splits = {name: PairSplit.of(pairs, self._tokenizer, end) for name, pairs in self._pairs.items()}
        return {**splits, "train": splits["train"].at_most(self.length)}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer != CharacterTokenizer.name:
            return load_tokenizer(self.tokenizer)
        return CharacterTokenizer.of(text for pair in self._pairs["train"] for text in pair)

    @property
    def _vocab_size(self) -> int:
        return max(self._tokenizer.vocab_size, _end_of(self._tokenizer) + 1)

    @cached_property
    def _pairs(self) -> dict[SplitName, list[Pair]]:
        """Return the pairs of all splits, with those that are cut from the training pairs."""
        languages = self.source, self.target
        found = read_pairs(*languages, path=self.path, dataset=self.dataset, config=self.dataset_config)
        train, n = found["train"], len(found["train"])
        shares = {"test": self.test_share, "validation": self.validation_share}
        for name, share in shares.items():
            if name not in found:
                cut = len(train) - int(n * share)
                train, found[name] = train[:cut], train[cut:]
        held_out = {*found["validation"], *found["test"]}
        train = [pair for pair in train if pair not in held_out]
        return {"train": train, "validation": found["validation"], "test": found["test"]}


def _end_of(tokenizer: Tokenizer) -> int:
    return tokenizer.vocab_size if tokenizer.end_of_document is None else tokenizer.end_of_document
