"""How likely a model finds a text: token by token, from windows of one length or from all of its past."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec.generation.precision import autocast, with_weights_cast
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.nn.cross_entropy import linear_cross_entropy
from linrec.tasks import NO_TARGET, Batch, TokenSplit
from linrec.text import TextCounts
from linrec.train.data import on_device

__all__ = ["Score", "evaluate_carried", "evaluate_windows"]

# logits at once: 256 MiB in float32
LOGITS = 2**26
# tokens at once: 32 windows of 512, or one of 14,336
BATCH_TOKENS = 2**14


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text, in several units.

        loss = nats / tokens                             perplexity = exp(loss)
        loss per u = loss * tokens of the text / u       perplexity per u = exp(loss per u)

    u is what is counted in the text: its words and ends of lines, its bytes, or its characters. The text has
    one token more than are predicted, its first one, which so costs as much as the others on average.

    Args:
        length: tokens of a window; None where the state is carried through the whole text.
        nats: -log p summed over all predicted tokens.
        tokens: predicted tokens.
        counts: how much there is of the text.

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
        """Nats per token; not a number where nothing is predicted."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """e to the nats per token."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """e to the nats per word, the ends of lines counted as words, as word-level vocabularies do."""
        return _exp(self._per(self.counts.words + self.counts.lines))

    @property
    def byte_perplexity(self) -> float:
        """e to the nats per byte of UTF-8."""
        return _exp(self._per(self.counts.bytes))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8."""
        return self._per(self.counts.bytes) / math.log(2)

    @property
    def bits_per_character(self) -> float:
        """Bits per code point."""
        return self._per(self.counts.characters) / math.log(2)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON holds them; None stands for what is not finite."""
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
    """nats = -sum_n log p(x_n | x_{w(n)}, .., x_{n-1}) with w(n) the start of the window before n.

    The text is cut into consecutive windows of `length` inputs that do not overlap, each evaluated from an
    empty state. Every token but the first is predicted exactly once, whatever the length: the first
    prediction of a window has one token of context, the last one `length`. The last window may be shorter.
    Where the text is divided into documents, each begins with an empty state, too.

    Memory is bounded by `batch_tokens`, whatever the length: short windows are batched, and a longer one is
    taken in pieces that carry the state, which gives the same to rounding. Logits are formed for 2^26
    numbers at a time.

    Args:
        model: in evaluation mode.
        split: the tokens of a text; its own length does not matter.
        length: tokens of a window.
        batch_tokens: tokens that go through the model at once.
        precision: "32-true", or "bf16-mixed" for autocast in bfloat16.
        advance: called with the number of tokens that were predicted since the last call.

    Returns:
        The score.

    Raises:
        ValueError: a `length` that is not in 1 .. n - 1 for a text of n tokens, tokens that the model does
            not know, `batch_tokens` below 1, an unknown precision, or a model in training mode.

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
        # the first of these windows is the fullest; beyond its end there is nothing to predict
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
    """nats = -sum_n log p(x_n | x_1, .., x_{n-1}): the state is carried through the whole text.

    Memory does not grow with the text, unless the state of the model's mixer does. Where the text is divided
    into documents, each begins with an empty state.

    Args:
        model: see `evaluate_windows`, also for what is not listed here.
        split: the tokens of a text, at least two.
        batch_tokens: tokens that go through the model at once.
        precision: "32-true" or "bf16-mixed".
        advance: called with the number of tokens that were predicted.

    Returns:
        The score, with `length` None.

    Raises:
        ValueError: there are fewer than two tokens, or what `evaluate_windows` says.

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
        raise ValueError(f"the text must have at least 2 tokens for one to be predicted; got {n_tokens}.")
    pieces = split.with_length(min(n_tokens - 1, _checked(batch_tokens)))
    meter = _Meter(model, precision, advance)
    state = None
    for index in torch.arange(len(pieces)).split(1):
        state = meter.add(pieces.rows(index), state)
    return Score(None, float(meter.nats), n_tokens - 1, split.counts)


class _Meter:
    """Adds up -log p over batches."""

    def __init__(
        self, model: LanguageModel, precision: Precision, advance: Callable[[int], None] | None
    ) -> None:
        if model.training:
            raise ValueError("`model` must be in evaluation mode; got training mode. Call `model.eval()`.")
        self._model, self._precision, self._advance = with_weights_cast(model, precision), precision, advance
        self._vocab_size = model.config.vocab_size
        self._device = next(model.parameters()).device
        # float64, for millions of terms; on the device, so that no batch waits for it
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        self.nats = torch.zeros((), dtype=wide, device=self._device)

    def add(self, batch: Batch, state: tuple[State, ...] | None) -> tuple[State, ...]:
        """Add a batch; return the state after it."""
        # before they are on the device: CUDA looks up any number, and says nothing
        highest = int(torch.maximum(batch.inputs, batch.targets).max())
        if highest >= self._vocab_size:
            raise ValueError(
                f"tokens must be in 0 .. {self._vocab_size - 1}, those of the model; got {highest}. "
                "Pass text in the tokens of the tokenizer that the model was trained with."
            )
        n_targets = int((batch.targets != NO_TARGET).sum())
        inputs, targets, reset, _ = on_device(batch, self._device)
        with autocast(self._precision, self._device):
            x, state = self._model.hidden(inputs, state, reset=reset)
            self.nats += self._nats(x.flatten(0, 1), targets.flatten())
        if self._advance is not None:
            self._advance(n_targets)
        return state

    def _nats(self, x: Tensor, targets: Tensor) -> Tensor:
        head = self._model.head
        rows = max(1, LOGITS // head.weight.shape[0])
        # cut here, where no gradient is needed that the function's own pieces would compute
        losses = [
            linear_cross_entropy(piece, head.weight, head.bias, wanted, cap=head.cap, rows=rows)[0]
            for piece, wanted in zip(x.split(rows), targets.split(rows), strict=True)
        ]
        return torch.stack(losses).sum()


def _checked(batch_tokens: int) -> int:
    if batch_tokens < 1:
        raise ValueError(f"`batch_tokens` must be at least 1; got {batch_tokens}.")
    return batch_tokens


def _exp(x: float) -> float:
    # one word of a text without spaces may cost more than a float64 holds
    return math.exp(x) if not x > 700 else math.inf
