"""xLSTM 7B and similar models, as in `xLSTMForCausalLM` of transformers.

transformers ignores `add_out_norm` and `tie_word_embeddings`: its models always have the last norm and an
untied head. If `num_blocks` and `num_hidden_layers` differ, the model has `num_blocks` blocks. Kernels,
chunks, `mode` and the dtypes of states affect precision and speed only. So does `eps`, which is added to a
denominator before a norm. The authors' own configuration of the 7B model has `embedding_dim` and `num_blocks`
instead of `hidden_size` and `num_hidden_layers`. Its first version had no `weight_mode` either.
"""

from torch import Tensor

from linrec.convert.checkpoint import ConversionError, Options, Tensors
from linrec.models import ModelConfig

__all__ = ["config", "weights"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    options.supported("use_bias", (False,), False)
    options.supported("weight_mode", ("single",), "single")
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
        norm="rms",
        norm_eps=norm_eps,
        head_bias=False,
        logit_cap=options.read("output_logit_soft_cap", float),
    )


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    d_model, vocabulary = config.d_model, config.vocab_size
    found = {
        "embedding.weight": tensors.take("backbone.embeddings.weight", vocabulary, d_model),
        "norm.weight": tensors.take("backbone.out_norm.weight", d_model),
        "head.weight": tensors.take("lm_head.weight", vocabulary, d_model),
    }
    for layer in range(config.n_layers):
        for key, tensor in _block(tensors, f"backbone.blocks.{layer}.", config).items():
            found[f"blocks.{layer}.{key}"] = tensor
    return found


def _block(tensors: Tensors, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of one block."""
    d_model, d_hidden, arguments = config.d_model, config.d_channel_mixing, config.mixer_args
    n_heads, d_qk, d_v = arguments["n_heads"], arguments["d_qk"], arguments["d_v"]
    places: dict[str, tuple[str, tuple[int, ...]]] = {
        "mixer_norm.weight": ("norm_mlstm.weight", (d_model,)),
        "mixer.q.weight": ("mlstm_layer.q.weight", (d_qk, d_model)),
        "mixer.k.weight": ("mlstm_layer.k.weight", (d_qk, d_model)),
        "mixer.v.weight": ("mlstm_layer.v.weight", (d_v, d_model)),
        "mixer.memory.i.weight": ("mlstm_layer.igate_preact.weight", (n_heads, d_model)),
        "mixer.memory.i.bias": ("mlstm_layer.igate_preact.bias", (n_heads,)),
        "mixer.memory.f.weight": ("mlstm_layer.fgate_preact.weight", (n_heads, d_model)),
        "mixer.memory.f.bias": ("mlstm_layer.fgate_preact.bias", (n_heads,)),
        "mixer.norm.weight": ("mlstm_layer.multihead_norm.weight", (d_v,)),
        "mixer.gate.weight": ("mlstm_layer.ogate_preact.weight", (d_v, d_model)),
        "mixer.out.weight": ("mlstm_layer.out_proj.weight", (d_model, d_v)),
        "channel_mixing_norm.weight": ("norm_ffn.weight", (d_model,)),
        "channel_mixing.gate.weight": ("ffn.proj_up_gate.weight", (d_hidden, d_model)),
        "channel_mixing.up.weight": ("ffn.proj_up.weight", (d_hidden, d_model)),
        "channel_mixing.down.weight": ("ffn.proj_down.weight", (d_model, d_hidden)),
    }
    found = {ours: tensors.take(prefix + theirs, *shape) for ours, (theirs, shape) in places.items()}
    # linrec's unit has biases; the released unit does not
    for linear in ("gate", "up", "down"):
        key = f"channel_mixing.{linear}."
        found[key + "bias"] = found[key + "weight"].new_zeros(len(found[key + "weight"]))
    return found
