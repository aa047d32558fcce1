"""xLSTM 7B and similar models, as in `xLSTMForCausalLM` of transformers.

transformers ignores `add_out_norm` and `tie_word_embeddings`: its models always have the last norm and an
untied head. If `num_blocks` and `num_hidden_layers` differ, the model has `num_blocks` blocks. Kernels,
chunks, `mode` and the dtypes of states affect precision and speed only. So does a small `eps`, which is added
to a denominator before a norm. The authors' own configuration of the 7B model has `embedding_dim` and
`num_blocks` instead of `hidden_size` and `num_hidden_layers`. Its first version had no `weight_mode` either.
"""

from collections.abc import Iterator

from linrec.convert.checkpoint import ConversionError, Options
from linrec.convert.layers import linear, swiglu, vocabulary
from linrec.convert.layout import Piece, same, within
from linrec.models import ModelConfig

__all__ = ["config", "layout"]

# added to denominators, which a norm follows; linrec adds nothing
LARGEST_EPS = 1e-4
SWIGLU = {"gate": "proj_up_gate", "up": "proj_up", "down": "proj_down"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    options.supported("use_bias", (False,), False)
    options.supported("weight_mode", ("single",), "single")
    eps = options.read("eps", float, 1e-6)
    if not 0 <= eps <= LARGEST_EPS:
        raise ConversionError(f"{options.path}: `eps` must be in [0, {LARGEST_EPS}]; got {eps}.")
    d_model = options.read("hidden_size" if "hidden_size" in options else "embedding_dim", int)
    n_heads = options.read("num_heads", int)
    widths = {}
    for name, factor in (("d_qk", "qk_dim_factor"), ("d_v", "v_dim_factor")):
        widths[name] = width = int(d_model * options.read(factor, float))
        if n_heads < 1 or width < 1 or width % n_heads:
            raise ConversionError(
                f"{options.path}: `hidden_size` times `{factor}` must be a positive multiple of `num_heads` "
                f"= {n_heads}; got {width}."
            )
    multiple = options.read("ffn_round_up_to_multiple_of", int)
    hidden = d_model * options.read("ffn_proj_factor", float)
    norm_eps = options.read("norm_eps", float)
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=options.read("num_blocks" if "num_blocks" in options else "num_hidden_layers", int),
        mixer="xlstm_7b",
        mixer_args={
            "n_heads": n_heads,
            **widths,
            "gate_cap": options.read("gate_soft_cap", float),
            "norm_eps": norm_eps,
        },
        # rounded up to a multiple; like transformers, this accepts a number that is not an integer
        d_channel_mixing=int((hidden + multiple - 1) // multiple * multiple),
        channel_mixing="swiglu",
        channel_mixing_bias=False,
        norm="rms",
        norm_eps=norm_eps,
        head_bias=False,
        logit_cap=options.read("output_logit_soft_cap", float),
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    yield from vocabulary(config, "backbone.embeddings.weight")
    yield same("backbone.out_norm.weight", "norm.weight", config.d_model)
    for layer in range(config.n_layers):
        yield from within(f"backbone.blocks.{layer}.", f"blocks.{layer}.", _block(config))


def _block(config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of one block."""
    d_model, arguments = config.d_model, config.mixer_args
    n_heads, d_qk, d_v = arguments["n_heads"], arguments["d_qk"], arguments["d_v"]
    yield same("norm_mlstm.weight", "mixer_norm.weight", d_model)
    yield same("norm_ffn.weight", "channel_mixing_norm.weight", d_model)
    mixer = "mlstm_layer."
    for name, width in {"q": d_qk, "k": d_qk, "v": d_v}.items():
        yield from linear(mixer + name, f"mixer.{name}", width, d_model)
    for name in "if":
        yield from linear(f"{mixer}{name}gate_preact", f"mixer.memory.{name}", n_heads, d_model, bias=True)
    yield same(f"{mixer}multihead_norm.weight", "mixer.norm.weight", d_v)
    yield from linear(f"{mixer}ogate_preact", "mixer.gate", d_v, d_model)
    yield from linear(f"{mixer}out_proj", "mixer.out", d_model, d_v)
    yield from within("ffn.", "channel_mixing.", swiglu(config, SWIGLU))
