"""RWKV-7, as in `RWKV7ForCausalLM` of flash-linear-attention.

`linrec.convert.rwkv_lm` reads the layout of the RWKV authors.
"""

from collections.abc import Iterator

from linrec.convert import decoder
from linrec.convert.checkpoint import Options
from linrec.convert.flash_linear_attention import config_of
from linrec.convert.layers import linear
from linrec.convert.layout import Piece, flat, same
from linrec.convert.rwkv6 import NAMES
from linrec.convert.rwkv_lm import VECTOR, channel_mixing_7
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

RANKS = {"decay": "decay", "rate": "a", "value": "v", "gate": "gate"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("hidden_act", ("sqrelu",), "sqrelu")
    for name in ("norm_first", "norm_bias"):
        options.supported(name, (True,), True)
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    options.supported("value_dim", (None, d_model, [d_model] * n_layers))
    d_head = options.read("head_dim", int)
    ranks = {f"{ours}_rank": options.read(f"{theirs}_low_rank_dim", int) for ours, theirs in RANKS.items()}
    wide = int(d_model * options.read("hidden_ratio", float, 4.0))
    return config_of(
        options,
        "rwkv7",
        ranks | {"n_heads": d_model // d_head, "norm_eps": d_head * options.read("norm_eps", float)},
        channel_mixing="rwkv7",
        # rounded up to a multiple of 32
        d_channel_mixing=options.read("intermediate_size", int, -(-wide // 32) * 32),
        norm="layer",
        embedding_norm=True,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    share = same("x_k", "shift.mu.0", config.d_model)
    return decoder.layout_of(
        config,
        lambda layer: ("attn.", _mixer(config, layer)),
        lambda config: channel_mixing_7(config, share),
        NAMES,
    )


def _mixer(config: ModelConfig, layer: int) -> Iterator[Piece]:
    """Yield the pieces of a mixer."""
    d_model, arguments = config.d_model, config.mixer_args
    for place, z in enumerate("rwkvag"):
        yield same(f"x_{z}", f"shift.mu.{place}", 1, 1, d_model, changes=[VECTOR])
    loras = {"w": ("w", "decay"), "a": ("a", "rate"), "g": ("gate", "gate")}
    if layer:
        loras["v"] = "residual", "value"
    for z, (ours, kind) in loras.items():
        rank = arguments[f"{kind}_rank"]
        yield same(f"{z}_lora.lora.0.weight", f"{ours}.0.weight", rank, d_model)
        yield same(f"{z}_lora.lora.2.weight", f"{ours}.2.weight", d_model, rank)
        if z != "g":
            yield same(f"{z}_lora.lora.2.bias", f"{ours}.2.bias", d_model)
    yield same("k_k", "xi", d_model)
    yield same("k_a", "alpha", d_model)
    heads = arguments["n_heads"]
    yield same("r_k", "rho", heads, d_model // heads, changes=[flat(heads)])
    for ours, theirs in (("r", "r"), ("k", "k"), ("v", "v"), ("out", "o")):
        yield from linear(f"{theirs}_proj", ours, d_model, d_model)
    for name in ("weight", "bias"):
        yield same(f"g_norm.{name}", f"norm.{name}", d_model)
