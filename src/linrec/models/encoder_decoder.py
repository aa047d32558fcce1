"""A model of one sequence given another: an encoder, and a decoder that attends to its output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor, nn

from linrec.mixers import State
from linrec.models.attentive_recurrence import AttentiveRecurrence, AttentiveRecurrenceConfig
from linrec.models.config import ModelConfig
from linrec.models.language_model import LanguageModel
from linrec.models.sequence_encoder import EncoderConfig, SequenceEncoder
from linrec.models.source_reading import Encoded, GatedReading, SourceReading, StackedReading
from linrec.nn.norms import make_norm
from linrec.nn.segments import SegmentState
from linrec.rules import at_least, choice, require

__all__ = ["EncoderDecoder", "EncoderDecoderConfig"]

Merge: TypeAlias = Literal["gate", "stack", "concatenate"]


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Configuration of an `EncoderDecoder`; all values are plain, so that it can be written to a file.

    Args:
        encoder: the encoder, whose fields may also come as a dict. Its width may differ from the decoder's.
        second: a second encoder of the same source, with an embedding of its own; None disables it.
        arn: an attentive recurrent network as the second encoder, which reads the embeddings of the first;
            see `AttentiveRecurrence`. None disables it.
        merge: how the decoder reads two encoders: "gate", by an attention to each, whose outputs a gate mixes
            in each block (`GatedReading`); "stack", by two attentions one after another (`StackedReading`);
            or "concatenate", as one encoder whose output at a step is W [norm(U_1), norm(U_2)] + b, which
            `arn` does not have.
        n_reading_second: blocks of the decoder that read the second encoder, the last ones; None is all.
        cross_heads: heads of the attention to the encoder's output. None is the largest number that divides
            `d_model` and leaves at least 64 channels to each head, or 1.
        share_embeddings: whether source and target tokens have one embedding; both then have the same
            vocabulary. With `tie_embeddings` it is the head's weight, too.

    The other arguments are keyword arguments of `ModelConfig` and `StackConfig`. They are of the decoder, but
    for `memory`: it passes from segment to segment of the source, in the encoder.

    Raises:
        ValueError: a value that `ModelConfig` or `EncoderConfig` refuses, fields of encoders that do not fit
            each other, or `share_embeddings` with other tokens or another width in the encoder.

    Example:
        >>> encoder = EncoderConfig(vocab_size=8, n_layers=2, mixer="lru")
        >>> EncoderDecoderConfig(vocab_size=6, encoder=encoder, n_layers=2, mixer="lru").encoder.d_model
        64
    """

    encoder: EncoderConfig
    second: EncoderConfig | None = None
    arn: AttentiveRecurrenceConfig | None = None
    merge: Merge = "gate"
    n_reading_second: int | None = None
    cross_heads: int | None = None
    share_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.encoder, dict):
            # JSON stores it as an object
            object.__setattr__(self, "encoder", EncoderConfig(**self.encoder))
        if isinstance(self.second, dict):
            object.__setattr__(self, "second", EncoderConfig(**self.second))
        if isinstance(self.arn, dict):
            object.__setattr__(self, "arn", AttentiveRecurrenceConfig(**self.arn))
        self._check_second()
        at_least(1, cross_heads=self.cross_heads, or_none=True)
        require(
            self.memory.kind == "none" or (self.memory.form == "encoder" and self.second is None),
            f"`memory` must be of the encoder, `memory.form` = 'encoder', without a `second` encoder; got "
            f"{self.memory.form!r} and {self.second}. Set `form`, or leave the memory out.",
        )
        sizes = {"vocab_size": self.vocab_size, "d_model": self.d_model}
        of_encoder = {name: getattr(self.encoder, name) for name in sizes}
        require(
            not self.share_embeddings or sizes == of_encoder,
            f"`share_embeddings` needs an encoder of the decoder's {sizes}; got {of_encoder}. Leave it out, "
            "or give both the same tokens and width.",
        )

    def _check_second(self) -> None:
        """Raise ValueError unless the fields of two encoders fit each other."""
        choice(Merge, merge=self.merge)
        at_least(1, most=self.n_layers, n_reading_second=self.n_reading_second, or_none=True)
        require(
            self.second is None or self.arn is None,
            "`second` and `arn` must not both be given, since a decoder reads at most two encoders. Leave "
            "out the one or the other.",
        )
        require(
            self.merge != "concatenate" or (self.second is not None and self.n_reading_second is None),
            f"`merge` = {self.merge!r} needs a `second` encoder, which all blocks read; got `second` = "
            f"{self.second} and `n_reading_second` = {self.n_reading_second}. Use `merge` = 'gate'.",
        )
        require(
            self.merge != "stack" or self.has_second,
            "`merge` = 'stack' needs a `second` encoder or `arn`; got neither. Leave it out.",
        )
        require(
            self.has_second or self.n_reading_second is None,
            f"`n_reading_second` must be None without `second` and `arn`; got {self.n_reading_second}.",
        )

    @property
    def has_second(self) -> bool:
        """Whether there is a second encoder."""
        return self.second is not None or self.arn is not None

    @property
    def import_paths(self) -> set[str]:
        """The import paths of the decoder and the encoders; see `StackConfig`."""
        second = set() if self.second is None else self.second.import_paths
        return super().import_paths | self.encoder.import_paths | second


