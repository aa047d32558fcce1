"""HGRN2, as in `HGRN2ForCausalLM` of flash-linear-attention.

The released layer divides its queries by the square root of their number of channels. The norm undoes the
division up to its eps, which is 1e-5 regardless of config.json.
"""

from collections.abc import Iterator

from linrec.convert.checkpoint import Options
from linrec.convert.flash_linear_attention import config_of, layout_of
from linrec.convert.hgrn import lower_bounds
from linrec.convert.layers import linear, stacked_taps
from linrec.convert.layout import Piece, same
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

EPS = 1e-5


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("elementwise_affine", (True,), True)
    d_model = options.read("hidden_size", int)
    # config.json has one of the two, and the other follows from it
    ratio = options.read("expand_ratio", int, 0)
    n_heads = d_model // ratio if ratio else options.read("num_heads", int)
    short = options.read("use_short_conv", bool, False)
    arguments = {
        "n_heads": n_heads,
        "lower_bound": "increasing" if options.read("use_lower_bound", bool, True) else 0.0,
        "input_activation": "none",
        "output_gate": "silu",
        "conv_size": options.read("conv_size", int) if short else None,
        "output_norm": "rms",
        "norm_eps": EPS * (d_model // n_heads),
        "bias": False,
    }
    return config_of(options, "hgrn2", arguments)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    yield from layout_of(options, config, _mixer)
    yield from lower_bounds(config)


def _mixer(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's mixer."""
    d_model = config.d_model
    for ours, theirs in (("o", "q"), ("g", "f"), ("i", "i"), ("out", "o")):
        yield from linear(f"{theirs}_proj", ours, d_model, d_model)
    if config.mixer_args["conv_size"] is not None:
        yield stacked_taps(dict.fromkeys("qfi", d_model), config.mixer_args["conv_size"])
    yield same("g_norm.weight", "norm.weight", d_model)
