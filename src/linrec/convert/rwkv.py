"""RWKV-4, as in `RwkvForCausalLM` of transformers.

`rescale_every` divides weights and activations by powers of 2 at run time, to keep half precision in range.
Checkpoints are saved without the division, which only changes outputs through the norms' eps.
`context_length` is a limit of a kernel.
"""

from torch import Tensor

from linrec.convert.checkpoint import Options, Tensors
from linrec.convert.rwkv_lm import channel_mixing, time_mixing_4
from linrec.models import ModelConfig

__all__ = ["config", "weights"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
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


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    embedding = tensors.take("rwkv.embeddings.weight", config.vocab_size, config.d_model)
    found = {"embedding.weight": embedding}
    share = "time_mix_"
    norms = {"rwkv.blocks.0.pre_ln": "embedding_norm", "rwkv.ln_out": "norm"}
    for layer in range(config.n_layers):
        theirs, ours = f"rwkv.blocks.{layer}.", f"blocks.{layer}."
        norms |= {theirs + "ln1": ours + "mixer_norm", theirs + "ln2": ours + "channel_mixing_norm"}
        parts = {
            "mixer.": time_mixing_4(
                tensors, theirs + "attention.", config, (share + "receptance", share + "key", share + "value")
            ),
            "channel_mixing.": channel_mixing(
                tensors, theirs + "feed_forward.", config, (share + "key", share + "receptance")
            ),
        }
        for part, taken in parts.items():
            found |= {ours + part + name: tensor for name, tensor in taken.items()}
    for theirs, ours in norms.items():
        for name in ("weight", "bias"):
            found[f"{ours}.{name}"] = tensors.take(f"{theirs}.{name}", config.d_model)
    if config.tie_embeddings:
        tensors.take_copy("head.weight", embedding)
        return found | {"head.weight": embedding}
    return found | {"head.weight": tensors.take("head.weight", config.vocab_size, config.d_model)}
