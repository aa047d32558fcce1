"""The configurations of models."""

from dataclasses import dataclass, field
from typing import Any, Literal

from linrec.nn.channel_mixing import ChannelMixing

__all__ = ["ModelConfig", "StackConfig"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """What the configurations of all models have in common: the stack of blocks, and the norm after it.

    Args:
        d_model: width of the sequence between the blocks.
        n_layers: blocks.
        mixer: name of the time mixer, one of `linrec.mixers.names()`.
        mixer_args: keyword arguments of the mixer.
        d_channel_mixing: hidden width of the channel mixing.
        channel_mixing: "ffn", two linear layers with a GELU between them, or a gated linear unit: "glu",
            "swiglu", "geglu" or "bilinear"; "rwkv", which sees the step before; or "none": blocks that mix
            time alone.
        norm: normalisation in each block and before the head, "layer" or "rms".
        norm_eps: what the norms add to the variance or the mean square.
        norm_position: "pre", before each sublayer, or "post", after each sublayer's skip connection.
        final_norm: whether there is one before the head.
        dropout: probability, on the input of the stack and on the output of each sublayer.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> StackConfig(n_layers=2).d_model
        64
    """

    d_model: int = 64
    n_layers: int = 4
    mixer: str = "gate_loop"
    mixer_args: dict[str, Any] = field(default_factory=dict)
    d_channel_mixing: int = 128
    channel_mixing: ChannelMixing = "ffn"
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
        mixer: name of the time mixer, one of `linrec.mixers.names()`.
        mixer_args: keyword arguments of the mixer.
        d_channel_mixing: hidden width of the channel mixing.
        channel_mixing: "ffn", two linear layers with a GELU between them, or a gated linear unit: "glu",
            "swiglu", "geglu" or "bilinear"; "rwkv", which sees the step before; or "none": blocks that mix
            time alone.
        norm: normalisation in each block and before the head, "layer" or "rms".
        norm_eps: what the norms add to the variance or the mean square.
        norm_position: "pre", before each sublayer, or "post", after each sublayer's skip connection.
        final_norm: whether there is one before the head.
        dropout: probability, on the input of the stack and on the output of each sublayer.
        tie_embeddings: whether the head's weight is the embedding's.
        embedding_norm: whether the embedding is normalised, as RWKV's is.
        head_bias: whether the head has a bias; None: where its weight is not the embedding's.
        logit_cap: None, or a cap > 0: the logits are cap tanh(logits / cap).

    Raises:
        ValueError: a number out of its range, or ties between unequal vocabularies.

    Example:
        >>> ModelConfig(vocab_size=6, n_outputs=50).d_model
        64
    """

    vocab_size: int
    n_outputs: int | None = None
    tie_embeddings: bool = False
    embedding_norm: bool = False
    head_bias: bool | None = None
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("vocab_size", self.vocab_size)
        if self.n_outputs is not None and self.n_outputs < 1:
            raise ValueError(
                f"`n_outputs` must be at least 1, or None for `vocab_size`; got {self.n_outputs}."
            )
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise ValueError(f"`logit_cap` must be above 0, or None; got {self.logit_cap}.")
        if self.tie_embeddings and self.n_outputs not in (None, self.vocab_size):
            raise ValueError(
                f"`tie_embeddings` needs as many outputs as tokens: `vocab_size` = {self.vocab_size}; "
                f"got `n_outputs` = {self.n_outputs}. Untie them or leave `n_outputs` at None."
            )
