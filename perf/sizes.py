"""Language models of one size, which differ in their mixers alone, of linrec and flash-linear-attention."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from linrec.models import ModelConfig, preset
from perf.command import check_names
from perf.timing import UnsuitedError

# GateLoop's language model as its preset reads it: with an output gate and a projection, as HGRN has
MIXER_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {"gate_loop": preset("wikitext103").mixer_args}
"""Arguments with which a mixer is compared, where they differ from its defaults."""

FLA_PACKAGES = ("flash-linear-attention", "fla-core", "transformers")


@dataclass(frozen=True)
class Size:
    """Shape of a language model. Its name counts the parameters of the Transformer of that shape."""

    d_model: int
    n_layers: int
    d_channel_mixing: int
    vocab_size: int = 32_000


SIZES: Mapping[str, Size] = {
    "10M": Size(d_model=256, n_layers=6, d_channel_mixing=704, vocab_size=10_000),
    "46M": Size(d_model=512, n_layers=6, d_channel_mixing=1408),
    "374M": Size(d_model=1024, n_layers=24, d_channel_mixing=2816),
}
# the size of --quick
QUICK = Size(d_model=64, n_layers=4, d_channel_mixing=64, vocab_size=32)


@dataclass(frozen=True)
class Model:
    """A mixer in pre-norm blocks with RMSNorm and SwiGLU.

    Args:
        mixer: name in `linrec.mixers`, or a pattern of names.
        arguments: arguments of the mixer, by the width of the model.
        channel_mixing: "swiglu", or "none" for mixers that are a whole block.
        fla: class of the configuration in `fla.models`, and its arguments beside the size; None where
            flash-linear-attention has no such model.
    """

    mixer: str | tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    channel_mixing: Literal["swiglu", "none"] = "swiglu"
    fla: tuple[str, Mapping[str, Any]] | None = None

    def config(self, size: Size) -> ModelConfig:
        alone = self.channel_mixing == "none"
        return ModelConfig(
            vocab_size=size.vocab_size,
            d_model=size.d_model,
            n_layers=size.n_layers * (2 if alone else 1),
            mixer=self.mixer,
            mixer_args=dict(self.arguments),
            channel_mixing=self.channel_mixing,
            d_channel_mixing=size.d_channel_mixing,
            channel_mixing_bias=False,
            norm="rms",
            head_bias=False,
        )


_LINREC_ONLY = (
    *("gate_loop", "hgru", "rg_lru", "hawk", "lru", "s5", "mlstm", "xlstm_7b", "rwkv5", "trans_normer"),
    "min_gru",
)
# a width of 1344 at d_model = 1024, in blocks of 48: products whose width is no multiple of 64 take longer
_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {"hawk": {"n_blocks": 28}}
_HGRN = {"output_gate": "silu", "gate_before_norm": False, "output_norm": "rms"}
MODELS: Mapping[str, Model] = {
    "transformer": Model("attention", {"n_heads": 16}),
    "gla": Model("gla", {"n_heads": 4, "output_norm": "rms"}, fla=("GLAConfig", {"num_heads": 4})),
    "delta_net": Model("delta_net", {"n_heads": 8}, fla=("DeltaNetConfig", {"num_heads": 8})),
    "gated_delta_net": Model(
        "gated_delta_net", {"n_heads": 3, "d_qk": 768}, fla=("GatedDeltaNetConfig", {"num_heads": 3})
    ),
    "retnet": Model("retnet", {"n_heads": 4, "output_norm": "rms"}, fla=("RetNetConfig", {"num_heads": 4})),
    "hgrn": Model("hgru", {**_HGRN, "phase": "none", "complex_input": False}, fla=("HGRNConfig", {})),
    "hgrn2": Model("hgrn2", {"n_heads": 8, "output_norm": "rms"}, fla=("HGRN2Config", {})),
    "linear_attention": Model(
        "linear_attention", {"n_heads": 4}, fla=("LinearAttentionConfig", {"num_heads": 4})
    ),
    "rwkv6": Model("rwkv6", fla=("RWKV6Config", {"num_heads": 16})),
    # whole blocks, of which a model has twice as many
    "mamba": Model("mamba", channel_mixing="none", fla=("MambaConfig", {})),
    "mamba2": Model("mamba2", channel_mixing="none", fla=("Mamba2Config", {})),
    "hybrid": Model(
        ("gla", "gla", "gla", "attention"),
        {"gla": {"n_heads": 4, "output_norm": "rms"}, "attention": {"n_heads": 16, "window": 512}},
    ),
    **{name: Model(name, _ARGUMENTS.get(name, {})) for name in _LINREC_ONLY},
}


def sized(names: tuple[str, ...], size: str) -> tuple[dict[str, Model], Size]:
    """Return models and a size by their names; "all" names every model."""
    names = tuple(MODELS) if names == ("all",) else names
    check_names("model", names, MODELS)
    check_names("size", [size], SIZES)
    return {name: MODELS[name] for name in names}, SIZES[size]


def fla_model(model: Model, size: Size, *, use_cache: bool = False) -> nn.Module:
    """Return flash-linear-attention's model of this size, with fused norms, units and loss."""
    if model.fla is None:
        raise UnsuitedError("has no such model")
    name, arguments = model.fla
    if name.startswith("Mamba") and importlib.util.find_spec("mamba_ssm") is None:
        # flash-linear-attention's layers have no kernels of their own for it
        raise UnsuitedError("needs the kernels of mamba-ssm")
    from fla import models
    from transformers import AutoModelForCausalLM

    config = model.config(size)
    configuration = getattr(models, name)(
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        intermediate_size=config.d_channel_mixing,
        vocab_size=config.vocab_size,
        fuse_cross_entropy=False,
        fuse_linear_cross_entropy=True,
        use_cache=use_cache,
        **arguments,
    )
    made: nn.Module = AutoModelForCausalLM.from_config(configuration)
    return made
