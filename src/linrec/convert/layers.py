"""Layouts of layers that several architectures of transformers share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.convert.checkpoint import ANY, ConversionError, Options
from linrec.convert.layout import TAPS, Change, Piece, pairs, same
from linrec.models import ModelConfig

__all__ = [
    "attention",
    "attention_arguments",
    "check_dense",
    "layer_types",
    "linear",
    "multiplier",
    "positive",
    "rotary",
    "rotary_table",
    "stacked_taps",
    "swiglu",
    "turned",
    "vocabulary",
    "whole_rotary",
]

# names of projections and norms in most models of transformers, by names in linrec
SWIGLU = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
QK_NORMS = {"q": "q_norm", "k": "k_norm"}


def attention_arguments(options: Options, d_model: int) -> dict[str, Any]:
    """Return the arguments of attention, without positions."""
    n_heads = positive(options, "num_attention_heads")
    return {
        "n_heads": n_heads,
        "d_head": options.read("head_dim", int, d_model // n_heads),
        "kv_heads": options.read("num_key_value_heads", int, n_heads),
        "bias": options.read("attention_bias", bool, False),
        "dropout": options.read("attention_dropout", float, 0.0),
    }


def rotary(options: Options, fraction: float = 1.0) -> dict[str, Any]:
    """Return the arguments of attention for rotary positions of which a share of the channels turn.

    Args:
        options: the options; checkpoints before 2026 name the table `rope_scaling`, and have `rope_theta`
            outside of it.
        fraction: share of the channels that turn, unless the table has another.
    """
    share = rotary_table(options).read("partial_rotary_factor", float, fraction)
    return whole_rotary(options) | {"rotary_fraction": share}


def whole_rotary(options: Options, *, refuse_share: bool = False) -> dict[str, Any]:
    """Return the arguments of attention for rotary positions of which all channels turn.

    Args:
        options: as for `rotary`.
        refuse_share: whether a share of the channels that turn is refused; transformers ignores it.
    """
    named = rotary_table(options)
    if refuse_share:
        for table in (named, options):
            table.supported("partial_rotary_factor", (1.0, None))
    return {"rotary_base": named.read("rope_theta", float, options.read("rope_theta", float, 10_000.0))}


def rotary_table(options: Options) -> Options:
    """Return the options of rotary positions, which must not be scaled."""
    # as in released code, an empty `rope_scaling` counts as missing
    values = options.read("rope_scaling", dict, {}) or options.read("rope_parameters", dict, {})
    table = Options(values, options.path)
    for name in ("rope_type", "type"):
        table.supported(name, ("default",), "default")
    for name, value in values.items():
        if isinstance(value, dict):
            raise ConversionError(
                f"{options.path}: `rope_parameters` has a table {name!r}; linrec supports only one table "
                "for all layers."
            )
    return table


def layer_types(options: Options, names: Mapping[str, str], default: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the mixers from the option `layer_types`.

    Args:
        options: the options.
        names: name of the mixer by type of layer.
        default: types of all layers if the option is missing.
    """
    types = options.read("layer_types", list, list(default) or None)
    n_layers = options.read("num_hidden_layers", int)
    if len(types) != n_layers or not set(types) <= names.keys():
        raise ConversionError(
            f"{options.path}: `layer_types` must be {n_layers} of {', '.join(map(repr, names))}; "
            f"got {str(types)[:80]}."
        )
    return tuple(names[kind] for kind in types)


def positive(options: Options, name: str, default: int | None = None) -> int:
    """Return an option that counts something."""
    count = options.read(name, int, default)
    if count < 1:
        raise ConversionError(f"{options.path}: `{name}` must be at least 1; got {count}.")
    return count


def check_dense(options: Options, name: str, experts: int, *, most: int = 1) -> None:
    """Refuse a model with experts.

    Args:
        options: the options.
        name: name of the option that counts experts.
        experts: its value.
        most: the largest number that stands for a dense model.
    """
    if experts > most:
        raise ConversionError(f"{options.path}: `{name}` is {experts}; linrec has no mixtures of experts.")


def multiplier(options: Options, name: str) -> float:
    """Return an option that multiplies or divides; 1 if it is missing."""
    factor = options.read(name, float, 1.0)
    if not factor > 0:
        raise ConversionError(f"{options.path}: `{name}` must be above 0; got {factor}.")
    return factor


