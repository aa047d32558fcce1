"""RWKV-4, 5 and 6 as the authors' RWKV-LM saves them: one file of tensors, without a configuration.

The version follows from the names of the tensors, and the sizes from their shapes. RWKV-5 means version 5.2,
whose bonus is per channel; in 5.0 and 5.1 it was per head.
"""

import re

from torch import Tensor

from linrec.convert.checkpoint import Tensors
from linrec.models import ModelConfig

__all__ = ["channel_mixing", "config", "time_mixing_4", "weights"]

MATRICES = {"r": "receptance", "k": "key", "v": "value", "gate": "gate", "out": "output"}


def config(tensors: Tensors) -> ModelConfig:
    """Return the model configuration, inferred from the names and shapes of the tensors.

    Raises:
        ConversionError: a tensor is missing.
    """
    att = "blocks.0.att."
    version = 6 if att + "time_maa_x" in tensors else 5 if att + "ln_x.weight" in tensors else 4
    vocab_size, d_model = tensors.shape("emb.weight")
    if version == 4:
        arguments = {"d_state": tensors.shape(att + "key.weight")[0]}
    else:
        arguments = {"n_heads": tensors.shape(att + "time_faaaa")[0]}
    if version == 6:
        arguments |= {
            "shift_rank": tensors.shape(att + "time_maa_w2")[1],
            "decay_rank": tensors.shape(att + "time_decay_w2")[0],
        }
    layers = [int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))]
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=1 + max(layers),
        mixer=f"rwkv{version}",
        mixer_args=arguments,
        channel_mixing="rwkv",
        d_channel_mixing=tensors.shape("blocks.0.ffn.key.weight")[0],
        embedding_norm=True,
        head_bias=False,
    )


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    size = config.vocab_size, config.d_model
    found = {"embedding.weight": tensors.take("emb.weight", *size)}
    found["head.weight"] = tensors.take("head.weight", *size)
    norms = {"blocks.0.ln0": "embedding_norm", "ln_out": "norm"}
    time_mixing = {"rwkv4": time_mixing_4, "rwkv5": _time_mixing_5, "rwkv6": _time_mixing_6}[
        str(config.mixer)
    ]
    share = "time_maa_" if config.mixer == "rwkv6" else "time_mix_"
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        norms |= {block + "ln1": block + "mixer_norm", block + "ln2": block + "channel_mixing_norm"}
        parts = {
            "mixer.": time_mixing(tensors, block + "att.", config),
            "channel_mixing.": channel_mixing(tensors, block + "ffn.", config, (share + "k", share + "r")),
        }
        for part, taken in parts.items():
            found |= {block + part + name: tensor for name, tensor in taken.items()}
    for theirs, ours in norms.items():
        for name in ("weight", "bias"):
            found[f"{ours}.{name}"] = tensors.take(f"{theirs}.{name}", config.d_model)
    return found


def time_mixing_4(
    tensors: Tensors,
    prefix: str,
    config: ModelConfig,
    shares: tuple[str, str, str] = ("time_mix_r", "time_mix_k", "time_mix_v"),
) -> dict[str, Tensor]:
    """Return the `state_dict` of an `rwkv4` mixer; `shares` names the token-shift weights of r, k and v."""
    d_model, d_state = config.d_model, config.mixer_args["d_state"]
    found = {
        "log_w": tensors.take(prefix + "time_decay", d_state),
        "u": tensors.take(prefix + "time_first", d_state),
        "out.weight": tensors.take(prefix + "output.weight", d_model, d_state),
    }
    for ours, share in zip("rkv", shares, strict=True):
        found[f"mu_{ours}"] = tensors.take(prefix + share, 1, 1, d_model).flatten()
        found[f"{ours}.weight"] = tensors.take(f"{prefix}{MATRICES[ours]}.weight", d_state, d_model)
    return found


def channel_mixing(
    tensors: Tensors, prefix: str, config: ModelConfig, shares: tuple[str, str]
) -> dict[str, Tensor]:
    """Return the `state_dict` of a channel mixing; `shares` names the token-shift weights of k and r."""
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    mu = [tensors.take(prefix + share, 1, 1, d_model).flatten() for share in shares]
    return {
        # RWKV-4 and 5 store the current token's weight, RWKV-6 and linrec the previous token's
        **{f"shift.mu.{i}": x if config.mixer == "rwkv6" else 1 - x for i, x in enumerate(mu)},
        "k.weight": tensors.take(prefix + "key.weight", d_hidden, d_model),
        "v.weight": tensors.take(prefix + "value.weight", d_model, d_hidden),
        "r.weight": tensors.take(prefix + "receptance.weight", d_model, d_model),
    }


def _time_mixing_5(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of an `rwkv5` mixer."""
    d_model, heads = config.d_model, config.mixer_args["n_heads"]
    shares = [tensors.take(f"{prefix}time_mix_{z}", 1, 1, d_model).flatten() for z in "rkvg"]
    return {
        **{f"shift.mu.{i}": 1 - share for i, share in enumerate(shares)},
        "omega": tensors.take(prefix + "time_decay", heads, d_model // heads).flatten(),
        **_heads(tensors, prefix, config),
    }


def _time_mixing_6(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of an `rwkv6` mixer."""
    d_model, rank, decay_rank = config.d_model, *(config.mixer_args[f"{n}_rank"] for n in ("shift", "decay"))
    A = tensors.take(prefix + "time_maa_w1", d_model, 5 * rank).unflatten(1, (5, rank))
    B = tensors.take(prefix + "time_maa_w2", 5, rank, d_model)
    # linrec's order of the mixtures, as indices into the checkpoint's order
    order = ["wkvrg".index(z) for z in "rkvwg"]
    shares = {z: tensors.take(f"{prefix}time_maa_{z}", 1, 1, d_model).flatten() for z in "xrkvwg"}
    return {
        "shift.mu_x": shares["x"],
        **{f"shift.mu.{i}": shares[z] for i, z in enumerate("rkvwg")},
        "shift.A.weight": A[:, order].flatten(1).T,
        "shift.B": B[order],
        "lambda_d": tensors.take(prefix + "time_decay", 1, 1, d_model).flatten(),
        "d.0.weight": tensors.take(prefix + "time_decay_w1", d_model, decay_rank).T,
        "d.2.weight": tensors.take(prefix + "time_decay_w2", decay_rank, d_model).T,
        **_heads(tensors, prefix, config),
    }


def _heads(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the matrices, the bonus and the heads' norm of an `rwkv5` or `rwkv6` mixer."""
    d_model, heads = config.d_model, config.mixer_args["n_heads"]
    return {
        **{f"{o}.weight": tensors.take(f"{prefix}{t}.weight", d_model, d_model) for o, t in MATRICES.items()},
        "u": tensors.take(prefix + "time_faaaa", heads, d_model // heads).flatten(),
        **{f"norm.{name}": tensors.take(f"{prefix}ln_x.{name}", d_model) for name in ("weight", "bias")},
    }
