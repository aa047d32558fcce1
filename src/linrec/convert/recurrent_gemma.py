"""RecurrentGemma, the released Griffin, as in `RecurrentGemmaForCausalLM` of transformers.

In transformers, norms store their weight minus 1, `intermediate_size` is twice the width of the channel
mixing, and Lambda has the opposite sign. The embedding is multiplied by the square root of the width, rounded
to bfloat16 in every precision. Rotary pairs are adjacent channels in linrec. In transformers, a pair is
channel j of the first half and channel j of the second half of the rotated channels. Options of
initialisation and of the cache do not affect a trained model.
"""

import math

import torch
from torch import Tensor

from linrec.convert.checkpoint import ConversionError, Options, Tensors
from linrec.models import ModelConfig

__all__ = ["config", "weights"]

_MIXERS = {"recurrent": "hawk", "attention": "attention"}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes.

    Raises:
        ConversionError: an option is missing or has an unsupported value.
    """
    activation = _ACTIVATIONS[options.supported("hidden_activation", tuple(_ACTIVATIONS))]
    d_model, n_layers = options.read("hidden_size", int), options.read("num_hidden_layers", int)
    n_heads = options.read("num_attention_heads", int)
    d_rnn = options.read("lru_width", int, d_model)
    for name, width in (("hidden_size", d_model), ("lru_width", d_rnn)):
        if n_heads < 1 or width < 1 or width % n_heads:
            raise ConversionError(
                f"{options.path}: `{name}` must be a positive multiple of `num_attention_heads` = {n_heads}; "
                f"got {width}."
            )
    arguments = {
        "hawk": {
            "variant": "released",
            "d_rnn": d_rnn,
            "n_blocks": n_heads,
            "conv_size": options.read("conv1d_width", int),
            "activation": activation,
        },
        "attention": {
            "n_heads": n_heads,
            "kv_heads": options.read("num_key_value_heads", int, n_heads),
            # the output projection always has a bias
            "bias": True,
            "window": options.read("attention_window_size", int),
            "dropout": options.read("attention_dropout", float, 0.0),
            **_rotary(options),
        },
    }
    pattern = _pattern(options)[:n_layers]
    return ModelConfig(
        vocab_size=options.read("vocab_size", int),
        d_model=d_model,
        n_layers=n_layers,
        mixer=pattern,
        mixer_args={name: arguments[name] for name in pattern},
        d_channel_mixing=options.read("intermediate_size", int) // 2,
        channel_mixing="geglu_tanh" if activation == "gelu_tanh" else "geglu",
        norm="rms",
        norm_eps=options.read("rms_norm_eps", float),
        embedding_scale=float(torch.tensor(math.sqrt(d_model), dtype=torch.bfloat16)),
        tie_embeddings=options.read("tie_word_embeddings", bool, True),
        head_bias=False,
        logit_cap=options.read("logits_soft_cap", float),
    )


def weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """Return the `state_dict` of the model, built from the checkpoint's tensors.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape.
    """
    d_model, vocabulary = config.d_model, config.vocab_size
    embedding = tensors.take("model.embed_tokens.weight", vocabulary, d_model)
    found = {
        "embedding.weight": embedding,
        "norm.weight": 1 + tensors.take("model.final_norm.weight", d_model),
    }
    for layer in range(config.n_layers):
        name, _ = config.mixer_of(layer)
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        for norm, place in (("mixer_norm", "temporal_pre_norm"), ("channel_mixing_norm", "channel_pre_norm")):
            found[f"{ours}{norm}.weight"] = 1 + tensors.take(f"{theirs}{place}.weight", d_model)
        mixer = _hawk if name == "hawk" else _attention
        for key, tensor in mixer(tensors, theirs + "temporal_block.", config, layer).items():
            found[f"{ours}mixer.{key}"] = tensor
        for linear in ("gate", "up", "down"):
            shape = (d_model, config.d_channel_mixing)
            place = f"{theirs}mlp_block.{linear}_proj"
            key, outputs = f"{ours}channel_mixing.{linear}", shape if linear == "down" else shape[::-1]
            found[f"{key}.weight"] = tensors.take(f"{place}.weight", *outputs)
            found[f"{key}.bias"] = tensors.take(f"{place}.bias", outputs[0])
    if config.tie_embeddings:
        tensors.take_copy("lm_head.weight", embedding)
        return found | {"head.weight": embedding}
    return found | {"head.weight": tensors.take("lm_head.weight", vocabulary, d_model)}


def _pattern(options: Options) -> tuple[str, ...]:
    """Return the pattern of mixer names, which repeats over depth."""
    types = options.read("block_types", list)
    unknown = [kind for kind in types if kind not in _MIXERS]
    if unknown or not types:
        raise ConversionError(
            f"{options.path}: `block_types` must be a list of 'recurrent' and 'attention'; got {types}."
        )
    return tuple(_MIXERS[kind] for kind in types)


def _rotary(options: Options) -> dict[str, float]:
    """Return the attention's rotary arguments; checkpoints of 2024 store them as plain options."""
    table = Options(options.read("rope_parameters", dict, {}), options.path)
    table.supported("rope_type", ("default",), "default")
    return {
        "rotary_base": table.read("rope_theta", float, options.read("rope_theta", float, 10_000.0)),
        "rotary_fraction": table.read(
            "partial_rotary_factor", float, options.read("partial_rotary_factor", float, 0.5)
        ),
    }


