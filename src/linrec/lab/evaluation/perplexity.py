"""The perplexity of a language model on a text, with windows of equal length or with a carried state."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from linrec.generation.precision import autocast, with_weights_cast
from linrec.lab.corpora import TextCounts
from linrec.lab.tasks import NO_TARGET, Batch, TokenSplit
from linrec.lab.train.data import on_device
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.nn import Head
from linrec.nn.cross_entropy import linear_cross_entropy
from linrec.nn.projections import readable

__all__ = ["Score", "evaluate_carried", "evaluate_windows"]

# logits in memory at once: 256 MiB in float32
LOGITS = 2**26
# tokens per batch, for example 32 windows of 512 tokens
BATCH_TOKENS = 2**14


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text under a model, in several units.

        loss = nats / tokens                             perplexity = exp(loss)
        loss per u = loss * tokens of the text / u       perplexity per u = exp(loss per u)

    u is a number of units in the text: of words and line ends, of bytes, or of characters. The first token of
    the text is not predicted; the formula assigns the mean loss to it.

    Args:
        length: tokens per window; None if the state is carried through the whole text.
        nats: -log p, summed over all predicted tokens.
        tokens: number of predicted tokens.
        counts: amount of text in several units.

    Example:
        >>> score = Score(512, nats=math.log(4) * 10, tokens=10, counts=TextCounts(tokens=11, bytes=44))
        >>> round(score.perplexity, 6), round(score.bits_per_byte, 6)
        (4.0, 0.5)
    """

    length: int | None
    nats: float
    tokens: int
    counts: TextCounts

    @property
    def loss(self) -> float:
        """Nats per token; NaN if no token is predicted."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """Perplexity per word; line ends count as words, as in word-level vocabularies."""
        return _exp(self._per(self.counts.words + self.counts.lines))

    @property
    def byte_perplexity(self) -> float:
        """Perplexity per byte of UTF-8."""
        return _exp(self._per(self.counts.bytes))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8."""
        return self._per(self.counts.bytes) / math.log(2)

    @property
    def bits_per_character(self) -> float:
        """Bits per character (code point)."""
        return self._per(self.counts.characters) / math.log(2)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON values; infinite values and NaN become None."""
        names = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "bits_per_character")
        numbers = {name: getattr(self, name) for name in ("nats", "loss", *names)}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {"length": self.length, "tokens": self.tokens, **finite}

    def _per(self, units: int) -> float:
        return self.loss * self.counts.tokens / units if units else math.nan


@torch.no_grad()
def evaluate_windows(
    model: LanguageModel,
    split: TokenSplit,
    length: int,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: Precision = "32-true",
    advance: Callable[[int], None] | None = None,
) -> Score:
    """nats = -sum_n log p(x_n | x_{w(n)}, .., x_{n-1}), where w(n) is the start of the window predicting x_n.

    The text is cut into consecutive, non-overlapping windows of `length` inputs, each evaluated from an empty
    state. Every token except the first is predicted exactly once, for every length: the first prediction of a
    window has 1 token of context, the last prediction has `length` tokens. The last window may be shorter.
    Every document also begins with an empty state, if the text is divided into documents.

    Memory is bounded by `batch_tokens`: short windows are batched, and a longer window is processed in chunks
    with a carried state, which gives the same result up to rounding. At most 2^26 logits are in memory at a
    time.

    Args:
        model: the model, in evaluation mode.
        split: the tokens of a text; `split.length` is ignored.
        length: tokens per window.
        batch_tokens: tokens that go through the model at once.
        precision: "32-true", or "bf16-mixed" for autocast in bfloat16.
        advance: called with the number of tokens predicted since the last call.

    Returns:
        The score.

    Raises:
        ValueError: `length` is not in 1 .. n - 1 for a text of n tokens, tokens are not in the model's
            vocabulary, `batch_tokens` is below 1, `precision` is unknown, or the model is in training mode.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), table 14.

    Example:
        >>> import numpy as np
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1)).eval()
        >>> split = TokenSplit.of(np.arange(10, dtype=np.uint16) % 5, length=3)
        >>> score = evaluate_windows(model, split, length=4)
        >>> score.tokens, score.length
        (9, 4)
    """
    n_tokens = len(split.ids)
    if not 1 <= length < n_tokens:
        raise ValueError(
            f"`length` must be at least 1 and less than the {n_tokens} tokens of the text; got {length}."
        )
    piece = min(length, _checked(batch_tokens))
    windows = split.with_length(length)
    meter = _Meter(model, precision, advance)
    for index in torch.arange(len(windows)).split(max(1, batch_tokens // length)):
        batch = windows.rows(index)
        # no window of the batch is longer than its first window
        end = min(length, n_tokens - 1 - length * int(index[0]))
        state = None
        for start in range(0, end, piece):
            now = slice(start, min(start + piece, end))
            reset = None if batch.reset is None else batch.reset[:, now]
            state = meter.add(Batch(batch.inputs[:, now], batch.targets[:, now], reset), state)
    return Score(length, float(meter.nats), n_tokens - 1, split.counts)


@torch.no_grad()
def evaluate_carried(
    model: LanguageModel,
    split: TokenSplit,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: Precision = "32-true",
    advance: Callable[[int], None] | None = None,
) -> Score:
    """nats = -sum_n log p(x_n | x_1, .., x_{n-1}), with the state carried through the whole text.

    Memory does not grow with the text, unless the mixer's state grows. Every document begins with an empty
    state, if the text is divided into documents.

    Args:
        model: see `evaluate_windows`.
        split: the tokens of a text, at least two.
        batch_tokens: tokens that go through the model at once.
        precision: "32-true" or "bf16-mixed".
        advance: called with the number of tokens predicted since the last call.

    Returns:
        The score, with `length` None.

    Raises:
        ValueError: the text has fewer than two tokens, or for the same reasons as in `evaluate_windows`.

    Example:
        >>> import numpy as np
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1)).eval()
        >>> split = TokenSplit.of(np.arange(10, dtype=np.uint16) % 5, length=3)
        >>> whole = evaluate_windows(model, split, length=9)
        >>> abs(evaluate_carried(model, split, batch_tokens=4).nats - whole.nats) < 1e-4
        True
    """
    n_tokens = len(split.ids)
    if n_tokens < 2:
        raise ValueError(f"the text must have at least 2 tokens, to predict the second; got {n_tokens}.")
    pieces = split.with_length(min(n_tokens - 1, _checked(batch_tokens)))
    meter = _Meter(model, precision, advance)
    state = None
    for index in torch.arange(len(pieces)).split(1):
        state = meter.add(pieces.rows(index), state)
    return Score(None, float(meter.nats), n_tokens - 1, split.counts)


class _Meter:
    """Sums -log p over batches."""

    def __init__(
        self, model: LanguageModel, precision: Precision, advance: Callable[[int], None] | None
    ) -> None:
        if model.training:
            raise ValueError("`model` must be in evaluation mode; got training mode. Call `model.eval()`.")
        self._model, self._precision, self._advance = with_weights_cast(model, precision), precision, advance
        self._vocab_size = model.config.vocab_size
        self._device = next(model.parameters()).device
        # float64, because the sum has millions of terms; on the device, to avoid syncs
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        self.nats = torch.zeros((), dtype=wide, device=self._device)

    def add(self, batch: Batch, state: tuple[State, ...] | None) -> tuple[State, ...]:
        """Add a batch; return the state after it."""
        # checked before the copy to the device, because CUDA embeddings do not report indices out of range
        highest = int(torch.maximum(batch.inputs, batch.targets).max())
        if highest >= self._vocab_size:
            raise ValueError(
                f"tokens must be in 0 .. {self._vocab_size - 1}, the model's vocabulary; got {highest}. "
                "Encode the text with the tokenizer that the model was trained with."
            )
        n_targets = int((batch.targets != NO_TARGET).sum())
        inputs, targets, reset, *_ = on_device(batch, self._device)
        with autocast(self._precision, self._device):
            x, state = self._model.hidden(inputs, state, reset=reset)
            self.nats += self._nats(x.flatten(0, 1), targets.flatten())
        if self._advance is not None:
            self._advance(n_targets)
        return state

    def _nats(self, x: Tensor, targets: Tensor) -> Tensor:
        head: Any = self._model.head
        rows = max(1, LOGITS // self._vocab_size)

        def loss(piece: Tensor, wanted: Tensor) -> Tensor:
            if readable(Head, head):
                return linear_cross_entropy(piece, head.weight, head.bias, wanted, cap=head.cap, rows=rows)[0]
            logits = head(piece)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return cross_entropy(wide, wanted, ignore_index=NO_TARGET, reduction="sum")

        # split here, because `linear_cross_entropy` would compute gradients for its own chunks
        pieces = zip(x.split(rows), targets.split(rows), strict=True)
        return torch.stack([loss(piece, wanted) for piece, wanted in pieces]).sum()


def _checked(batch_tokens: int) -> int:
    if batch_tokens < 1:
        raise ValueError(f"`batch_tokens` must be at least 1; got {batch_tokens}.")
    return batch_tokens


def _exp(x: float) -> float:
    # a text without spaces is a single word, whose perplexity may overflow float64
    return math.exp(x) if not x > 700 else math.inf
