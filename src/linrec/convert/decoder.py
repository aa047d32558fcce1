"""The models of transformers with RMSNorm, SwiGLU, and mixers that alternate over depth."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from linrec.convert.checkpoint import Options
from linrec.convert.layers import vocabulary
from linrec.convert.layout import Change, Piece, same, within
from linrec.models import ModelConfig

__all__ = ["Names", "config_of", "layout_of"]


class Names(NamedTuple):
    """Names in the checkpoint.

    Attributes:
        mixer_norm: norm before the mixer.
        channel_mixing_norm: norm before the channel mixing.
        channel_mixing: the channel mixing.
        norm: norm before the head.
        embedding: the embedding.
        embedding_norm: norm of the embedding, in the first layer, for models that have this norm.
    """

    mixer_norm: str = "input_layernorm"
    channel_mixing_norm: str = "post_attention_layernorm"
    channel_mixing: str = "mlp"
    norm: str = "norm"
    embedding: str = "embed_tokens"
    embedding_norm: str = ""


NAMES = Names()


def config_of(
    options: Options, mixer: str | tuple[str, ...], arguments: Mapping[str, Any], **fields: Any
) -> ModelConfig:
    """Return the configuration of a model.

    Args:
        options: the options.
        mixer: name of the mixer, or a name for each layer.
        arguments: arguments of the mixer, or of each mixer by name.
        fields: further fields of `ModelConfig`, in place of those that most checkpoints have.
    """
    if isinstance(mixer, tuple):
        # `ModelConfig` refuses arguments of a mixer that no layer has
        arguments = {name: arguments[name] for name in mixer}
    if "d_channel_mixing" not in fields:
        fields["d_channel_mixing"] = options.read("intermediate_size", int)
    if "norm_eps" not in fields:
        fields["norm_eps"] = options.read("rms_norm_eps", float)
    if "tie_embeddings" not in fields:
        fields["tie_embeddings"] = options.read("tie_word_embeddings", bool, False)
    usual: dict[str, Any] = {"channel_mixing": "swiglu", "channel_mixing_bias": False, "norm": "rms"}
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=options.read("hidden_size", int),
        n_layers=options.read("num_hidden_layers", int),
        mixer=mixer,
        mixer_args=dict(arguments),
        head_bias=False,
        **usual | fields,
    )


def layout_of(
    config: ModelConfig,
    mixer: Callable[[int], tuple[str, Iterable[Piece]]],
    channel_mixing: Callable[[ModelConfig], Iterable[Piece]],
    names: Names = NAMES,
    *,
    norm_changes: Sequence[Change] = (),
) -> Iterator[Piece]:
    """Yield the pieces of a model.

    Args:
        config: configuration of the model.
        mixer: returns the prefix of the mixer of a layer in the checkpoint, such as "self_attn.", and its
            pieces.
        channel_mixing: returns the pieces of a layer's channel mixing.
        names: names in the checkpoint.
        norm_changes: changes of the weights of all norms.
    """
    yield from vocabulary(config, f"model.{names.embedding}.weight")
    norms = {f"model.{names.norm}": "norm"}
    if config.embedding_norm:
        norms[f"model.layers.0.{names.embedding_norm}"] = "embedding_norm"
    for layer in range(config.n_layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        norms[theirs + names.mixer_norm] = ours + "mixer_norm"
        norms[theirs + names.channel_mixing_norm] = ours + "channel_mixing_norm"
        place, pieces = mixer(layer)
        yield from within(theirs + place, f"{ours}mixer.", pieces)
        unit = channel_mixing(config)
        yield from within(f"{theirs}{names.channel_mixing}.", f"{ours}channel_mixing.", unit)
    for place, norm in norms.items():
        for part in ("weight", "bias") if config.norm == "layer" else ("weight",):
            yield same(f"{place}.{part}", f"{norm}.{part}", config.d_model, changes=norm_changes)
