"""An encoder of sequences with an output per sequence or per step, for classification and regression."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.mixers import State
from linrec.models.block import Block, run_blocks
from linrec.models.config import check_sizes
from linrec.models.sequence_encoder import EncoderConfig, SequenceEncoder, check_times
from linrec.nn.head import PairHead
from linrec.nn.parameters import mark

__all__ = ["Pooling", "SequenceClassifier", "SequenceClassifierConfig"]

Pooling: TypeAlias = Literal["mean", "last", "none"]


@dataclass(frozen=True)
class SequenceClassifierConfig(EncoderConfig):
    """Configuration of a `SequenceClassifier`; all values are plain, so that it can be written to a file.

    Args:
        n_outputs: number of classes, or of regression values.
        pooling: "mean" over the steps, "last" step, or "none" for an output at each step.
        pairs: whether a pair of sequences has one output: the encoder computes a vector of each sequence, and
            a `linrec.nn.PairHead` compares the two vectors.

    The other arguments are keyword arguments of `EncoderConfig` and `StackConfig`.

    Raises:
        ValueError: a number is out of range, not exactly one of `vocab_size` and `n_features` is given,
            `unshared` or `combine` is given without `bidirectional`, or `pairs` without pooling.

    Example:
        >>> SequenceClassifierConfig(n_outputs=10, n_features=1, mixer="hgru").bidirectional
        True
    """

    n_outputs: int
    pooling: Pooling = "mean"
    pairs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "n_outputs")
        if self.pooling not in ("mean", "last", "none"):
            raise unknown("`pooling`", self.pooling, ["mean", "last", "none"])
        if self.pairs and self.pooling == "none":
            raise ValueError("`pairs` have a single output, but `pooling` = 'none' has one per step.")


class SequenceClassifier(SequenceEncoder):
    """outputs = head(pool(norm(block_L(... block_1(input(x)))))).

    The input layer is an embedding of tokens, or a Linear of real features. Steps after a sequence's length
    are padding: no output and no gradient depends on the padding's values or on its length, in either
    direction. Pooling uses only the steps within the length.

    A call takes whole sequences. A causal encoder without mean pooling also streams; see `stream`.

    Args:
        config: the model's configuration; see `SequenceClassifierConfig`.

    Raises:
        ValueError: `config` has an unknown mixer or channel mixing, or an argument that the mixer lacks.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 4.2 and the authors' code for the Long Range Arena:
        bidirectional encoders with mean pooling. The authors' encoder also has batch normalisation and
        positional embeddings.

    Example:
        >>> import torch
        >>> config = SequenceClassifierConfig(n_outputs=3, vocab_size=256, mixer="hgru", n_layers=2)
        >>> model = SequenceClassifier(config)
        >>> texts = torch.zeros(2, 10, dtype=torch.int64)
        >>> model(texts, lengths=torch.tensor([10, 4])).shape
        torch.Size([2, 3])
    """

    def __init__(self, config: SequenceClassifierConfig) -> None:
        super().__init__(config)
        self.config: SequenceClassifierConfig = config
        self.head: nn.Module
        if config.pairs:
            self.head = PairHead(config.d_model, config.n_outputs)
        else:
            self.head = mark(
                nn.Linear(config.d_model, config.n_outputs), group="vocabulary", weight_decay=True
            )

    def forward(
        self,
        x: Num[Tensor, "b t *features"],
        *,
        lengths: Int[Tensor, "b *pair"] | None = None,
        dt: Float[Tensor, "b *pair t"] | None = None,
    ) -> Float[Tensor, "b *t n_outputs"]:
        """Return the outputs of every sequence, or of every pair.

        Args:
            x: (b, t) int64 tokens, or (b, t, n_features) real features; for pairs (b, 2, t) or
                (b, 2, t, n_features).
            lengths: (b,) int64, for pairs (b, 2), the length of each sequence, from 1 to t; later steps are
                padding. None if all lengths are t.
            dt: (b, t), for pairs (b, 2, t), the time since the step before; see `Mixer.forward`. All mixers
                must have `takes_dt`.

        Returns:
            (b, n_outputs), logits or values; (b, t, n_outputs) with `pooling="none"`, where outputs at
            padding are meaningless.

        Raises:
            ValueError: `x`, `lengths` or `dt` has the wrong shape, or a length is out of range. Lengths on
                CUDA are not checked, because the check would wait for the device; keep `lengths` on the CPU
                instead.
            TypeError: tokens or lengths are not integers, features or times are not of a floating dtype, or a
                mixer does not take `dt`.
        """
        return self.head(self.features(x, lengths=lengths, dt=dt))

    if TYPE_CHECKING:
        __call__ = forward

    def features(
        self,
        x: Num[Tensor, "b t *features"],
        *,
        lengths: Int[Tensor, "b *pair"] | None = None,
        dt: Float[Tensor, "b *pair t"] | None = None,
    ) -> Float[Tensor, "b *t d_model"]:
        """Return the input of the head (b, d_model), for use with another head; arguments as in `forward`.

        The shape is (b, t, d_model) with `pooling="none"`, and (b, 2, d_model) for pairs.
        """
        if not self.config.pairs:
            return self._features(x, lengths, dt)
        self._check_pairs(x, lengths, dt)
        # the two sequences do not see each other
        of_each = (None if given is None else given.flatten(0, 1) for given in (lengths, dt))
        encoded = self._features(x.flatten(0, 1), *of_each)
        return encoded.unflatten(0, x.shape[:2])

    def stream(
        self,
        x: Num[Tensor, "b t *features"],
        state: tuple[State, ...] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t n_outputs"], tuple[State, ...]]:
        """Return the outputs of the next steps of streams, and the state after them, one entry per block.

        Only for causal encoders with `bidirectional=False`, and `pooling` "none" or "last". With "last", the
        output at each step is that of the sequence up to this step.

        Args:
            x: (b, t) int64 tokens, or (b, t, n_features) real features.
            state: the state that an earlier call returned; None at the start.
            reset: (b, t) bool, true where a stream starts anew.

        Raises:
            ValueError: the encoder sees later steps, averages over steps, or compares pairs.
        """
        if self.config.bidirectional or self.config.pooling == "mean" or self.config.pairs:
            raise ValueError(
                "`stream` needs `bidirectional` = False, `pooling` = 'none' or 'last', and no pairs; got "
                f"{self.config.bidirectional}, {self.config.pooling!r} and `pairs` = {self.config.pairs}. "
                "Call the model on whole sequences."
            )
        self._check_input(x)
        y = self.dropout(self.input(x))
        before: Sequence[State] = (None,) * len(self.blocks) if state is None else state
        y, after = run_blocks(self.blocks, y, before, reset=reset)
        return self.head(self.norm(y)), after

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> tuple[State, ...]:
        """Return the state at the start of `batch` streams, one entry per block."""
        return tuple(cast(Block, block).init_state(batch, device=device) for block in self.blocks)

    def _features(self, x: Tensor, lengths: Tensor | None, dt: Tensor | None) -> Tensor:
        y, valid = self.encoded(x, lengths, dt)
        return self._pooled(y, valid, None if lengths is None else lengths.to(x.device)[:, None])

    def _pooled(self, y: Tensor, valid: Tensor | None, lengths: Tensor | None) -> Tensor:
        if self.config.pooling == "none":
            return y
        if valid is None or lengths is None:
            return y.mean(1) if self.config.pooling == "mean" else y[:, -1]
        if self.config.pooling == "mean":
            return y.masked_fill(~valid[:, :, None], 0).sum(1) / lengths
        return y.take_along_dim(lengths[:, :, None] - 1, 1).squeeze(1)

    def _check_pairs(self, x: Tensor, lengths: Tensor | None, dt: Tensor | None) -> None:
        features = () if self.config.n_features is None else (self.config.n_features,)
        if x.ndim != 3 + len(features) or x.shape[1] != 2:
            shape = ", ".join(["batch", "2", "time", *map(str, features)])
            raise ValueError(
                f"`x` must be pairs of sequences ({shape}); got {tuple(x.shape)}. Stack them: "
                "`torch.stack([first, second], dim=1)`."
            )
        if lengths is not None and lengths.shape != x.shape[:2]:
            raise ValueError(
                f"`lengths` must have shape (batch, 2) = {tuple(x.shape[:2])}; got {tuple(lengths.shape)}."
            )
        check_times(dt, x.shape[:3], "(batch, 2, time)")
