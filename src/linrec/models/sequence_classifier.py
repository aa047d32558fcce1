"""An encoder of sequences with one output for each, or for each step: classification and regression."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.models.bidirectional import Bidirectional
from linrec.models.config import StackConfig, at_least_one
from linrec.models.directions import Combine
from linrec.models.stack import build_mixer, make_blocks
from linrec.nn.embedding import Embedding
from linrec.nn.norms import make_norm
from linrec.nn.pair_head import PairHead
from linrec.nn.parameters import mark
from linrec.ops.core.call import refuse_split_time

__all__ = ["Pooling", "SequenceClassifier", "SequenceClassifierConfig"]

Pooling: TypeAlias = Literal["mean", "last", "none"]


@dataclass(frozen=True)
class SequenceClassifierConfig(StackConfig):
    """Everything that makes a `SequenceClassifier`; plain values only, so that it can be written to a file.

    Args:
        n_outputs: classes, or values of a regression.
        vocab_size: input tokens, 0 up to `vocab_size` - 1; or
        n_features: real numbers per step of an input that is no tokens. One of the two is given.
        bidirectional: whether each block has a second direction. Without, the encoder is as causal as its
            mixer; softmax attention looks both ways by itself with `mixer_args={"causal": False}`.
        unshared: what the two directions do not share. None: nothing, each has a mixer of its own. Names of
            the mixer's parameters: all but these, as ("theta",) in HGRN; (): one mixer runs in both.
        combine: what becomes of the outputs of two directions, "sum", "mean" or "concatenate"; see
            `Bidirectional`.
        pooling: "mean" over the steps, "last" step, or "none", which gives each step its output.
        pairs: whether two sequences have one output together: the encoder makes a vector of each, and a
            `linrec.nn.PairHead` compares these.

    The other arguments, by keyword, are those of `StackConfig`.

    Raises:
        ValueError: a number out of its range, none or two kinds of input, an option of two directions for
            one, or pairs without pooling.

    Example:
        >>> SequenceClassifierConfig(n_outputs=10, n_features=1, mixer="hgru").bidirectional
        True
    """

    n_outputs: int
    vocab_size: int | None = None
    n_features: int | None = None
    bidirectional: bool = True
    unshared: tuple[str, ...] | None = None
    combine: Combine = "sum"
    pooling: Pooling = "mean"
    pairs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("n_outputs", self.n_outputs)
        if (self.vocab_size is None) == (self.n_features is None):
            raise ValueError(
                "Give either `vocab_size`, for tokens, or `n_features`, for real numbers; got "
                f"{self.vocab_size} and {self.n_features}."
            )
        for name in ("vocab_size", "n_features"):
            if getattr(self, name) is not None:
                at_least_one(name, getattr(self, name))
        if self.pooling not in ("mean", "last", "none"):
            raise unknown("`pooling`", self.pooling, ["mean", "last", "none"])
        if self.pairs and self.pooling == "none":
            raise ValueError("`pairs` have one output, and `pooling` = 'none' gives one to each step.")
        if self.unshared is not None:
            # JSON has lists alone
            object.__setattr__(self, "unshared", tuple(self.unshared))
        if not self.bidirectional and (self.unshared is not None or self.combine != "sum"):
            raise ValueError(
                "`unshared` and `combine` are for two directions; got `bidirectional` = False with "
                f"`unshared` = {self.unshared} and `combine` = {self.combine!r}. Leave them out."
            )


class SequenceClassifier(nn.Module):
    """outputs = head(pool(norm(block_L(... block_1(input(x)))))).

    The input is an embedding of tokens, or a Linear of real features. What lies behind a sequence's length
    is padding: no output, and no gradient, depends on its values or its number, in either direction. The
    mean is that of the steps before it, the last step is the last of them.

    There is no state: the whole sequence is given at once. For causal models that stream, see
    `LanguageModel`.

    Args:
        config: the model's shape; see `SequenceClassifierConfig`.

    Raises:
        ValueError: `config` names no mixer or channel mixing, or an argument that the mixer does not take.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 4.2 and the authors' code for the Long Range Arena: encoders
        in both directions, mean pooling. Theirs has batch normalisation and positional embeddings too.

    Example:
        >>> import torch
        >>> config = SequenceClassifierConfig(n_outputs=3, vocab_size=256, mixer="hgru", n_layers=2)
        >>> model = SequenceClassifier(config)
        >>> texts = torch.zeros(2, 10, dtype=torch.int64)
        >>> model(texts, lengths=torch.tensor([10, 4])).shape
        torch.Size([2, 3])
    """

    def __init__(self, config: SequenceClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.input: nn.Module
        if config.vocab_size is not None:
            self.input = mark(
                Embedding(config.vocab_size, config.d_model), group="vocabulary", weight_decay=True
            )
        else:
            assert config.n_features is not None
            self.input = nn.Linear(config.n_features, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

        def both(layer: int) -> Bidirectional:
            ways = (build_mixer(config, layer) for _ in range(2))
            return Bidirectional(*ways, combine=config.combine, unshared=config.unshared)

        self.blocks = make_blocks(config, both if config.bidirectional else None)
        self.norm = make_norm(
            config.norm if config.final_norm else "none", config.d_model, eps=config.norm_eps
        )
        self.head: nn.Module
        if config.pairs:
            self.head = PairHead(config.d_model, config.n_outputs)
        else:
            self.head = mark(
                nn.Linear(config.d_model, config.n_outputs), group="vocabulary", weight_decay=True
            )

    def forward(
        self, x: Num[Tensor, "b t *features"], *, lengths: Int[Tensor, "b *pair"] | None = None
    ) -> Float[Tensor, "b *t n_outputs"]:
        """Outputs of every sequence, or of every pair.

        Args:
            x: (b, t) int64 tokens, or (b, t, n_features) real features; of pairs (b, 2, t) or
                (b, 2, t, n_features).
            lengths: (b,) int64, of pairs (b, 2), the steps of each sequence, from 1 to t; what follows them
                is padding. None where all have t.

        Returns:
            (b, n_outputs), logits or values; (b, t, n_outputs) with `pooling="none"`, where the outputs of
            padding mean nothing.

        Raises:
            ValueError: `x` or `lengths` of another shape, or lengths out of their range. On CUDA the range
                is not checked, for that would wait for the device; there keep `lengths` on the CPU.
            TypeError: tokens or lengths that are no integers, or features that are no real numbers.
        """
        return self.head(self.features(x, lengths=lengths))

    def features(
        self, x: Num[Tensor, "b t *features"], *, lengths: Int[Tensor, "b *pair"] | None = None
    ) -> Float[Tensor, "b *t d_model"]:
        """What the head sees, of width `d_model`, for a head of one's own; arguments are those of `forward`.

        Of pairs, (b, 2, d_model).
        """
        if not self.config.pairs:
            return self._encoded(x, lengths)
        self._check_pairs(x, lengths)
        # the two sequences do not see each other
        encoded = self._encoded(x.flatten(0, 1), None if lengths is None else lengths.flatten())
        return encoded.unflatten(0, x.shape[:2])

    def _encoded(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        self._check_input(x)
        refuse_split_time(type(self).__name__)
        valid = reset = None
        if lengths is not None:
            self._check_lengths(lengths, x)
            lengths, step = lengths.to(x.device)[:, None], torch.arange(x.shape[1], device=x.device)
            valid = step < lengths
            # whatever stands there, be it no token at all or NaN
            x = x.masked_fill(~valid if x.ndim == 2 else ~valid[:, :, None], 0)
            # padding is a document of its own, from which nothing comes back
            reset = step == lengths
        y = self.dropout(self.input(x))
        for block in self.blocks:
            y, _ = block(y, reset=reset)
        return self._pooled(self.norm(y), valid, lengths)

    def _pooled(self, y: Tensor, valid: Tensor | None, lengths: Tensor | None) -> Tensor:
        if self.config.pooling == "none":
            return y
        if valid is None or lengths is None:
            return y.mean(1) if self.config.pooling == "mean" else y[:, -1]
        if self.config.pooling == "mean":
            return y.masked_fill(~valid[:, :, None], 0).sum(1) / lengths
        return y.take_along_dim(lengths[:, :, None] - 1, 1).squeeze(1)

    def _check_pairs(self, x: Tensor, lengths: Tensor | None) -> None:
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

    def _check_input(self, x: Tensor) -> None:
        if self.config.vocab_size is not None:
            if x.ndim != 2 or not x.shape[1]:
                raise ValueError(
                    f"`x` must be tokens (batch, time) of at least one step; got {tuple(x.shape)}. "
                    "Add a batch axis to a single sequence: `x[None]`."
                )
            if x.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"`x` must be int64 token ids; got {x.dtype}. Convert: `x.long()`.")
            return
        if x.ndim != 3 or x.shape[-1] != self.config.n_features or not x.shape[1]:
            raise ValueError(
                f"`x` must be features (batch, time, {self.config.n_features}) of at least one step; got "
                f"{tuple(x.shape)}. Add missing axes, or build the model with another `n_features`."
            )
        if not x.is_floating_point():
            raise TypeError(f"`x` must be real features; got {x.dtype}. Convert: `x.float()`.")

    def _check_lengths(self, lengths: Tensor, x: Tensor) -> None:
        batch, time = x.shape[:2]
        if lengths.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"`lengths` must be int64; got {lengths.dtype}. Count steps, not fractions of them."
            )
        if lengths.shape != (batch,):
            raise ValueError(
                f"`lengths` must have shape (batch,) = ({batch},); got {tuple(lengths.shape)}. "
                "Of a mask (batch, time) of valid steps it is `mask.sum(1)`."
            )
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            outside = lengths[(lengths < 1) | (lengths > time)]
            if len(outside):
                raise ValueError(
                    f"`lengths` must be in [1, {time}], the steps of `x`; got {outside[0].item()}. "
                    "Leave empty sequences out of the batch."
                )
