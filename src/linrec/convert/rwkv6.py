"""RWKV-6, as in `RWKV6ForCausalLM` of flash-linear-attention.

`linrec.convert.rwkv_lm` reads the layout of the RWKV authors.
"""

from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.flash_linear_attention import config_of, weights_of
from linrec.models import ModelConfig

__all__ = ["config", "weights"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    for name in ("expand_k", "expand_v"):
        options.supported(name, (1.0,))
    options.supported("hidden_act", ("sqrelu",), "sqrelu")
    for name in ("norm_first", "norm_bias"):
        options.supported(name, (True,), True)
    wide = int(options.read("hidden_size", int) * options.read("hidden_ratio", float, 3.5))
    arguments = {
        "n_heads": options.read("num_heads", int),
        "shift_rank": options.read("proj_low_rank_dim", int),
        "decay_rank": options.read("gate_low_rank_dim", int),
        "norm_eps": options.read("norm_eps", float),
    }
    return config_of(
        options,
        "rwkv6",
        arguments,
        channel_mixing="rwkv",
        # rounded up to a multiple of 32
        d_channel_mixing=options.read("intermediate_size", int, -(-wide // 32) * 32),
        norm="layer",
        embedding_norm=True,
    )


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    return weights_of(
        tensors,
        config,
        _mixer,
        channel_mixing=_channel_mixing,
        names=("ffn_norm", "ffn"),
        first_norm="pre_norm",
    )


def _mixer(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's mixer."""
    arguments, d_model = config.mixer_args, config.d_model
    rank, decay_rank, n_heads = (arguments[n] for n in ("shift_rank", "decay_rank", "n_heads"))
    A = tensors.take(prefix + "x_proj.0.linear.weight", 5 * rank, d_model).unflatten(0, (5, rank))
    B = tensors.take(prefix + "x_proj.2.weight", d_model, 5 * rank).unflatten(1, (5, rank))
    mu = tensors.take(prefix + "x_bias", 5, d_model)
    # linrec's order of the mixtures, as indices into the checkpoint's order
    order = ["rwkvg".index(z) for z in "rkvwg"]
    found = {
        "shift.mu_x": tensors.take(prefix + "x_proj.0.mu", d_model),
        **{f"shift.mu.{i}": mu[place] for i, place in enumerate(order)},
        "shift.A.weight": A[order].flatten(0, 1),
        "shift.B": B.permute(1, 2, 0)[order],
        "lambda_d": tensors.take(prefix + "w_proj.linear.lora.2.bias", d_model),
        "d.0.weight": tensors.take(prefix + "w_proj.linear.lora.0.weight", decay_rank, d_model),
        "d.2.weight": tensors.take(prefix + "w_proj.linear.lora.2.weight", d_model, decay_rank),
        "u": tensors.take(prefix + "bonus", n_heads, d_model // n_heads).flatten(),
        "out.weight": tensors.take(prefix + "o_proj.weight", d_model, d_model),
    }
    for ours, theirs in (("r", "r"), ("k", "k"), ("v", "v"), ("gate", "g")):
        found[f"{ours}.weight"] = tensors.take(f"{prefix}{theirs}_proj.linear.weight", d_model, d_model)
    for name in ("weight", "bias"):
        found[f"norm.{name}"] = tensors.take(f"{prefix}g_norm.{name}", d_model)
    return found


def _channel_mixing(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one layer's channel mixing."""
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    return {
        "shift.mu.0": tensors.take(prefix + "key.mu", d_model),
        "shift.mu.1": tensors.take(prefix + "receptance.mu", d_model),
        "k.weight": tensors.take(prefix + "key.linear.weight", d_hidden, d_model),
        "v.weight": tensors.take(prefix + "value.weight", d_model, d_hidden),
        "r.weight": tensors.take(prefix + "receptance.linear.weight", d_model, d_model),
    }
