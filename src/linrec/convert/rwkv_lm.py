"""RWKV-4, 5, 6 and 7 as the authors' RWKV-LM saves them: one file of tensors, without a configuration.

The version follows from the names of the tensors, and the sizes from their shapes. RWKV-5 means version 5.2,
whose bonus is per channel; in 5.0 and 5.1 it was per head.
"""

import re
from collections.abc import Iterator, Sequence

from torch import Tensor

from linrec.convert.checkpoint import Tensors
from linrec.convert.layers import linear
from linrec.convert.layout import ONE_MINUS, TRANSPOSED, Change, Piece, constants, flat, same, within
from linrec.models import ModelConfig

__all__ = ["channel_mixing", "channel_mixing_7", "config", "layout", "norms", "time_mixing_4"]

# token-shift weights (1, 1, d)
VECTOR = Change(Tensor.flatten, lambda vector: vector[None, None])
MATRICES = {"r": "receptance", "k": "key", "v": "value", "gate": "gate", "out": "output"}


def config(tensors: Tensors) -> ModelConfig:
    """Return the model configuration, inferred from the names and shapes of the tensors."""
    att = "blocks.0.att."
    marks = {7: "r_k", 6: "time_maa_x", 5: "ln_x.weight"}
    version = next((version for version, name in marks.items() if att + name in tensors), 4)
    vocab_size, d_model = tensors.shape("emb.weight")
    if version == 4:
        arguments = {"d_state": tensors.shape(att + "key.weight")[0]}
    else:
        arguments = {"n_heads": tensors.shape(att + ("r_k" if version == 7 else "time_faaaa"))[0]}
    if version == 6:
        arguments |= {
            "shift_rank": tensors.shape(att + "time_maa_w2")[1],
            "decay_rank": tensors.shape(att + "time_decay_w2")[0],
        }
    layers = [int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))]
    if version == 7:
        # the first layer may lack v1, because it has no earlier layer's values to mix with its own
        last, names = f"blocks.{max(layers)}.att.", {"decay": "w1", "rate": "a1", "value": "v1", "gate": "g1"}
        arguments |= {f"{name}_rank": tensors.shape(last + theirs)[1] for name, theirs in names.items()}
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=1 + max(layers),
        mixer=f"rwkv{version}",
        mixer_args=arguments,
        channel_mixing="rwkv7" if version == 7 else "rwkv",
        d_channel_mixing=tensors.shape("blocks.0.ffn.key.weight")[0],
        embedding_norm=True,
        head_bias=False,
    )


