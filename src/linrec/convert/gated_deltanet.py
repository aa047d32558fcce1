"""Gated DeltaNet, as in `GatedDeltaNetForCausalLM` of flash-linear-attention.

The released layer divides q by the square root of its number of channels. The norm undoes the division up to
its eps, so `norm_eps` here is multiplied by the number of channels.
"""

from collections.abc import Iterator

from linrec.convert import delta_net
from linrec.convert.checkpoint import Options
from linrec.convert.flash_linear_attention import config_of, layout_of
from linrec.convert.layers import linear
from linrec.convert.layout import Piece, same
from linrec.models import ModelConfig

__all__ = ["config", "layout"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    d_head, qk_heads = options.read("head_dim", int), options.read("num_heads", int)
    n_heads = options.read("num_v_heads", int, qk_heads)
    arguments = {
        "n_heads": n_heads,
        "qk_heads": qk_heads,
        "d_qk": qk_heads * d_head,
        "d_v": n_heads * int(d_head * options.read("expand_v", float)),
        "qk_eps": delta_net.QK_EPS,
        "beta": "double_sigmoid" if options.read("allow_neg_eigval", bool, False) else "sigmoid",
        "conv_size": options.read("conv_size", int) if options.read("use_short_conv", bool, True) else None,
        "norm_eps": options.read("norm_eps", float) * d_head,
        "output_gate": options.read("use_gate", bool, True),
    }
    return config_of(options, "gated_delta_net", arguments)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    return layout_of(options, config, _mixer)


def _mixer(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's mixer."""
    n_heads = config.mixer_args["n_heads"]
    yield from delta_net.mixer(options, config)
    yield from linear("a_proj", "alpha", n_heads, config.d_model)
    yield same("A_log", "A_log", n_heads)
    yield same("dt_bias", "dt_bias", n_heads)
