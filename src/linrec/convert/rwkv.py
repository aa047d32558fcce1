"""RWKV-4, as in `RwkvForCausalLM` of transformers.

`rescale_every` divides weights and activations by powers of 2 at run time, to keep half precision in range.
Checkpoints are saved without the division, which only changes outputs through the norms' eps.
`context_length` is a limit of a kernel.
"""

from collections.abc import Iterator

from linrec.convert.checkpoint import Options
from linrec.convert.layers import vocabulary
from linrec.convert.layout import Piece, within
from linrec.convert.rwkv_lm import channel_mixing, norms, time_mixing_4
from linrec.models import ModelConfig

__all__ = ["config", "layout"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    # the last norm uses 1e-5 regardless of config.json
    norm_eps = options.supported("layer_norm_epsilon", (1e-5,))
    d_model = options.read("hidden_size", int)
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=options.read("num_hidden_layers", int),
        mixer="rwkv4",
        mixer_args={"d_state": options.read("attention_hidden_size", int, d_model)},
        channel_mixing="rwkv",
        d_channel_mixing=options.read("intermediate_size", int, 4 * d_model),
        norm="layer",
        norm_eps=norm_eps,
        embedding_norm=True,
        tie_embeddings=options.read("tie_word_embeddings", bool, False),
        head_bias=False,
    )


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    yield from vocabulary(config, "rwkv.embeddings.weight", "head.weight")
    share = "time_mix_"
    time = [*time_mixing_4(config, (share + "receptance", share + "key", share + "value"))]
    channels = [*channel_mixing(config, (share + "key", share + "receptance"))]
    for layer in range(config.n_layers):
        theirs, ours = f"rwkv.blocks.{layer}.", f"blocks.{layer}."
        yield from within(f"{theirs}attention.", f"{ours}mixer.", time)
        yield from within(f"{theirs}feed_forward.", f"{ours}channel_mixing.", channels)
    yield from norms(config, "rwkv.blocks.", "rwkv.ln_out", "pre_ln")