def layout(config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    size = config.vocab_size, config.d_model
    yield same("emb.weight", "embedding.weight", *size)
    yield same("head.weight", "head.weight", *size)
    mixers = {"rwkv4": time_mixing_4, "rwkv5": _time_mixing_5, "rwkv6": _time_mixing_6}
    share = "time_maa_" if config.mixer == "rwkv6" else "time_mix_"
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        if config.mixer == "rwkv7":
            time = _time_mixing_7(config, layer)
            channels = channel_mixing_7(
                config, same("x_k", "shift.mu.0", 1, 1, config.d_model, changes=[VECTOR])
            )
        else:
            time = mixers[str(config.mixer)](config)
            channels = channel_mixing(config, (share + "k", share + "r"))
        yield from within(f"{block}att.", f"{block}mixer.", time)
        yield from within(f"{block}ffn.", f"{block}channel_mixing.", channels)
    yield from norms(config, "blocks.", "ln_out", "ln0")


def norms(config: ModelConfig, blocks: str, last: str, first: str) -> Iterator[Piece]:
    """Yield the pieces of all norms between the layers.

    Args:
        config: configuration of the model.
        blocks: prefix of the blocks in the checkpoint.
        last: name of the last norm.
        first: name of the embedding's norm in the first block.
    """
    names = {f"{blocks}0.{first}": "embedding_norm", last: "norm"}
    for layer in range(config.n_layers):
        theirs, ours = f"{blocks}{layer}.", f"blocks.{layer}."
        names |= {theirs + "ln1": ours + "mixer_norm", theirs + "ln2": ours + "channel_mixing_norm"}
    for theirs, ours in names.items():
        for name in ("weight", "bias"):
            yield same(f"{theirs}.{name}", f"{ours}.{name}", config.d_model)


def time_mixing_4(
    config: ModelConfig, shares: Sequence[str] = ("time_mix_r", "time_mix_k", "time_mix_v")
) -> Iterator[Piece]:
    """Yield the pieces of an `rwkv4` mixer; `shares` names the token-shift weights of r, k and v."""
    d_model, d_state = config.d_model, config.mixer_args["d_state"]
    yield same("time_decay", "log_w", d_state)
    yield same("time_first", "u", d_state)
    yield from linear("output", "out", d_model, d_state)
    for ours, share in zip("rkv", shares, strict=True):
        yield same(share, f"mu_{ours}", 1, 1, d_model, changes=[VECTOR])
        yield from linear(MATRICES[ours], ours, d_state, d_model)


def channel_mixing(config: ModelConfig, shares: Sequence[str]) -> Iterator[Piece]:
    """Yield the pieces of a channel mixing; `shares` names the token-shift weights of k and r."""
    d_model, d_hidden = config.d_model, config.d_channel_mixing
    # RWKV-4 and 5 store the current token's weight, RWKV-6 and linrec the previous token's
    changes = [VECTOR] if config.mixer == "rwkv6" else [VECTOR, ONE_MINUS]
    for place, share in enumerate(shares):
        yield same(share, f"shift.mu.{place}", 1, 1, d_model, changes=changes)
    yield from linear("key", "k", d_hidden, d_model)
    yield from linear("value", "v", d_model, d_hidden)
    yield from linear("receptance", "r", d_model, d_model)


def channel_mixing_7(config: ModelConfig, share: Piece) -> Iterator[Piece]:
    """Yield the pieces of a channel mixing without receptance; `share` is that of its token shift."""
    yield share
    yield from linear("key", "k", config.d_channel_mixing, config.d_model)
    yield from linear("value", "v", config.d_model, config.d_channel_mixing)


def _time_mixing_7(config: ModelConfig, layer: int) -> Iterator[Piece]:
    """Yield the pieces of an `rwkv7` mixer."""
    d_model, arguments = config.d_model, config.mixer_args
    heads = arguments["n_heads"]
    vectors = {f"x_{z}": f"shift.mu.{place}" for place, z in enumerate("rwkvag")}
    vectors |= {"k_k": "xi", "k_a": "alpha", "w0": "w.2.bias", "a0": "a.2.bias"}
    ranks = {"w": arguments["decay_rank"], "a": arguments["rate_rank"], "g": arguments["gate_rank"]}
    ours = {"w": "w", "a": "a", "g": "gate", "v": "residual"}
    rank = arguments["value_rank"]
    if layer:
        vectors["v0"], ranks["v"] = "residual.2.bias", rank
    else:
        # the released code has them, and does not use them
        yield constants({"v0": (1, 1, d_model), "v1": (d_model, rank), "v2": (rank, d_model)})
    for theirs, name in vectors.items():
        yield same(theirs, name, 1, 1, d_model, changes=[VECTOR])
    for z, rank in ranks.items():
        yield same(f"{z}1", f"{ours[z]}.0.weight", d_model, rank, changes=[TRANSPOSED])
        yield same(f"{z}2", f"{ours[z]}.2.weight", rank, d_model, changes=[TRANSPOSED])
    yield same("r_k", "rho", heads, d_model // heads, changes=[flat(heads)])
    for name in ("r", "k", "v", "out"):
        yield from linear(MATRICES[name], name, d_model, d_model)
    for name in ("weight", "bias"):
        yield same(f"ln_x.{name}", f"norm.{name}", d_model)


def _time_mixing_5(config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of an `rwkv5` mixer."""
    d_model, heads = config.d_model, config.mixer_args["n_heads"]
    for place, name in enumerate("rkvg"):
        share = f"time_mix_{name}", f"shift.mu.{place}"
        yield same(*share, 1, 1, d_model, changes=[VECTOR, ONE_MINUS])
    yield same("time_decay", "omega", heads, d_model // heads, changes=[flat(heads)])
    yield from _heads(config)


def _time_mixing_6(config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of an `rwkv6` mixer."""
    d_model, rank, decay_rank = config.d_model, *(config.mixer_args[f"{n}_rank"] for n in ("shift", "decay"))
    # linrec's order of the mixtures, as indices into the checkpoint's order, and back
    order = ["wkvrg".index(z) for z in "rkvwg"]
    back = ["rkvwg".index(z) for z in "wkvrg"]
    A = Change(
        lambda A: A.unflatten(1, (5, rank))[:, order].flatten(1).mT,
        lambda A: A.mT.unflatten(1, (5, rank))[:, back].flatten(1),
    )
    yield same("time_maa_w1", "shift.A.weight", d_model, 5 * rank, changes=[A])
    B = Change(lambda B: B[order], lambda B: B[back])
    yield same("time_maa_w2", "shift.B", 5, rank, d_model, changes=[B])
    for name, ours in {"x": "mu_x", **{z: f"mu.{place}" for place, z in enumerate("rkvwg")}}.items():
        yield same(f"time_maa_{name}", f"shift.{ours}", 1, 1, d_model, changes=[VECTOR])
    yield same("time_decay", "lambda_d", 1, 1, d_model, changes=[VECTOR])
    yield same("time_decay_w1", "d.0.weight", d_model, decay_rank, changes=[TRANSPOSED])
    yield same("time_decay_w2", "d.2.weight", decay_rank, d_model, changes=[TRANSPOSED])
    yield from _heads(config)


def _heads(config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the matrices, the bonus and the heads' norm of an `rwkv5` or `rwkv6` mixer."""
    d_model, heads = config.d_model, config.mixer_args["n_heads"]
    for ours, theirs in MATRICES.items():
        yield from linear(theirs, ours, d_model, d_model)
    yield same("time_faaaa", "u", heads, d_model // heads, changes=[flat(heads)])
    for name in ("weight", "bias"):
        yield same(f"ln_x.{name}", f"norm.{name}", d_model)
