"""Configurations of models."""

import functools
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from linrec import mixers
from linrec.errors import unknown, unknown_argument
from linrec.mixers import canonical
from linrec.models.block import NormPosition
from linrec.nn.channel_mixing import ChannelMixing
from linrec.nn.norms import Norm
from linrec.nn.segments import Detach, check_detach
from linrec.rules import COUNT, at_least, choice, named_values, positive, require

__all__ = [
    "MemoryConfig",
    "ModelConfig",
    "StackConfig",
    "check_sizes",
    "complete_mixer_args",
    "mixer_parameters",
    "spelled",
]

LIMITS = {"n_layers": COUNT, "d_channel_mixing": 2**24, "vocab_size": 2**31, "n_outputs": 2**31}
"""The largest sizes of a model."""
WIDEST = 2**20
"""The largest size that `LIMITS` does not name, such as `d_model`."""


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Configuration of a stack of blocks and its final norm: the fields that all models share.

    `mixer` and `channel_mixing` are each a single name for all blocks, or a pattern of names for hybrid
    models. A pattern repeats over depth: block i = 0, 1, ... uses entry i modulo the pattern's length. If the
    depth is not a multiple of the length, the last repetition is cut short.

    Args:
        d_model: width of the sequence between the blocks.
        n_layers: number of blocks.
        mixer: name of the time mixer, from `linrec.mixers.names()`, or a pattern of names. Other names and
            import paths are as for `linrec.mixers.get`; the configuration keeps the name from `names()`.
        mixer_args: keyword arguments of the mixer. For a pattern, a dict from mixer name to keyword
            arguments, as in {"attention": {"window": 1024}}; a mixer without an entry uses its defaults.
        layer_args: arguments of the mixer that differ between the blocks: a name, and a number for each
            block, as in {"dt": (2.81e-5, 0.0343)} of UnICORNN. They replace those in `mixer_args`. Not
            for patterns of mixers.
        d_channel_mixing: hidden width of the channel mixing.
        channel_mixing: a name, or a pattern of names. "ffn" is two linear layers with a GELU between them.
            "squared_relu" has ReLU(x)^2 there. "glu", "swiglu", "geglu", "geglu_tanh" and "bilinear" are
            gated linear units. "rwkv" and "rwkv7" also read the previous step. "none" omits channel mixing.
        channel_mixing_bias: whether the linear layers of the channel mixing have biases; RWKV's has no bias.
        norm: normalisation in each block and before the head, "layer", "rms" or "none".
        norm_eps: epsilon that the norms add to the variance or the mean square.
        norm_position: a name, or a pattern of names. "pre" is before each sublayer, "post" after each
            sublayer's skip connection, and "output" after each sublayer, before its skip connection.
        skip: whether the sublayers have skip connections. Papers' plain stacks of recurrent networks have
            none, and neither norms nor channel mixing.
        final_norm: whether the stack ends with a norm, before the head.
        dropout: dropout probability, applied to the input of the stack and to the output of each sublayer.
        reversible: whether blocks have two streams, as in Reformer, y_1 = x_1 + mix(x_2) and
            y_2 = x_2 + channels(y_1). Training then stores no activations of the blocks, where it neither
            takes nor keeps states: the backward pass computes inputs from outputs. It needs norms before the
            sublayers, skip connections, and a channel mixing other than RWKV's and "none".

    Raises:
        ValueError: a number is out of range, a mixer does not exist, a pattern is empty or longer than
            `n_layers`, `mixer_args` names a mixer that is not in the pattern, or `layer_args` has another
            number of values than blocks.
        TypeError: a pattern contains an entry that is not a string.

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
    layer_args: dict[str, tuple[float, ...]] = field(default_factory=dict)
    d_channel_mixing: int = 128
    channel_mixing: ChannelMixing | tuple[ChannelMixing, ...] = "ffn"
    channel_mixing_bias: bool = True
    norm: Norm = "layer"
    norm_eps: float = 1e-5
    norm_position: NormPosition | tuple[NormPosition, ...] = "pre"
    skip: bool = True
    final_norm: bool = True
    dropout: float = 0.0
    reversible: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "d_model", "n_layers", "d_channel_mixing")
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"`norm_eps` must be above 0; got {self.norm_eps}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be in [0, 1); got {self.dropout}.")
        # `object.__setattr__` is the documented way to set fields of a frozen dataclass
        derive = functools.partial(object.__setattr__, self)
        for name in ("channel_mixing", "norm_position"):
            derive(name, _settled(name, getattr(self, name), self.n_layers))
        fits = self.norm_position == "pre" and self.skip
        require(
            not self.reversible or (fits and not {"rwkv", "rwkv7", "none"} & {*self.channel_mixing_pattern}),
            "`reversible` needs `norm_position` = 'pre', `skip`, and a channel mixing other than 'rwkv' and "
            f"'none'; got {self.norm_position!r}, {self.skip} and {self.channel_mixing!r}. Leave them out.",
        )
        given, mixer = self.mixer, _settled("mixer", self.mixer, self.n_layers)
        derive("mixer", canonical(mixer) if isinstance(mixer, str) else tuple(map(canonical, mixer)))
        if not isinstance(given, str):
            by_name = _arguments_by_name(self.mixer_pattern, self.mixer_args)
            # `_settled` returns a pattern of one name as a plain string
            derive("mixer_args", by_name.get(self.mixer, {}) if isinstance(self.mixer, str) else by_name)
        # JSON stores tuples as lists
        derive("layer_args", {name: tuple(values) for name, values in self.layer_args.items()})
        for name, values in self.layer_args.items():
            require(
                isinstance(self.mixer, str) and len(values) == self.n_layers,
                f"`layer_args` must have a number for each of `n_layers` = {self.n_layers} blocks of one "
                f"kind of mixer; got {len(values)} of {name!r} for {self.mixer!r}. Arguments of "
                "all blocks are `mixer_args`.",
            )

    @property
    def mixer_pattern(self) -> tuple[str, ...]:
        """Names of the mixers that repeat over depth; a single name if all blocks use the same mixer."""
        return (self.mixer,) if isinstance(self.mixer, str) else self.mixer

    @property
    def import_paths(self) -> set[str]:
        """The import paths, such as "my_package.my_module:MyMixer", that building the model would import.

        A mixer may name another mixer in its arguments, so every text in `mixer` and `mixer_args` with a
        colon counts.
        """
        named = named_values({"mixer": self.mixer, "mixer_args": self.mixer_args})
        return {value for _, value in named if isinstance(value, str) and ":" in value}

    def mixer_of(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Return the name and the keyword arguments of the time mixer of block `layer`, counted from 0."""
        if isinstance(self.mixer, str):
            return self.mixer, self.mixer_args | {name: at[layer] for name, at in self.layer_args.items()}
        name = self.mixer[layer % len(self.mixer)]
        return name, self.mixer_args.get(name, {})

    def width_of(self, layer: int) -> int:
        """Return the width of block `layer`, counted from 0."""
        return self.d_model

    @property
    def channel_mixing_pattern(self) -> tuple[ChannelMixing, ...]:
        """Names of the channel mixings that repeat over depth."""
        return self.channel_mixing if isinstance(self.channel_mixing, tuple) else (self.channel_mixing,)

    def channel_mixing_of(self, layer: int) -> ChannelMixing:
        """Return the name of the channel mixing of block `layer`, counted from 0."""
        return self.channel_mixing_pattern[layer % len(self.channel_mixing_pattern)]

    def norm_position_of(self, layer: int) -> NormPosition:
        """Return the position of the norms of block `layer`, counted from 0."""
        if isinstance(self.norm_position, tuple):
            return self.norm_position[layer % len(self.norm_position)]
        return self.norm_position


def check_sizes(config: StackConfig, *names: str) -> None:
    """Refuse sizes below 1, and sizes above `LIMITS` or `WIDEST`; a size of None is not checked."""
    for name in names:
        at_least(1, most=LIMITS.get(name, WIDEST), **{name: getattr(config, name)}, or_none=True)


MemoryKind: TypeAlias = Literal[
    "none",
    "recurrent_memory",
    "enhanced_recurrence",
    "memformer",
    "temporal_latent_bottleneck",
    "token_turing_machine",
]
MemoryUpdate: TypeAlias = Literal["gru", "normalised"]

# arguments of a kind of memory beside those of all kinds
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "recurrent_memory": ("n_tokens", "form", "detach"),
    "enhanced_recurrence": (),
    "memformer": ("n_tokens", "form", "detach", "n_heads", "update", "n_updates", "temperature"),
    "temporal_latent_bottleneck": ("n_tokens", "form", "detach", "n_heads", "read_every"),
    "token_turing_machine": ("n_tokens", "form", "detach", "n_read"),
}


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Configuration of a memory that passes from segment to segment across a whole stack.

    Args:
        kind: "none"; "recurrent_memory", the tokens of Recurrent Memory Transformer; "enhanced_recurrence",
            ERNIE-Doc's memories of `transformer_xl` mixers, which hold outputs of the blocks; "memformer",
            the slots of Memformer; "temporal_latent_bottleneck", the slow stream of that paper; or
            "token_turing_machine", the summaries of that paper. Lengths and `detach` of "enhanced_recurrence"
            are the mixers' own.
        segment_length: steps of a segment, without memory tokens; with "enhanced_recurrence" the mixers'
            `segment_length`.
        n_tokens: memory tokens, slots, or vectors of the slow stream.
        form: "decoder", whose stack is causal; or "encoder", whose stack sees the whole segment. Recurrent
            memory tokens stand before and after a segment in a decoder, and before it in an encoder.
        detach: where gradients through the memory stop: "never"; "segment", at every boundary; or a number n,
            at every n-th boundary.
        n_heads: heads of the attention to slots and of slots. None is the largest number that divides
            `d_model` and leaves at least 64 channels to each head, or 1.
        update: how Memformer's slots change: "gru", by a GRU and an FFN; or "normalised", by a bias and a
            division by the slot's length.
        n_updates: how often Memformer's slots change after a segment, with the same weights.
        temperature: a divisor of the scores of Memformer's slots.
        read_every: r of Temporal Latent Bottleneck, whose blocks 0, r, 2 r and so on read the slow stream.
        n_read: tokens that a Token Turing Machine reads from its memory before a segment, in a decoder.
        recompute: whether to run each segment again in the backward pass, so that training stores the states
            between segments instead of the activations (Memformer's memory replay back-propagation).

    Raises:
        ValueError: an unknown name, a number out of range, or an argument that `kind` does not have.

    Example:
        >>> MemoryConfig(kind="recurrent_memory", segment_length=150).n_tokens
        10
    """

    kind: MemoryKind = "none"
    segment_length: int = 512
    n_tokens: int = 10
    form: Literal["decoder", "encoder"] = "decoder"
    detach: Detach = "never"
    n_heads: int | None = None
    update: MemoryUpdate = "gru"
    n_updates: int = 1
    temperature: float = 1.0
    read_every: int = 1
    n_read: int = 8
    recompute: bool = False

    def __post_init__(self) -> None:
        choice(MemoryKind, kind=self.kind)
        choice(("decoder", "encoder"), form=self.form)
        choice(MemoryUpdate, update=self.update)
        at_least(1, segment_length=self.segment_length, n_tokens=self.n_tokens)
        at_least(1, read_every=self.read_every, n_read=self.n_read)
        at_least(1, n_heads=self.n_heads, or_none=True)
        at_least(1, most=COUNT, n_updates=self.n_updates)
        positive(temperature=self.temperature)
        check_detach(self.detach)
        unused = [] if self.kind == "none" else self.fields_of("none") - self.fields_of(self.kind)
        for argument in fields(self):
            require(
                argument.name not in unused or getattr(self, argument.name) == argument.default,
                f"`memory.{argument.name}` must be {argument.default!r} with `memory.kind` = {self.kind!r}; "
                f"got {getattr(self, argument.name)!r}. The memory does not have this argument.",
            )

    @classmethod
    def fields_of(cls, kind: str) -> set[str]:
        """Return the names of the arguments that a kind of memory has; for "none", of all kinds."""
        names = {argument.name for argument in fields(cls)}
        return names if kind == "none" else names & {"kind", "segment_length", "recompute", *ARGUMENTS[kind]}


@dataclass(frozen=True)
class ModelConfig(StackConfig):
    """Configuration of a `LanguageModel`; all values are plain, so that it can be written to a file.

    Args:
        vocab_size: number of input tokens; ids are 0 to `vocab_size` - 1.
        n_outputs: logits per step; None means `vocab_size`.
        tie_embeddings: whether the head shares its weight with the embedding.
        embedding_norm: whether the embedding is normalised, as in RWKV.
        embedding_scale: factor on the embedding; None omits it. RecurrentGemma, whose head shares the
            embedding's weight, uses sqrt(d_model).
        head_bias: whether the head has a bias; None means only if `tie_embeddings` is false.
        logit_cap: None, or a cap > 0: the logits are cap tanh(logits / cap).
        memory: a memory across the stack; see `MemoryConfig`, whose fields may also come as a dict.
        pool: SaShiMi's pooled stack: steps that one step of each lower rate stands for, as in (4, 4) for
            tiers at full rate, a fourth and a sixteenth of it. () is one tier. The blocks are divided equally
            among the tiers, and the first blocks are those of the lowest rate.
        pool_expansion: factor on the width, also of the channel mixing, from a tier to the next lower rate.

    The other arguments are keyword arguments of `StackConfig`.

    Raises:
        ValueError: a value that `StackConfig` or `MemoryConfig` refuses, a number out of range,
            `tie_embeddings` with `n_outputs` different from `vocab_size`, or a `pool` with a memory, or with
            blocks that its tiers do not divide.
        TypeError: a pattern contains an entry that is not a string.

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
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    pool: tuple[int, ...] = ()
    pool_expansion: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.memory, dict):
            # JSON stores it as an object
            object.__setattr__(self, "memory", MemoryConfig(**self.memory))
        check_sizes(self, "vocab_size")
        if self.n_outputs is not None and self.n_outputs < 1:
            raise ValueError(
                f"`n_outputs` must be at least 1, or None for `vocab_size`; got {self.n_outputs}."
            )
        check_sizes(self, "n_outputs")
        if self.embedding_scale is not None and not 0 < self.embedding_scale < math.inf:
            raise ValueError(f"`embedding_scale` must be above 0, or None; got {self.embedding_scale}.")
        if self.logit_cap is not None and not 0 < self.logit_cap < math.inf:
            raise ValueError(f"`logit_cap` must be above 0, or None; got {self.logit_cap}.")
        if self.tie_embeddings and self.n_outputs not in (None, self.vocab_size):
            raise ValueError(
                f"`tie_embeddings` needs as many outputs as tokens: `vocab_size` = {self.vocab_size}; "
                f"got `n_outputs` = {self.n_outputs}. Untie them or leave `n_outputs` at None."
            )
        # JSON stores tuples as lists
        object.__setattr__(self, "pool", tuple(self.pool))
        for size in self.pool:
            at_least(2, most=WIDEST, pool=size)
        at_least(1, most=WIDEST, pool_expansion=self.pool_expansion)
        tiers = len(self.pool) + 1
        require(
            self.n_layers % tiers == 0,
            f"`n_layers` must be a multiple of {tiers}, the tiers of `pool` = {self.pool}; got "
            f"{self.n_layers}. Each tier has as many blocks.",
        )
        require(
            not (self.reversible and self.pool),
            f"`reversible` must be False with `pool` = {self.pool}, whose blocks have one stream; got True. "
            "Leave it out.",
        )
        require(
            not self.pool or self.memory.kind == "none",
            f"`pool` must be () with `memory.kind` = {self.memory.kind!r}, which has its own segments; got "
            f"{self.pool}. Leave out one of them.",
        )

    def width_of(self, layer: int) -> int:
        """Return the width of block `layer`, counted from 0."""
        tier = len(self.pool) - layer * (len(self.pool) + 1) // self.n_layers
        return self.d_model * self.pool_expansion**tier


def mixer_parameters(mixer: str) -> dict[str, inspect.Parameter]:
    """Return the keyword-only arguments of a mixer, which are its configuration.

    Args:
        mixer: the mixer's name.
    """
    signature = inspect.signature(mixers.get(mixer), eval_str=True)
    return {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}


def complete_mixer_args(mixer: str | tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments and the mixer's defaults, in the order of the mixer's signature.

    Args:
        mixer: the mixer's name, or a pattern of names.
        given: the mixer's arguments; for a pattern, the arguments of each mixer under its name.
    """
    if not isinstance(mixer, str):
        return {name: complete_mixer_args(name, given.get(name, {})) for name in dict.fromkeys(mixer)}
    parameters = mixer_parameters(mixer)
    for name in given:
        if name not in parameters:
            raise unknown_argument(f"mixer {mixer!r}", name, parameters)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return {
        name: given[name] if name in given else defaults[name]
        for name in parameters
        if name in {*given, *defaults}
    }


def _settled(field: str, names: str | Sequence[str], n_layers: int) -> str | tuple[str, ...]:
    """Return the name that all layers use, or a tuple of two or more names that repeats over the layers."""
    if isinstance(names, str):
        return names
    # JSON stores tuples as lists
    pattern = tuple(names)
    for name in pattern:
        if not isinstance(name, str):
            raise TypeError(
                f"`{field}` must be a name or a tuple of names; got {str(name)[:80]!r}. Pass strings."
            )
    if not 1 <= len(pattern) <= n_layers:
        raise ValueError(
            f"`{field}` must be a pattern of 1 to {n_layers} names, since `n_layers` = {n_layers}; got "
            f"{len(pattern)}. Pass a shorter pattern, or as many layers as the pattern has names."
        )
    folded = tuple(name.replace("-", "_") for name in pattern)
    return folded if len(folded) > 1 else folded[0]


def spelled(pattern: Sequence[str]) -> str:
    """Return a pattern as a string; three or more equal names in a row are abbreviated by their number."""
    runs = [(name, len(list(run))) for name, run in itertools.groupby(pattern)]
    return " ".join(f"{n} x {name}" if n > 2 else " ".join([name] * n) for name, n in runs)


def _arguments_by_name(pattern: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of each mixer of a pattern of canonical names."""
    names, found = list(dict.fromkeys(pattern)), {}
    for name, arguments in given.items():
        if not isinstance(arguments, Mapping):
            raise ValueError(
                f"`mixer_args` must have the arguments of each mixer of {tuple(pattern)} under its name; got "
                f"{name!r}. For example, pass {{{names[-1]!r}: {{{name!r}: {arguments!r}}}}}."
            )
        mixer = canonical(name)
        if mixer not in names:
            raise unknown(f"mixer of {tuple(pattern)} to take the `mixer_args` of", name, names)
        found[mixer] = dict(arguments)
    return found
