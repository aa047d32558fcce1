"""HGRN2, as `HGRN2ForCausalLM` of flash-linear-attention has it.

The layer divides its queries by the root of their channels, which the norm undoes but for the eps. That eps
is 1e-5 whatever config.json says.
"""

from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, convolution, weights_of
from linrec.convert.hgrn import lower_bounds
from linrec.models import ModelConfig

__all__ = ["config", "weights"]

EPS = 1e-5


def config(options: Options) -> ModelConfig:
    """The configuration of the model that config.json describes.

    Raises:
        ConversionError: an option that is missing or that linrec does not have.
    """
    options.supported("elementwise_affine", (True,), True)
    d_model = options.read("hidden_size", int)
    # without one of the two, the other says it
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


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of the model, of the checkpoint's tensors.

    Raises:
        ConversionError: a tensor that is missing or of another shape.
    """
    found = weights_of(tensors, config, _mixer)
    return found | lower_bounds(tensors, config, config.d_model)


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """The state_dict of one layer's mixer."""
    d_model = config.d_model
    found = {
        f"{ours}.weight": tensors.take(f"{prefix}{theirs}_proj.weight", d_model, d_model)
        for ours, theirs in (("o", "q"), ("g", "f"), ("i", "i"), ("out", "o"))
    }
    if config.mixer_args["conv_size"] is not None:
        widths = dict.fromkeys("qfi", d_model)
        found |= convolution(tensors, prefix, widths, config.mixer_args["conv_size"])
    return found | {"norm.weight": tensors.take(prefix + "g_norm.weight", d_model)}
