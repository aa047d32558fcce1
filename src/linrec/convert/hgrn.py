"""HGRN, as in `HGRNForCausalLM` of flash-linear-attention: real, with a norm before the gate."""

from collections.abc import Iterator

from linrec.convert.checkpoint import Options
from linrec.convert.flash_linear_attention import config_of, layout_of
from linrec.convert.layers import linear, stacked_taps
from linrec.convert.layout import Piece, same
from linrec.models import ModelConfig

__all__ = ["config", "layout", "lower_bounds"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("elementwise_affine", (True,), True)
    short = options.read("use_short_conv", bool, False)
    arguments = {
        "d_state": int(options.read("hidden_size", int) * options.read("expand_ratio", float, 1.0)),
        "lower_bound": "increasing" if options.read("use_lower_bound", bool, True) else 0.0,
        "conv_size": options.read("conv_size", int) if short else None,
        "output_gate": "silu",
        "gate_before_norm": False,
        "output_norm": "rms",
        "norm_eps": options.read("norm_eps", float),
        "phase": "none",
        "complex_input": False,
        "bias": False,
    }
    return config_of(options, "hgru", arguments)


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    yield from layout_of(options, config, _mixer)
    yield from lower_bounds(config)


def lower_bounds(config: ModelConfig) -> Iterator[Piece]:
    """Yield the piece of the lower bounds, which all layers share."""
    if config.mixer_args["lower_bound"] == "increasing":
        yield Piece(
            {"model.lower_bounds": (config.n_layers, config.d_model)},
            [f"blocks.{layer}.mixer.bounds.gamma" for layer in range(config.n_layers)],
            lambda tensors: [tensors[0]] * config.n_layers,
            lambda tensors: [tensors[0]],
        )


def _mixer(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one layer's mixer."""
    d_model, d_state = config.d_model, config.mixer_args["d_state"]
    for ours, theirs in (("c", "i"), ("mu", "f"), ("gate", "g")):
        yield from linear(f"{theirs}_proj", ours, d_state, d_model)
    if config.mixer_args["conv_size"] is not None:
        yield stacked_taps(dict.fromkeys("if", d_state), config.mixer_args["conv_size"])
    yield same("g_norm.weight", "norm.weight", d_state)
    yield from linear("o_proj", "out", d_model, d_state)