def _hawk(tensors: Tensors, prefix: str, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """Return the `state_dict` of one recurrent mixer."""
    _, arguments = config.mixer_of(layer)
    d_model, d_rnn, n_blocks = config.d_model, arguments["d_rnn"], arguments["n_blocks"]
    size, taps = d_rnn // n_blocks, arguments["conv_size"]
    found = {
        # torch's convolution stores the tap of the current step last
        "conv.weight": tensors.take(prefix + "conv_1d.weight", d_rnn, 1, taps)[:, 0].flip(-1),
        "conv.bias": tensors.take(prefix + "conv_1d.bias", d_rnn),
        "rg_lru.Lambda": -tensors.take(prefix + "rg_lru.recurrent_param", d_rnn),
    }
    for ours, theirs in (("recurrence_gate", "recurrent_gate"), ("input_gate", "input_gate")):
        blocks = tensors.take(f"{prefix}rg_lru.{theirs}_weight", n_blocks, size, size)
        bias = tensors.take(f"{prefix}rg_lru.{theirs}_bias", n_blocks, size)
        # the released code multiplies by the blocks from the right
        found |= {f"rg_lru.{ours}.weight": blocks.transpose(1, 2), f"rg_lru.{ours}.bias": bias.flatten()}
    for ours, theirs in (("gate", "linear_y"), ("u", "linear_x"), ("out", "linear_out")):
        inputs, outputs = (d_rnn, d_model) if ours == "out" else (d_model, d_rnn)
        found[f"{ours}.weight"] = tensors.take(f"{prefix}{theirs}.weight", outputs, inputs)
        found[f"{ours}.bias"] = tensors.take(f"{prefix}{theirs}.bias", outputs)
    return found


def _attention(tensors: Tensors, prefix: str, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """Return the `state_dict` of one attention mixer."""
    _, arguments = config.mixer_of(layer)
    d_model, n_heads, kv_heads = config.d_model, arguments["n_heads"], arguments["kv_heads"]
    d_head = d_model // n_heads
    turned = int(d_head * arguments["rotary_fraction"])
    found = {
        "out.weight": tensors.take(prefix + "o_proj.weight", d_model, d_model),
        "out.bias": tensors.take(prefix + "o_proj.bias", d_model),
    }
    for name, heads in (("q", n_heads), ("k", kv_heads), ("v", kv_heads)):
        weight = tensors.take(f"{prefix}{name}_proj.weight", heads * d_head, d_model)
        # linrec always has biases; transformers only with `attention_bias`
        place = f"{prefix}{name}_proj.bias"
        bias = tensors.take(place, heads * d_head) if place in tensors else weight.new_zeros(len(weight))
        if name != "v":
            weight, bias = _neighbours(weight, heads, turned), _neighbours(bias, heads, turned)
        found |= {f"{name}.weight": weight, f"{name}.bias": bias}
    return found


def _neighbours(rows: Tensor, heads: int, turned: int) -> Tensor:
    """Reorder the rows (heads dk, ..) of each head so that rotary pairs j and j + turned / 2 are adjacent."""
    rows = rows.unflatten(0, (heads, -1))
    pairs = rows[:, :turned].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, rows[:, turned:]], dim=1).flatten(0, 1)
