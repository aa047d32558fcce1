"""A model of one sequence given another: an encoder, and a decoder that attends to its output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jaxtyping import Bool, Float, Int, Num
from torch import Tensor, nn

from linrec.mixers import State
from linrec.models.config import ModelConfig
from linrec.models.language_model import LanguageModel
from linrec.models.sequence_encoder import EncoderConfig, SequenceEncoder
from linrec.models.source_reading import SourceReading
from linrec.rules import at_least, require

__all__ = ["EncoderDecoder", "EncoderDecoderConfig"]


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Configuration of an `EncoderDecoder`; all values are plain, so that it can be written to a file.

    Args:
        encoder: the encoder, whose fields may also come as a dict. Its width may differ from the decoder's.
        cross_heads: heads of the attention to the encoder's output. None is the largest number that divides
            `d_model` and leaves at least 64 channels to each head, or 1.
        share_embeddings: whether source and target tokens have one embedding; both then have the same
            vocabulary. With `tie_embeddings` it is the head's weight, too.

    The other arguments are keyword arguments of `ModelConfig` and `StackConfig`. They are of the decoder.

    Raises:
        ValueError: a value that `ModelConfig` or `EncoderConfig` refuses, a memory across the stack, or
            `share_embeddings` with other tokens or another width in the encoder.

    Example:
        >>> encoder = EncoderConfig(vocab_size=8, n_layers=2, mixer="lru")
        >>> EncoderDecoderConfig(vocab_size=6, encoder=encoder, n_layers=2, mixer="lru").encoder.d_model
        64
    """

    encoder: EncoderConfig
    cross_heads: int | None = None
    share_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.encoder, dict):
            # JSON stores it as an object
            object.__setattr__(self, "encoder", EncoderConfig(**self.encoder))
        at_least(1, cross_heads=self.cross_heads, or_none=True)
        require(
            self.memory.kind == "none",
            f"`memory.kind` must be 'none' with an encoder; got {self.memory.kind!r}, whose blocks read the "
            "memory where they would read the source. Use a `LanguageModel`.",
        )
        sizes = {"vocab_size": self.vocab_size, "d_model": self.d_model}
        of_encoder = {name: getattr(self.encoder, name) for name in sizes}
        require(
            not self.share_embeddings or sizes == of_encoder,
            f"`share_embeddings` needs an encoder of the decoder's {sizes}; got {of_encoder}. Leave it out, "
            "or give both the same tokens and width.",
        )

    @property
    def import_paths(self) -> set[str]:
        """The import paths of the decoder and the encoder; see `StackConfig`."""
        return super().import_paths | self.encoder.import_paths


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

    Args:
        config: the model's configuration; see `EncoderDecoderConfig`.

    Raises:
        ValueError: `config` has an unknown mixer or channel mixing, or an argument that the mixer lacks; or a
            mixer of the decoder is not causal.

    Source:
        Bahdanau, Cho and Bengio, Neural Machine Translation by Jointly Learning to Align and Translate
        (2015): a recurrent decoder that attends to a bidirectional encoder. Vaswani and others, Attention Is
        All You Need (2017), section 3: the blocks, and attention by scaled products. Chen and others, The
        Best of Both Worlds (2018): cascaded encoders.

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
        self.encoder = SequenceEncoder(config.encoder)
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
            state = self._sourced([None] * len(self.blocks), source, source_lengths)
        return super().hidden(tokens, state, **options)

    def encode(
        self,
        source: Num[Tensor, "b s *features"],
        lengths: Int[Tensor, "b"] | None = None,
    ) -> tuple[State, ...]:
        """Return the state before the first token of the targets, one entry per block of the decoder.

        Args:
            source: (b, s) int64 tokens, or (b, s, n_features) real features.
            lengths: (b,) int64, the length of each source, from 1 to s; later steps are padding. None if all
                lengths are s.

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
        return self._sourced(self.init_state(len(source)), source, lengths)

    def _sourced(self, states: Sequence[State], source: Tensor, lengths: Tensor | None) -> tuple[State, ...]:
        """Return states of the blocks with the keys and values of the encoded source."""
        encoded, visible = self.encoder.encoded(source, lengths, None)
        if visible is not None:
            # what the encoder returns at padding may overflow
            encoded = encoded.masked_fill(~visible[..., None], 0)
        return tuple(
            block.with_source(state, cast(SourceReading, block.reading).source(encoded, visible))
            for block, state in zip(self._blocks, states, strict=True)
        )

    def _make_reading(self, layer: int) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the sublayer of block `layer` that reads the source."""
        config = self.config
        return SourceReading(config.d_model, config.encoder.d_model, config.cross_heads), None
