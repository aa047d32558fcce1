"""Presets: configurations of published models, by name."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from linrec.errors import unknown
from linrec.models.config import ModelConfig, StackConfig
from linrec.models.image_classifier import ImageClassifierConfig

__all__ = ["image_preset", "image_preset_names", "preset", "preset_names"]

Config = TypeVar("Config", bound=StackConfig)


def _memory_horizon() -> ModelConfig:
    # vocabulary: numbers 0 to 4 and the reset token; d_qk, d_v and n_heads follow d_model, and d_h is 1
    return ModelConfig(vocab_size=6, n_outputs=50, d_model=64, n_layers=4, d_channel_mixing=128)


def _wikitext103() -> ModelConfig:
    return ModelConfig(
        vocab_size=50257,
        d_model=624,
        n_layers=12,
        d_channel_mixing=1872,
        mixer_args={"output_gate": True, "output_projection": True},
    )


def _hgrn(vocab_size: int, d_model: int, n_layers: int, dropout: float = 0.0) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        mixer="hgru",
        # true of every published model whose shape is known
        d_channel_mixing=2 * d_model,
        channel_mixing="glu",
        dropout=dropout,
        tie_embeddings=True,
    )


def _xlstm(d_model: int, n_layers: int, slstm_at: Sequence[int]) -> ModelConfig:
    # not a repeating pattern: the few blocks of sLSTM have the positions that the paper lists
    blocks = ["slstm" if layer in slstm_at else "mlstm" for layer in range(n_layers)]
    return ModelConfig(
        # GPT-2's BPE vocabulary, rounded up to a multiple of 64
        vocab_size=50304,
        d_model=d_model,
        n_layers=n_layers,
        mixer=tuple(blocks),
        # blocks of mLSTM widen the sequence themselves
        channel_mixing=tuple("geglu" if block == "slstm" else "none" for block in blocks),
        # 1.3 d_model (4/3 in the released code), rounded up to a multiple of 64
        d_channel_mixing=64 * math.ceil(1.3 * d_model / 64),
        head_bias=False,
    )


def _griffin(d_model: int, d_rnn: int, n_layers: int, *, attention: bool = True) -> ModelConfig:
    arguments = {
        "hawk": {"d_rnn": d_rnn},
        "attention": {"n_heads": d_model // 128, "kv_heads": 1, "window": 1024},
    }
    pattern = ("hawk", "hawk", "attention") if attention else ("hawk",)
    return ModelConfig(
        # vocabulary of MassiveText's tokenizer
        vocab_size=32_000,
        d_model=d_model,
        n_layers=n_layers,
        mixer=pattern,
        mixer_args={name: arguments[name] for name in pattern},
        d_channel_mixing=3 * d_model,
        channel_mixing="geglu",
        norm="rms",
        norm_eps=1e-6,
        tie_embeddings=True,
    )


def _recurrent_gemma_2b() -> ModelConfig:
    return ModelConfig(
        vocab_size=256_000,
        d_model=2560,
        n_layers=26,
        mixer=("hawk", "hawk", "attention"),
        mixer_args={
            "hawk": {"variant": "released", "d_rnn": 2560, "n_blocks": 10},
            "attention": {
                "n_heads": 10,
                "kv_heads": 1,
                "window": 2048,
                "rotary_fraction": 0.5,
                "output_bias": True,
            },
        },
        d_channel_mixing=7680,
        channel_mixing="geglu_tanh",
        norm="rms",
        norm_eps=1e-6,
        tie_embeddings=True,
        # sqrt(d_model), rounded to bfloat16
        embedding_scale=50.5,
        head_bias=False,
        logit_cap=30.0,
    )


def _samba(d_model: int, n_layers: int, d_channel_mixing: int) -> ModelConfig:
    return ModelConfig(
        # vocabulary of LLaMA's tokenizer
        vocab_size=32_000,
        d_model=d_model,
        n_layers=n_layers,
        mixer=("mamba", "attention"),
        mixer_args={"attention": {"n_heads": d_model // 128, "window": 2048}},
        d_channel_mixing=d_channel_mixing,
        channel_mixing="swiglu",
        norm="rms",
        tie_embeddings=True,
    )


def _based(d_model: int, n_layers: int, taylor: Sequence[int]) -> ModelConfig:
    # a layer with a window follows each layer of linear attention
    kinds = {layer: "linear_attention" for layer in taylor} | {layer + 1: "attention" for layer in taylor}
    return ModelConfig(
        # GPT-2's BPE vocabulary, rounded up to a multiple of 8
        vocab_size=50264,
        d_model=d_model,
        n_layers=n_layers,
        mixer=tuple(kinds.get(layer, "base_conv") for layer in range(n_layers)),
        mixer_args={
            "linear_attention": {"n_heads": 16, "d_qk": 256, "feature_map": "taylor", "bias": False},
            # 128 earlier steps
            "attention": {"n_heads": 16, "window": 129},
        },
        d_channel_mixing=2 * d_model,
        channel_mixing="swiglu",
        channel_mixing_bias=False,
        norm="rms",
        tie_embeddings=True,
    )


def _h3(d_model: int, n_layers: int, n_heads: int, attention: Sequence[int]) -> ModelConfig:
    return ModelConfig(
        # GPT-2's BPE vocabulary, rounded up to a multiple of 8
        vocab_size=50264,
        d_model=d_model,
        n_layers=n_layers,
        mixer=tuple("attention" if layer in attention else "h3" for layer in range(n_layers)),
        # without positions: the recurrent layers encode the order of steps
        mixer_args={"attention": {"n_heads": n_heads, "positions": "none", "bias": True}},
        d_channel_mixing=4 * d_model,
        tie_embeddings=True,
    )


def _hyena(d_model: int, n_layers: int, d_channel_mixing: int, length: int = 2048) -> ModelConfig:
    return ModelConfig(
        # GPT-2's BPE vocabulary, rounded up to a multiple of 8
        vocab_size=50264,
        d_model=d_model,
        n_layers=n_layers,
        mixer="hyena",
        # filters as in the released code: the table's four layers are three with sines and a linear output
        mixer_args={
            "length": length,
            "first_filter": False,
            "d_filter": 64,
            "filter_depth": 3,
            "n_bands": 16,
            "omega": 14.0,
            "shared_omega": True,
            "shift": 0.0,
            "joint_windows": True,
            "learn_positions": True,
            "std": 0.02,
            "out_std": 0.02 / math.sqrt(2 * n_layers),
        },
        d_channel_mixing=d_channel_mixing,
        tie_embeddings=True,
    )


def _s5_hyena() -> ModelConfig:
    return ModelConfig(
        vocab_size=50257,
        d_model=768,
        n_layers=12,
        mixer="s5_hyena",
        mixer_args={"d_state": 128, "n_blocks": 32, "out_std": 0.02 / math.sqrt(24)},
        d_channel_mixing=3072,
        tie_embeddings=True,
    )


def _deit_hgrn(d_model: int) -> ImageClassifierConfig:
    return ImageClassifierConfig(
        n_outputs=1000,
        patch_size=14,
        directions=("forward", "backward"),
        unshared=("theta",),
        d_model=d_model,
        n_layers=12,
        mixer="hgru",
        d_channel_mixing=2 * d_model,
        channel_mixing="glu",
    )


def _deit(d_model: int) -> ImageClassifierConfig:
    return ImageClassifierConfig(
        n_outputs=1000,
        grid=(14, 14),
        class_token=True,
        directions=("forward",),
        d_model=d_model,
        n_layers=12,
        mixer="attention",
        mixer_args={"n_heads": d_model // 64, "positions": "none", "bias": True, "causal": False},
        d_channel_mixing=4 * d_model,
        norm_eps=1e-6,
    )


def _sashimi() -> ModelConfig:
    return ModelConfig(
        # samples of audio by the mu-law
        vocab_size=256,
        d_model=64,
        # eight blocks in each tier
        n_layers=24,
        pool=(4, 4),
        mixer="s4",
        mixer_args={"n_ssm": 1},
        d_channel_mixing=128,
    )


_PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "memory-horizon": _memory_horizon,
    "wikitext103": _wikitext103,
    # vocabularies: fairseq's version of GPT-2's BPE, GPT-2's own, and 50,272 as in the authors' checkpoints
    "wikitext103-hgrn": partial(_hgrn, 50265, 512, 6, dropout=0.1),
    "hgrn-125m": partial(_hgrn, 50257, 768, 11, dropout=0.1),
    "hgrn-150m": partial(_hgrn, 50272, 768, 14),
    "hgrn-350m": partial(_hgrn, 50272, 1024, 22),
    "hgrn-1b": partial(_hgrn, 50272, 2048, 16),
    "xlstm-7-1-125m": partial(_xlstm, 768, 24, (3, 20)),
    "xlstm-7-1-350m": partial(_xlstm, 1024, 48, (3, 5, 7, 40, 42, 44)),
    "xlstm-7-1-760m": partial(_xlstm, 1536, 48, (3, 5, 7, 40, 42, 44)),
    "xlstm-7-1-1.3b": partial(_xlstm, 2048, 48, (3, 5, 7, 40, 42, 44)),
    "griffin": partial(_griffin, 768, 1024, 12),
    "griffin-1.3b": partial(_griffin, 2048, 2560, 24),
    "griffin-7b": partial(_griffin, 4096, 5632, 32),
    "hawk": partial(_griffin, 768, 1024, 12, attention=False),
    "hawk-1.3b": partial(_griffin, 2048, 2560, 24, attention=False),
    "recurrent-gemma-2b": _recurrent_gemma_2b,
    "samba": partial(_samba, 1536, 12, 4096),
    "samba-1.3b": partial(_samba, 2304, 18, 6144),
    # indices of the layers of linear attention, from 0
    "based": partial(_based, 1024, 27, (1, 6, 11, 16, 21)),
    "based-1.3b": partial(_based, 1792, 36, (1, 6, 11, 16, 21, 27, 33)),
    # indices of the attention layers, from 0
    "h3-hybrid": partial(_h3, 768, 12, 12, (1, 8)),
    "h3-125m": partial(_h3, 768, 12, 12, (6,)),
    "h3-355m": partial(_h3, 1024, 24, 16, (8, 16)),
    "h3-1.3b": partial(_h3, 2048, 24, 16, (8, 16)),
    "h3-2.7b": partial(_h3, 2560, 32, 20, (8, 16, 24)),
    # two models of WikiText-103, on segments of 1,024 steps, then three of the Pile
    "hyena-125m": partial(_hyena, 768, 12, 3072, 1024),
    "hyena-slim": partial(_hyena, 768, 18, 1536, 1024),
    "hyena-153m": partial(_hyena, 864, 18, 1728),
    "hyena-355m": partial(_hyena, 1024, 36, 2048),
    "hyena-1.3b": partial(_hyena, 2048, 36, 4096),
    "s5-hyena": _s5_hyena,
    "sashimi": _sashimi,
}
_IMAGE_PRESETS: dict[str, Callable[[], ImageClassifierConfig]] = {
    "deit-tiny": partial(_deit, 192),
    "deit-small": partial(_deit, 384),
    "deit-base": partial(_deit, 768),
    "deit-tiny-hgrn": partial(_deit_hgrn, 192),
    "deit-small-hgrn": partial(_deit_hgrn, 384),
}


def preset_names() -> list[str]:
    """Return the names of all presets of language models.

    Example:
        >>> preset_names()[:3]
        ['memory-horizon', 'wikitext103', 'wikitext103-hgrn']
    """
    return list(_PRESETS)


def preset(name: str) -> ModelConfig:
    """Return the configuration of a published language model.

    - "memory-horizon": GateLoop, table 3. 4 layers, widths d_model 64, d_channel_mixing 128, d_qk 64,
      d_v 64, 64 heads of d_h = 1; 6 input tokens, 50 outputs; 154,290 parameters.
    - "wikitext103": GateLoop, table 4; each mixer has an output gate and an output projection that the
      paper's equations lack. 12 layers, widths 624 / 1872 / 624 / 624, 624 heads of d_h = 1, the 50,257
      tokens of GPT-2's BPE, untied embedding and head; 123.6M parameters.
    - "wikitext103-hgrn": HGRN, table 1. 6 layers of width 512 with gated linear units of width 1,024, tied
      embedding and head; the 50,265 tokens of fairseq's version of the same BPE; 46.25M parameters.
    - "hgrn-125m": HGRN, table 2, "GPT-2 small size (125M)" on WikiText-103. 11 layers of width 768, units of
      1,536, the 50,257 tokens of GPT-2's BPE; 123.1M parameters.
    - "hgrn-150m", "hgrn-350m", "hgrn-1b": HGRN, tables 3 to 5, on the Pile. 14 layers of width 768, 22 of
      1,024 and 16 of 2,048, units of twice the width, 50,272 tokens; 146.2M, 351.8M and 976.1M parameters.
    - "xlstm-7-1-125m", "xlstm-7-1-350m", "xlstm-7-1-760m", "xlstm-7-1-1.3b": xLSTM[7:1], hybrids of mLSTM and
      sLSTM, on SlimPajama. 24 layers of width 768, 48 of 1,024, of 1,536 and of 2,048; 163.7M, 408.5M, 839.9M
      and 1,420.2M parameters.
    - "griffin", "griffin-1.3b", "griffin-7b": Griffin's models of 100M, 1.3B and 7B, which repeat two layers
      of Hawk and a layer of local multi-query attention. 12 layers of width 768, 24 of 2,048 and 32 of 4,096;
      recurrences of width 1,024, 2,560 and 5,632, units of three times the model's width, 32,000 tokens;
      113.9M, 1,308.5M and 6,921.2M parameters.
    - "hawk", "hawk-1.3b": the same without attention; 118.4M and 1,369.8M parameters.
    - "recurrent-gemma-2b": RecurrentGemma-2B as released, 26 layers of width 2,560, 256,000 tokens; 2,682.9M
      parameters. `linrec.convert` loads the published weights into it.
    - "samba", "samba-1.3b": Samba, the models of 421M and 1.3B. Layers of Mamba alternate with attention to
      the last 2,048 steps. 12 layers of width 1,536 and 18 of 2,304, SwiGLU of 4,096 and 6,144, 32,000
      tokens; 421.9M and 1,330.5M parameters.
    - "based", "based-1.3b": BASED, the models of 360M and 1.3B. Five and seven layers of linear attention
      with Taylor features of 16 channels, as many layers of attention to 128 earlier steps, and gated short
      convolutions. 27 layers of width 1,024 and 36 of 1,792, SwiGLU of twice the width, GPT-2's BPE rounded
      up to a multiple of 8; 362.6M and 1,349.5M parameters.
    - "h3-hybrid": H3 on WikiText-103, with attention in the second and the ninth of 12 layers. Width 768, the
      50,257 tokens of GPT-2's BPE rounded up to a multiple of 8; 126.1M parameters.
    - "h3-125m", "h3-355m", "h3-1.3b", "h3-2.7b": H3's published models of the Pile, with attention in one,
      two, two and three layers. 12 layers of width 768, 24 of 1,024, 24 of 2,048 and 32 of 2,560; 126.4M,
      361.1M, 1,326.1M and 2,670.3M parameters.
    - "hyena-125m", "hyena-slim": Hyena's models of WikiText-103; the second is deeper, with narrower channel
      mixing. 12 and 18 layers of width 768, units of 3,072 and 1,536, filters of 1,024 taps, GPT-2's BPE
      rounded up to a multiple of 8; 124.9M and 125.6M parameters.
    - "hyena-153m", "hyena-355m", "hyena-1.3b": Hyena's models of the Pile, with filters of 2,048 taps. 18
      layers of width 864, 36 of 1,024 and 36 of 2,048, units of twice the width; 153.7M, 359.5M and 1,320.2M
      parameters.
    - "s5-hyena": the released WikiText-103 model that replaces Hyena's filters by S5. 12 layers of width 768,
      units of 3,072, the 50,257 tokens of GPT-2's BPE; 128.5M parameters.
    - "sashimi": SaShiMi's model of spoken digits (SC09), as raw audio. Eight blocks of width 64, of width 128
      at a fourth of the rate and of 256 at a sixteenth, 256 values of a sample; 4.1M parameters. S4 has one A
      and B for each layer, and a linear map at the end. Later releases have a gated unit there,
      `mixer_args={"n_ssm": 1, "output": "glu"}`.

    GateLoop's paper gives 125M parameters for "wikitext103" and does not break the count down. Equations 24
    and 25 with the "simple FNN" of appendix C, all with biases, give 114.3M. An output projection in the
    mixer raises the count to 118.9M, and an output gate as well to 123.6M, nearest to 125M. With tied
    embeddings every variant would stay below 93M. A gated linear unit as channel mixing would give 128.3M,
    but the paper says FNN. So this preset has the gate and the projection. `mixer_args={}` gives the layer
    exactly as in the equations.

    HGRN's paper says "GLU" without a formula. The authors' code for table 1 has no activation,
    `channel_mixing="bilinear"`. Their published models of the Pile use SiLU, "swiglu". Dropout of 0.1 on
    WikiText-103 is from their code too.

    HGRN's paper gives the sizes of its larger models, but no width or depth. "hgrn-150m" follows the
    published configuration of HGRN-150M, except that it has the biases of the paper's equations. For
    "hgrn-350m" and "hgrn-1b" the shapes (width 1,024 and 2,048, tied embeddings) match the sizes of the
    published weights of HGRN-355M and HGRN-1B, 1.41 and 3.9 GB in float32. Nothing is known about the 125M
    model. With the width of GPT-2 small, 11 layers come nearest to 125M; the 12 layers of GPT-2 small would
    give 130.8M.

    In xLSTM[7:1] a few blocks near the input and the output are sLSTM blocks, each followed by a gated unit.
    The paper lists shapes and positions; the units' widths are from the released code. Norms and units here
    have biases, which the released code lacks. So the counts exceed the paper's 163.7M, 408.4M, 839.7M and
    1,420.1M. Mixers are initialised as in the released code, by their positions among all blocks. The
    embedding, the head and the gated units are initialised as in the other presets.

    Griffin's paper gives widths, depths and heads, and names its models by their sizes. It does not say how
    many channels of the attention heads are rotated by position. Here all channels are; in RecurrentGemma it
    is one half. RecurrentGemma has no biases of queries, keys and values; converted models have zeros there.

    The Samba presets follow the configurations of the released code, whose gated units have no biases.

    The BASED presets follow the released reference configurations, with a `window_size` of 256, half of which
    is before a step; the text of the paper has windows of 64 to 128 steps.

    The H3 presets follow released configurations too: "h3-hybrid" the configuration for WikiText-103, the
    others the configurations that load the published weights. Their attention has no positions, because the
    layers of H3 encode the order. "h3-125m" has the 126,387,456 parameters that the authors' page prints.

    Args:
        name: a name from `preset_names()`; hyphens and underscores are equivalent.

    Raises:
        ValueError: the preset is unknown; the message gives the nearest name.

    Source:
        GateLoop (Katsch, 2023), appendix C, tables 1, 3 and 4; HGRN (Qin, Yang and Zhong, 2023), section 4.1,
        tables 1 to 5 and 16; the authors' checkpoints OpenNLPLab/HGRN-150M, -355M and -1B; xLSTM (Beck and
        others, 2024), its models of 300B tokens; Griffin (De and others, 2024), the table of its models'
        hyper-parameters; RecurrentGemma (Botev and others, 2024) and its published configuration; Samba (Ren
        and others, 2024) and its released configurations; BASED (Arora and others, 2024) and its released
        configurations; H3 (Fu, Dao and others, 2023), the configurations
        of HazyResearch/safari and HazyResearch/H3.

    Example:
        >>> preset("memory-horizon").n_layers
        4
    """
    return _named(name, _PRESETS, "preset")


def image_preset_names() -> list[str]:
    """Return the names of all presets of image classifiers.

    Example:
        >>> image_preset_names()
        ['deit-tiny', 'deit-small', 'deit-base', 'deit-tiny-hgrn', 'deit-small-hgrn']
    """
    return list(_IMAGE_PRESETS)


def image_preset(name: str) -> ImageClassifierConfig:
    """Return the configuration of a published image classifier.

    - "deit-tiny", "deit-small", "deit-base": DeiT without distillation, table 1. 12 layers of width 192, 384
      and 768, heads of 64 channels, 14 x 14 patches of 16 x 16 pixels with learned positions, a class token;
      5.7M, 22.1M and 86.6M parameters.
    - "deit-tiny-hgrn": HGRN, table 7. 12 layers of width 192, units of 384, 1,000 classes; 6.1M parameters.
    - "deit-small-hgrn": HGRN, table 7. The same with width 384 and units of 768; 23.7M parameters.

    HGRN's paper gives only the two counts, and says that HGRN's layers replace DeiT's attention. Everything
    else follows the authors' released code. Two scans, in raster order and in reverse, share all parameters
    except the phase. There is no positional embedding, and the head reads the mean over patches. A patch is
    14 x 14 pixels, so an image of 224 x 224 has 256 patches. DeiT's own 16 x 16 would give 6.1M and 23.8M.
    Scans of rows and columns, `directions=("right", "left", "down", "up")`, also give 6.1M and 23.7M, so the
    counts do not identify the directions.

    Two things differ from the released code. The outputs of the directions are added instead of their states.
    The norm before the head has weights (384 and 768 parameters more) and stands before the mean. As in the
    language models, the channel mixing is the paper's GLU; the code uses SiLU, `channel_mixing="swiglu"`.

    Args:
        name: a name from `image_preset_names()`; hyphens and underscores are equivalent.

    Raises:
        ValueError: the preset is unknown; the message gives the nearest name.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 4.1 and table 7, and the authors' code for ImageNet; Touvron
        and others, Training data-efficient image transformers (2021), and its code.

    Example:
        >>> image_preset("deit-tiny-hgrn").d_model
        192
    """
    return _named(name, _IMAGE_PRESETS, "image preset")


def _named(name: str, presets: Mapping[str, Callable[[], Config]], kind: str) -> Config:
    make = presets.get(name.replace("_", "-"))
    if make is None:
        raise unknown(kind, name, presets)
    return make()