def vocabulary(
    config: ModelConfig,
    embedding: str = "model.embed_tokens.weight",
    head: str = "lm_head.weight",
    *,
    older: str = "",
) -> Iterator[Piece]:
    """Yield the pieces of the embedding and of the head, which may be tied.

    Args:
        config: configuration of the model.
        embedding: name of the embedding's weight in the checkpoint.
        head: name of the head's weight, which some checkpoints store though it is tied.
        older: another name of the embedding's weight.
    """
    size = config.vocab_size, config.d_model
    table = same(embedding, "embedding.weight", *size, older=older)
    if not config.tie_embeddings:
        yield table
        yield same(head, "head.weight", *size)
        return
    yield table._replace(
        ours=["embedding.weight", "head.weight"], read=lambda tensors: [tensors[0]] * 2, copies=[head]
    )


def swiglu(config: ModelConfig, names: Mapping[str, str] = SWIGLU) -> Iterator[Piece]:
    """Yield the pieces of a gated unit, or of a unit without gate.

    Args:
        config: configuration of the model.
        names: names of the projections in the checkpoint, by names in the model.
    """
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    for ours, theirs in names.items():
        sizes = (d_model, d_hidden) if ours == "down" else (d_hidden, d_model)
        yield from linear(theirs, ours, *sizes, bias=config.channel_mixing_bias)


def linear(
    theirs: str, ours: str, outputs: int, inputs: int, *, bias: bool = False, changes: Sequence[Change] = ()
) -> Iterator[Piece]:
    """Yield the pieces of a linear layer; the changes apply to the rows of its weight and to its bias."""
    yield same(f"{theirs}.weight", f"{ours}.weight", outputs, inputs, changes=changes)
    if bias:
        yield same(f"{theirs}.bias", f"{ours}.bias", outputs, changes=changes)


def stacked_taps(widths: Mapping[str, int], size: int, *, uneven: bool = False) -> Piece:
    """Return the piece of the taps of several tensors' short convolutions.

    Args:
        widths: number of channels by name of the tensor, in linrec's order.
        size: number of taps.
        uneven: whether a checkpoint may cut the channels at other places.
    """

    def read(tensors: Sequence[Tensor]) -> list[Tensor]:
        taps = TAPS.read(torch.cat([*tensors]))
        if len(taps) != sum(widths.values()):
            raise ConversionError(
                f"the convolutions {', '.join(shapes)} must have {sum(widths.values())} channels in all by "
                f"config.json; got {len(taps)}."
            )
        return [taps]

    shapes = {f"{name}_conv1d.weight": (ANY if uneven else n, 1, size) for name, n in widths.items()}
    return Piece(shapes, ["conv.weight"], read, lambda taps: TAPS.write(taps[0]).split([*widths.values()]))


def attention(
    config: ModelConfig,
    layer: int,
    *,
    names: Mapping[str, str] = ATTENTION,
    norms: Mapping[str, str] = QK_NORMS,
    norm_changes: Sequence[Change] = (),
) -> Iterator[Piece]:
    """Yield the pieces of an attention layer of transformers, whose rotary pairs are half a head apart.

    Args:
        config: configuration of the model.
        layer: index of the block, counted from 0; its mixer is `linrec.mixers.attention`.
        names: names of the projections in the checkpoint, by names in the model; a name that is missing here
            has no pieces.
        norms: names of the norms of queries and keys.
        norm_changes: changes of the norms' weights.
    """
    _, arguments = config.mixer_of(layer)
    d_model, n_heads = config.d_model, arguments["n_heads"]
    d_head, kv_heads = arguments.get("d_head", d_model // n_heads), arguments.get("kv_heads", n_heads)
    bias, qk_norm = arguments.get("bias", False), arguments.get("qk_norm", "none")
    biases = {"out": arguments.get("output_bias", bias)}
    channels = turned(d_head, arguments)
    for name, theirs in names.items():
        heads = kv_heads if name in "kv" else n_heads
        sizes = (d_model, heads * d_head) if name == "out" else (heads * d_head, d_model)
        turns = (pairs(heads, channels),) if name in "qk" and channels else ()
        yield from linear(theirs, name, *sizes, bias=biases.get(name, bias), changes=turns)
    if qk_norm == "none":
        return
    for name, heads in {"q": n_heads, "k": kv_heads}.items():
        heads = 1 if qk_norm == "head" else heads
        turns = (pairs(heads, channels),) if channels else ()
        yield same(
            f"{norms[name]}.weight", f"{name}_norm.weight", heads * d_head, changes=(*turns, *norm_changes)
        )


def turned(d_head: int, arguments: Mapping[str, Any]) -> int:
    """Return the number of channels of a head that turn.

    Args:
        d_head: channels of a head.
        arguments: arguments of attention.
    """
    if arguments.get("positions", "rotary") != "rotary":
        return 0
    channels = int(d_head * arguments.get("rotary_fraction", 1.0))
    if channels % 2:
        raise ConversionError(
            f"rotary positions need an even number of channels; `head_dim` = {d_head} and "
            f"`partial_rotary_factor` in config.json give {channels}."
        )
    return channels