class EncoderDecoder(LanguageModel):
    """logits_n = decoder(y_1, .., y_n; encoder(x_1, .., x_s)): a language model of y, given a sequence x.

        U = encoder(x)
        h = h + mixer(norm(h));  h = h + Attn(norm(h); U);  h = h + ffn(norm(h))       in every decoder block

    The blocks of the decoder have a sublayer between time mixing and channel mixing, which attends to the
    encoder's output U. Any mixer works in the encoder, by default in both directions, and any causal mixer in
    the decoder.

    Keys and values of U do not depend on y. They are a part of the decoder's state, so they are computed
    once, and steps from a state do not see the source again. A call with `source` begins a target;
    `encode(source)` returns the state before its first token, with which `linrec.generation` goes on.

    | paper | arguments |
    |---|---|
    | Transformer | `mixer="attention"`, in the encoder with `mixer_args={"causal": False}` |
    | recurrent networks with attention | `mixer="lstm"` or `"gru"` on both sides |
    | cascaded encoder | an encoder of as many mixers as layers, such as `("lstm", "lstm", "attention")` |
    | multi-column encoder | `second`, `merge="concatenate"` |
    | recurrence encoder beside a Transformer's | `second` of one layer of `"gru"`, or `arn` |
    | its short-cut | `n_reading_second=1` |
    | its stack in place of a gated sum | `merge="stack"` |
    | Memformer | `memory=MemoryConfig(kind="memformer", form="encoder")`, `encode_segments` |

    Args:
        config: the model's configuration; see `EncoderDecoderConfig`.

    Raises:
        ValueError: `config` has an unknown mixer or channel mixing, or an argument that the mixer lacks; or a
            mixer of the decoder is not causal.

    Source:
        Bahdanau, Cho and Bengio, Neural Machine Translation by Jointly Learning to Align and Translate
        (2015): a recurrent decoder that attends to a bidirectional encoder. Vaswani and others, Attention Is
        All You Need (2017), section 3: the blocks, and attention by scaled products. Chen and others, The
        Best of Both Worlds (2018), section 6: cascaded and multi-column encoders. Hao and others, Modeling
        Recurrence for Transformer (2019): a second encoder.

    Example:
        >>> import torch
        >>> encoder = EncoderConfig(vocab_size=8, n_layers=2, mixer="lru")
        >>> model = EncoderDecoder(EncoderDecoderConfig(vocab_size=6, encoder=encoder, n_layers=2))
        >>> source, target = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
        >>> logits, state = model(target, source=source, source_lengths=torch.tensor([9, 4]))
        >>> logits.shape
        torch.Size([2, 5, 6])
        >>> logits, state = model(target[:, :1], state)
        >>> logits.shape
        torch.Size([2, 1, 6])
    """

    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__(config)
        for name, mixer in zip(config.mixer_pattern, self.mixers, strict=False):
            require(
                mixer.is_causal,
                f"`mixer` must be causal in the decoder, which writes a token after the other; {name!r} is "
                "not. Mixers that see later steps belong to the encoder.",
            )
        self.encoder = SequenceEncoder(config.encoder, memory=config.memory)
        self.second: nn.Module | None = None
        if config.second is not None:
            self.second = SequenceEncoder(config.second)
        elif config.arn is not None:
            self.second = AttentiveRecurrence(config.arn, config.encoder.d_model)
        self.merge: ColumnMerge | None = None
        if config.merge == "concatenate" and config.second is not None:
            self.merge = ColumnMerge(config.encoder.d_model, config.second.d_model)
        if config.share_embeddings:
            assert isinstance(self.encoder.input, nn.Embedding)
            self.encoder.input.weight = self.embedding.weight

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        state: tuple[State, ...] | None = None,
        *,
        source: Num[Tensor, "b s *features"] | None = None,
        source_lengths: Int[Tensor, "b"] | None = None,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t n_outputs"], tuple[State, ...]]:
        """Return the logits of every step of the target.

        Args:
            tokens: (b, t) int64 in [0, vocab_size), the target so far. Its first token usually stands for its
                beginning.
            state: the state that an earlier call or `encode` returned; None with `source`.
            source: (b, s) int64 tokens, or (b, s, n_features) real features, at the beginning of a target.
            source_lengths: (b,) int64, the length of each source, from 1 to s; later steps are padding. None
                if all lengths are s.
            reset: (b, t) bool, true where a new target of the same source starts.
            dt: (b, t), as in `LanguageModel.forward`, for the decoder.
            mask: (b, t) bool, as in `LanguageModel.forward`.

        Returns:
            logits (b, t, n_outputs), and the state after the last step, one entry per block of the decoder.

        Raises:
            ValueError: not exactly one of `state` and `source` is given, or an argument has the wrong shape.
            TypeError: an argument has the wrong dtype, or a mixer does not take `dt`.
        """
        x, state = self.hidden(
            tokens, state, source=source, source_lengths=source_lengths, reset=reset, dt=dt, mask=mask
        )
        return self.head(x), state

    if TYPE_CHECKING:
        __call__ = forward

    def hidden(
        self,
        tokens: Int[Tensor, "b t"],
        state: tuple[State, ...] | None = None,
        *,
        source: Num[Tensor, "b s *features"] | None = None,
        source_lengths: Int[Tensor, "b"] | None = None,
        **options: Any,
    ) -> tuple[Float[Tensor, "b t d_model"], tuple[State, ...]]:
        """Return the head's input (b, t, d_model), and the state.

        Arguments and errors are as in `forward`; `keep_state` is as in `LanguageModel.hidden`.
        """
        require(
            source is None or state is None,
            "`state` must be None with a `source`, which begins a target; got both. Leave out one of them.",
        )
        require(
            source is not None or source_lengths is None,
            "`source_lengths` must be None without a `source`; got lengths. The state knows them.",
        )
        if source is not None:
            require(
                len(source) == len(tokens),
                f"`source` must have a row for each of the {len(tokens)} targets; got {len(source)}.",
            )
            state = self._sourced([None] * len(self.blocks), self._encoders(source, source_lengths))
        return super().hidden(tokens, state, **options)

    def encode(
        self,
        source: Num[Tensor, "b s *features"],
        lengths: Int[Tensor, "b"] | None = None,
    ) -> tuple[State, ...]:
        """Return the state before the first token of the targets, one entry per block of the decoder.

        The arguments are `source` and `source_lengths` of `forward`.

        Example:
            >>> import torch
            >>> from linrec.generation import GenerationState, generate
            >>> encoder = EncoderConfig(vocab_size=8, n_layers=1)
            >>> config = EncoderDecoderConfig(vocab_size=6, encoder=encoder, n_layers=1)
            >>> model = EncoderDecoder(config).eval()
            >>> state = model.encode(torch.tensor([[3, 7, 1]]))
            >>> begin = GenerationState(state, token=torch.tensor([0]))
            >>> generate(model, state=begin, n_tokens=4, temperature=0).tokens.shape
            torch.Size([1, 4])
        """
        return self._sourced(self.init_state(len(source)), self._encoders(source, lengths))

    def encode_segments(
        self, source: Num[Tensor, "b s *features"], memory: SegmentState | None = None
    ) -> tuple[tuple[State, ...], SegmentState]:
        """Return the state before the first token, and the encoder's memory, for the next source.

        Only with `config.memory`. The decoder reads the outputs at the steps of this source alone. Earlier
        sources reach it through the memory.

        Args:
            source: whole segments (b, s), or (b, s, n_features).
            memory: the memory that an earlier call returned; None at the start.

        Raises:
            ValueError: the encoder has no memory, or the source is not of whole segments.
        """
        y, memory = self.encoder.remember(source, memory)
        return self._sourced(
            self.init_state(len(source)), self._with_second(source, Encoded(y, None))
        ), memory

    def _sourced(self, states: Sequence[State], encoders: Sequence[Encoded]) -> tuple[State, ...]:
        """Return states of the blocks with the keys and values of the encoders' outputs."""
        return tuple(
            block.with_source(state, cast(SourceReading, block.reading).read(encoders))
            for block, state in zip(self._blocks, states, strict=True)
        )

    def _encoders(self, source: Tensor, lengths: Tensor | None) -> list[Encoded]:
        """Return the outputs of the encoders that the blocks read."""
        return self._with_second(source, _encoded(self.encoder, source, lengths), lengths)

    def _with_second(self, source: Tensor, first: Encoded, lengths: Tensor | None = None) -> list[Encoded]:
        """Return the outputs of both encoders, or of both as one."""
        if isinstance(self.second, AttentiveRecurrence):
            embedded = self.encoder.embedded(source, first.visible)
            return [first, Encoded(self.second(embedded, first.visible), None)]
        if not isinstance(self.second, SequenceEncoder):
            return [first]
        second = _encoded(self.second, source, lengths)
        if self.merge is None:
            return [first, second]
        return [Encoded(self.merge(first.y, second.y), first.visible)]

    def _make_memory(self) -> None:
        """Return None: the memory is the encoder's."""

    def _make_reading(self, layer: int) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the sublayer of block `layer` that reads the source."""
        config, d_source = self.config, self.config.encoder.d_model
        reading = config.n_layers if config.n_reading_second is None else config.n_reading_second
        if not config.has_second or config.merge == "concatenate" or layer < config.n_layers - reading:
            return SourceReading(config.d_model, d_source, config.cross_heads), None
        d_second = d_source if config.second is None else config.second.d_model
        sizes = config.d_model, d_source, d_second, config.cross_heads
        if config.merge == "stack":
            return StackedReading(*sizes, norm=config.norm, norm_eps=config.norm_eps), None
        return GatedReading(*sizes), None


class ColumnMerge(nn.Module):
    """y = W [norm(U_1), norm(U_2)] + b: one output of two encoders, as wide as the first.

    Args:
        d_first: width of U_1 and of y.
        d_second: width of U_2.
    """

    def __init__(self, d_first: int, d_second: int) -> None:
        super().__init__()
        self.first, self.second = make_norm("layer", d_first), make_norm("layer", d_second)
        self.project = nn.Linear(d_first + d_second, d_first)

    def forward(
        self, first: Float[Tensor, "b s d_first"], second: Float[Tensor, "b s d_second"]
    ) -> Float[Tensor, "b s d_first"]:
        """Return y."""
        return self.project(torch.cat([self.first(first), self.second(second)], -1))


def _encoded(encoder: SequenceEncoder, source: Tensor, lengths: Tensor | None) -> Encoded:
    y, visible = encoder.encoded(source, lengths, None)
    # what an encoder returns at padding may overflow
    return Encoded(y if visible is None else y.masked_fill(~visible[..., None], 0), visible)
