"""The configurations of models."""

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

from linrec.models.pattern import arguments_by_name, settled
from linrec.nn.channel_mixing import ChannelMixing

__all__ = ["ModelConfig", "StackConfig"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """What the configurations of all models have in common: the stack of blocks, and the norm after it.

    A stack may be a hybrid: `mixer` and `channel_mixing` are a name, which all blocks have, or a pattern, a
    tuple of names that is repeated over depth: block i = 0, 1, ... has entry i modulo the pattern's length.
    Where the depth is no multiple of it, the last repetition breaks off.

    Args:
        d_model: width of the sequence between the blocks.
        n_layers: blocks.
        mixer: name of the time mixer, one of `linrec.mixers.names()`, or a pattern of names.
        mixer_args: keyword arguments of the mixer; of a pattern, those of each mixer under its name, as in
            {"attention": {"window": 1024}}. A mixer that is not named has its defaults.
        d_channel_mixing: hidden width of the channel mixing.
        channel_mixing: "ffn", two linear layers with a GELU between them, or a gated linear unit: "glu",
            "swiglu", "geglu", "geglu_tanh" or "bilinear"; "rwkv", which sees the step before; or "none":
            blocks that mix time alone; or a pattern of these.
        norm: normalisation in each block and before the head, "layer" or "rms".
        norm_eps: what the norms add to the variance or the mean square.
        norm_position: "pre", before each sublayer, or "post", after each sublayer's skip connection.
        final_norm: whether there is one before the head.
        dropout: probability, on the input of the stack and on the output of each sublayer.

    Raises:
        ValueError: a number out of its range; a pattern of no names or of more than there are blocks; or
            `mixer_args` of a mixer that the pattern has not.
        TypeError: a pattern of other things than names.

    Example:
        >>> StackConfig(n_layers=2).d_model
        64
        >>> hybrid = StackConfig(mixer=("gla", "attention"), mixer_args={"attention": {"window": 16}})
        >>> [hybrid.mixer_of(layer) for layer in range(hybrid.n_layers)]
        [('gla', {}), ('attention', {'window': 16}), ('gla', {}), ('attention', {'window': 16})]
    """

    d_model: int = 64
    n_layers: int = 4
    mixer: str | tuple[str, ...] = "gate_loop"
    mixer_args: dict[str, Any] = field(default_factory=dict)
    d_channel_mixing: int = 128
    channel_mixing: ChannelMixing | tuple[ChannelMixing, ...] = "ffn"
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    norm_position: Literal["pre", "post"] = "pre"
    final_norm: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "d_channel_mixing"):
            at_least_one(name, getattr(self, name))
        if not self.norm_eps > 0:
            raise ValueError(f"`norm_eps` must be above 0; got {self.norm_eps}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be in [0, 1); got {self.dropout}.")
        # the documented way for a frozen dataclass to derive its own fields
        derive = functools.partial(object.__setattr__, self)
        derive("channel_mixing", settled("channel_mixing", self.channel_mixing, self.n_layers))
        if not isinstance(self.mixer, str):
            derive("mixer", settled("mixer", self.mixer, self.n_layers))
            by_name = arguments_by_name(self.mixer_pattern, self.mixer_args)
            # a pattern of one name is that name
            derive("mixer_args", by_name.get(self.mixer, {}) if isinstance(self.mixer, str) else by_name)

    @property
    def mixer_pattern(self) -> tuple[str, ...]:
        """Names of the mixers that are repeated over depth; one where all blocks have the same."""
        return (self.mixer,) if isinstance(self.mixer, str) else self.mixer

    def mixer_of(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Name and keyword arguments of the time mixer of a block, counted from 0."""
        if isinstance(self.mixer, str):
            return self.mixer, self.mixer_args
        name = self.mixer[layer % len(self.mixer)]
        return name, self.mixer_args.get(name, {})

    @property
    def channel_mixing_pattern(self) -> tuple[ChannelMixing, ...]:
        """Names of the channel mixings that are repeated over depth."""
        return self.channel_mixing if isinstance(self.channel_mixing, tuple) else (self.channel_mixing,)

    def channel_mixing_of(self, layer: int) -> ChannelMixing:
        """Name of the channel mixing of a block, counted from 0."""
        return self.channel_mixing_pattern[layer % len(self.channel_mixing_pattern)]


def at_least_one(name: str, number: int) -> None:
    """Refuse a size below 1."""
    if number < 1:
        raise ValueError(f"`{name}` must be at least 1; got {number}.")


@dataclass(frozen=True)
class ModelConfig(StackConfig):
    """Everything that makes a `LanguageModel`; plain values only, so that it can be written to a file.

    Args:
        vocab_size: input tokens, 0 up to `vocab_size` - 1.
        n_outputs: logits per step; None is `vocab_size`.
        d_model: width of the sequence between the blocks.
        n_layers: blocks.
        mixer: name of the time mixer, one of `linrec.mixers.names()`, or a pattern of names, such as
            ("gla", "gla", "attention"), that is repeated over depth.
        mixer_args: keyword arguments of the mixer; of a pattern, those of each mixer under its name, as in
            {"attention": {"window": 1024}}.
        d_channel_mixing: hidden width of the channel mixing.
        channel_mixing: "ffn", two linear layers with a GELU between them, or a gated linear unit: "glu",
            "swiglu", "geglu", "geglu_tanh" or "bilinear"; "rwkv", which sees the step before; or "none":
            blocks that mix time alone; or a pattern of these.
        norm: normalisation in each block and before the head, "layer" or "rms".
        norm_eps: what the norms add to the variance or the mean square.
        norm_position: "pre", before each sublayer, or "post", after each sublayer's skip connection.
        final_norm: whether there is one before the head.
        dropout: probability, on the input of the stack and on the output of each sublayer.
        tie_embeddings: whether the head's weight is the embedding's.
        embedding_norm: whether the embedding is normalised, as RWKV's is.
        embedding_scale: None, or what the embedding is multiplied by; sqrt(d_model) in RecurrentGemma, whose
            head has the same weight.
        head_bias: whether the head has a bias; None: where its weight is not the embedding's.
        logit_cap: None, or a cap > 0: the logits are cap tanh(logits / cap).

    Raises:
        ValueError: what `StackConfig` refuses, a number out of its range, or ties between unequal
            vocabularies.
        TypeError: a pattern of other things than names.

    Example:
        >>> ModelConfig(vocab_size=6, n_outputs=50).d_model
        64
    """

    vocab_size: int
    n_outputs: int | None = None
    tie_embeddings: bool = False
    embedding_norm: bool = False
    embedding_scale: float | None = None
    head_bias: bool | None = None
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("vocab_size", self.vocab_size)
        if self.n_outputs is not None and self.n_outputs < 1:
            raise ValueError(
                f"`n_outputs` must be at least 1, or None for `vocab_size`; got {self.n_outputs}."
            )
        if self.embedding_scale is not None and not self.embedding_scale > 0:
            raise ValueError(f"`embedding_scale` must be above 0, or None; got {self.embedding_scale}.")
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise ValueError(f"`logit_cap` must be above 0, or None; got {self.logit_cap}.")
        if self.tie_embeddings and self.n_outputs not in (None, self.vocab_size):
            raise ValueError(
                f"`tie_embeddings` needs as many outputs as tokens: `vocab_size` = {self.vocab_size}; "
                f"got `n_outputs` = {self.n_outputs}. Untie them or leave `n_outputs` at None."
            )
