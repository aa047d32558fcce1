"""Mamba and Mamba-2 as their authors publish them: `MambaLMHeadModel` of state-spaces/mamba.

Its config.json has no `model_type`; it is recognised by `ssm_cfg`, the arguments of the layers. Missing
arguments take the defaults of that code, and the eps of the norms is a constant there. `residual_in_fp32`,
`fused_add_norm` and `chunk_size` affect precision and speed only; `dt_min`, `A_init_range` and similar
options affect initialisation only.
"""

import math
from collections.abc import Iterator
from typing import Any

from linrec.convert import mamba, mamba2
from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import vocabulary
from linrec.convert.layout import Part, Piece, rows, same, within
from linrec.errors import unknown_argument
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

# arguments of the layers: shared by both, specific to each, and without effect on the output
BOTH = {"layer", "d_state", "d_conv", "expand", "conv_bias", "bias"}
ALONE = {
    "Mamba1": {"dt_rank"},
    "Mamba2": {"headdim", "d_ssm", "ngroups", "D_has_hdim", "rmsnorm", "norm_before_gate", "dt_limit"},
}
IDLE = {
    "Mamba1": {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path"},
    "Mamba2": {
        *("dt_min", "dt_max", "dt_init_floor", "A_init_range", "conv_init"),
        *("chunk_size", "use_mem_eff_path", "sequence_parallel"),
    },
}
NORM_EPS = 1e-5
# the hidden width of the channel mixing is rounded up to a multiple of this
MULTIPLE = 128


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("attn_layer_idx", ([], None))
    d_model, given = options.read("d_model", int), options.read("ssm_cfg", dict)
    # "auto" is the default of `dt_rank`
    given = {name: value for name, value in given.items() if value != "auto"}
    layer = Options(given, f"{options.path}, `ssm_cfg`")
    kind = layer.supported("layer", ("Mamba1", "Mamba2"), "Mamba1")
    known = sorted(BOTH | ALONE[kind] | IDLE[kind])
    for name in given:
        if name not in known:
            raise ConversionError(f"{layer.path}: {unknown_argument(kind, name, known)}")
    multiple = options.read("pad_vocab_size_multiple", int, 8)
    d_hidden = options.read("d_intermediate", int, 0)
    return ModelConfig(
        vocab_size=_up_to(multiple, options.read("vocab_size", int)),
        d_model=d_model,
        n_layers=options.read("n_layer", int),
        mixer={"Mamba1": "mamba", "Mamba2": "mamba2"}[kind],
        mixer_args=_arguments(layer, kind, d_model),
        # without channel mixing the width is unused, but must be valid
        d_channel_mixing=_up_to(MULTIPLE, max(d_hidden, 1)),
        channel_mixing="swiglu" if d_hidden > 0 else "none",
        channel_mixing_bias=False,
        norm="rms" if options.read("rms_norm", bool, True) else "layer",
        norm_eps=NORM_EPS,
        tie_embeddings=options.read("tie_embeddings", bool, True),
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    mixer = mamba2.mixer if config.mixer == "mamba2" else mamba.mixer
    yield from vocabulary(config, "backbone.embedding.weight", older="backbone.embeddings.weight")
    yield from _norm("backbone.norm_f", "norm", config)
    for layer in range(config.n_layers):
        theirs, ours = f"backbone.layers.{layer}.", f"blocks.{layer}."
        yield from _norm(f"{theirs}norm", f"{ours}mixer_norm", config)
        pieces = mixer(d_model, **config.mixer_args)
        yield from within(f"{theirs}mixer.", f"{ours}mixer.", pieces)
        if config.channel_mixing != "none":
            yield from _norm(f"{theirs}norm2", f"{ours}channel_mixing_norm", config)
            # a SwiGLU whose first matrix stacks the rows of the value and of the gate
            first = [Part("up.weight", d_hidden), Part("gate.weight", d_hidden)]
            unit = [rows("fc1.weight", first, d_model), same("fc2.weight", "down.weight", d_model, d_hidden)]
            yield from within(f"{theirs}mlp.", f"{ours}channel_mixing.", unit)


def _arguments(layer: Options, kind: str, d_model: int) -> dict[str, Any]:
    """Return the arguments of the mixer."""
    found: dict[str, Any] = {
        "expand": layer.read("expand", int, 2),
        "conv_size": layer.read("d_conv", int, 4),
        "conv_bias": layer.read("conv_bias", bool, True),
        "bias": layer.read("bias", bool, False),
    }
    if kind == "Mamba1":
        rank = layer.read("dt_rank", int, math.ceil(d_model / 16))
        return found | {"d_state": layer.read("d_state", int, 16), "dt_rank": rank}
    d_inner, d_head = found["expand"] * d_model, layer.read("headdim", int, 64)
    # a smaller `d_ssm` would give the remaining channels to a gated unit within the layer
    layer.supported("d_ssm", (d_inner, None))
    if d_head < 1 or d_inner % d_head:
        raise ConversionError(f"{layer.path}: `headdim` must be a divisor of {d_inner}; got {d_head}.")
    return found | {
        "n_heads": d_inner // d_head,
        "d_state": layer.read("d_state", int, 128),
        "n_groups": layer.read("ngroups", int, 1),
        "D": "channel" if layer.read("D_has_hdim", bool, False) else "head",
        "output_norm": "rms" if layer.read("rmsnorm", bool, True) else "none",
        "norm_before_gate": layer.read("norm_before_gate", bool, False),
        "dt_limit": mamba2.dt_limit(layer, "dt_limit", [0.0, math.inf]),
    }


def _norm(theirs: str, ours: str, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of a norm, which has a bias if it is layer normalisation."""
    yield same(f"{theirs}.weight", f"{ours}.weight", config.d_model)
    if config.norm == "layer":
        yield same(f"{theirs}.bias", f"{ours}.bias", config.d_model)


def _up_to(multiple: int, number: int) -> int:
    """Return `number` rounded up to a multiple."""
    return math.ceil(number / multiple) * multiple
