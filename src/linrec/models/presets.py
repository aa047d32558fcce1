"""Models of the papers, by name."""

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
    # vocabulary: numbers 0 to 4 and the reset token; d_qk, d_v and nr_heads follow d_model, d_h is 1
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
        # in each of their models whose shape is known
        d_channel_mixing=2 * d_model,
        channel_mixing="glu",
        dropout=dropout,
        tie_embeddings=True,
    )


def _xlstm(d_model: int, n_layers: int, slstm_at: Sequence[int]) -> ModelConfig:
    # no repetition of a shorter pattern: the few blocks of sLSTM stand where the paper has them
    blocks = ["slstm" if layer in slstm_at else "mlstm" for layer in range(n_layers)]
    return ModelConfig(
        # GPT-2's BPE in a multiple of 64
        vocab_size=50304,
        d_model=d_model,
        n_layers=n_layers,
        mixer=tuple(blocks),
        # blocks of mLSTM widen the sequence themselves
        channel_mixing=tuple("geglu" if block == "slstm" else "none" for block in blocks),
        # 1.3 d_model, the released code's 4/3, in whole multiples of 64
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
        # pieces of the tokenizer of MassiveText
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
                "bias": True,
            },
        },
        d_channel_mixing=7680,
        channel_mixing="geglu_tanh",
        norm="rms",
        norm_eps=1e-6,
        tie_embeddings=True,
        # the root of the width, as bfloat16 has it
        embedding_scale=50.5,
        head_bias=False,
        logit_cap=30.0,
    )


def _samba(d_model: int, n_layers: int, d_channel_mixing: int) -> ModelConfig:
    return ModelConfig(
        # pieces of LLaMA's tokenizer
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


def _h3(d_model: int, n_layers: int, n_heads: int, attention: Sequence[int]) -> ModelConfig:
    return ModelConfig(
        # GPT-2's BPE in a multiple of 8
        vocab_size=50264,
        d_model=d_model,
        n_layers=n_layers,
        mixer=tuple("attention" if layer in attention else "h3" for layer in range(n_layers)),
        # the recurrence knows the order of steps
        mixer_args={"attention": {"n_heads": n_heads, "positions": "none", "bias": True}},
        d_channel_mixing=4 * d_model,
        tie_embeddings=True,
    )


def _hyena(d_model: int, n_layers: int, d_channel_mixing: int, length: int = 2048) -> ModelConfig:
    return ModelConfig(
        # GPT-2's BPE in a multiple of 8
        vocab_size=50264,
        d_model=d_model,
        n_layers=n_layers,
        mixer="hyena",
        # filters of the released code: the table's four layers are three with sines and one without
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


_PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "memory-horizon": _memory_horizon,
    "wikitext103": _wikitext103,
    # vocabularies: fairseq's of GPT-2's BPE, GPT-2's own, and the 50,272 of the authors' checkpoints
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
    # layers of attention, from 0
    "h3-hybrid": partial(_h3, 768, 12, 12, (1, 8)),
    "h3-125m": partial(_h3, 768, 12, 12, (6,)),
    "h3-355m": partial(_h3, 1024, 24, 16, (8, 16)),
    "h3-1.3b": partial(_h3, 2048, 24, 16, (8, 16)),
    "h3-2.7b": partial(_h3, 2560, 32, 20, (8, 16, 24)),
    # of WikiText-103, whose pieces are of 1,024 steps, and of the Pile
    "hyena-125m": partial(_hyena, 768, 12, 3072, 1024),
    "hyena-slim": partial(_hyena, 768, 18, 1536, 1024),
    "hyena-153m": partial(_hyena, 864, 18, 1728),
    "hyena-355m": partial(_hyena, 1024, 36, 2048),
    "hyena-1.3b": partial(_hyena, 2048, 36, 4096),
    "s5-hyena": _s5_hyena,
}
_IMAGE_PRESETS: dict[str, Callable[[], ImageClassifierConfig]] = {
    "deit-tiny-hgrn": partial(_deit_hgrn, 192),
    "deit-small-hgrn": partial(_deit_hgrn, 384),
}


def preset_names() -> list[str]:
    """Names of all presets.

    Example:
        >>> preset_names()[:3]
        ['memory-horizon', 'wikitext103', 'wikitext103-hgrn']
    """
    return list(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The language model of a paper.

    - "memory-horizon": GateLoop, table 3. 4 layers, widths d_model 64, d_channel_mixing 128, d_qk 64,
      d_v 64, 64 heads of d_h = 1; 6 input tokens, 50 outputs; 154,290 parameters.
    - "wikitext103": GateLoop, table 4, and in each mixer an output gate and an output projection, which the
      paper's equations do not have. 12 layers, widths 624 / 1872 / 624 / 624, 624 heads of d_h = 1, the
      50,257 tokens of GPT-2's BPE, embedding and head untied; 123.6M parameters.
    - "wikitext103-hgrn": HGRN, table 1. 6 layers of width 512 with gated linear units of 1,024, embedding and
      head tied; the 50,265 tokens that fairseq makes of the same BPE; 46.25M parameters.
    - "hgrn-125m": HGRN, table 2, "GPT-2 small size (125M)" on WikiText-103. 11 layers of width 768, units of
      1,536, the 50,257 tokens of GPT-2's BPE; 123.1M parameters.
    - "hgrn-150m", "hgrn-350m", "hgrn-1b": HGRN, tables 3 to 5, on the Pile. 14 layers of width 768, 22 of
      1,024 and 16 of 2,048, units of twice the width, 50,272 tokens; 146.2M, 351.8M and 976.1M parameters.
    - "xlstm-7-1-125m", "xlstm-7-1-350m", "xlstm-7-1-760m", "xlstm-7-1-1.3b": xLSTM[7:1], hybrids of mLSTM and
      sLSTM, on SlimPajama. 24 layers of width 768, 48 of 1,024, of 1,536 and of 2,048; 163.7M, 408.5M, 839.9M
      and 1,420.2M parameters.
    - "griffin", "griffin-1.3b", "griffin-7b": Griffin's models of 100M, 1.3B and 7B: two layers of Hawk, then
      one of local multi-query attention. 12 layers of width 768, 24 of 2,048 and 32 of 4,096, recurrences of
      1,024, 2,560 and 5,632, units of three times the width, 32,000 tokens; 113.9M, 1,308.5M and 6,921.2M
      parameters.
    - "hawk", "hawk-1.3b": the same without attention; 118.4M and 1,369.8M parameters.
    - "recurrent-gemma-2b": RecurrentGemma-2B as released, 26 layers of width 2,560, 256,000 tokens; 2,682.9M
      parameters. `linrec.convert` makes it of the published weights.
    - "samba", "samba-1.3b": Samba, the models of 421M and 1.3B: Mamba and attention to the last 2,048 steps
      in turn. 12 layers of width 1,536 and 18 of 2,304, SwiGLU of 4,096 and 6,144, 32,000 tokens; 421.9M and
      1,330.5M parameters.
    - "h3-hybrid": H3 with attention in two of 12 layers, the second and the ninth. Width 768, the 50,257
      tokens of GPT-2's BPE in a multiple of 8; 126.1M parameters.
    - "h3-125m", "h3-355m", "h3-1.3b", "h3-2.7b": H3's published models of the Pile, with attention in one,
      two, two and three layers. 12 layers of width 768, 24 of 1,024 and of 2,048, 32 of 2,560; 126.4M,
      361.1M, 1,326.1M and 2,670.3M parameters.
    - "hyena-125m", "hyena-slim": Hyena, its models of WikiText-103, the second deeper and thinner. 12 and 18
      layers of width 768, units of 3,072 and 1,536, filters of 1,024 taps, GPT-2's BPE in a multiple of 8;
      124.9M and 125.6M parameters.
    - "hyena-153m", "hyena-355m", "hyena-1.3b": Hyena, its models of the Pile, with filters of 2,048 taps. 18
      layers of width 864, 36 of 1,024 and of 2,048, units of twice the width; 153.7M, 359.5M and 1,320.2M
      parameters.
    - "s5-hyena": the released model of WikiText-103 that has S5 for Hyena's filters. 12 layers of width 768,
      units of 3,072, the 50,257 tokens of GPT-2's BPE; 128.5M parameters.

    GateLoop's paper gives 125M parameters for the second and no count of its parts. Equations 24 and 25 with
    the "simple FNN" of appendix C, all with biases, make 114.3M; with an output projection in the mixer
    118.9M; with an output gate as well 123.6M, nearest to 125M, and tied embeddings would put every reading
    under 93M. A gated linear unit as channel mixing would make 128.3M, but the paper says FNN. So this preset
    has the gate and the projection; `mixer_args={}` is the layer to the letter.

    HGRN says "GLU" and gives no formula. The authors' code of table 1 has no activation,
    `channel_mixing="bilinear"`, and their published models of the Pile SiLU, "swiglu". Dropout of 0.1 on
    WikiText-103 is from their code too.

    HGRN gives no width or depth of its larger models, only their sizes. That of 150M is the published
    configuration of HGRN-150M, but for its missing biases, which the paper's equations have. Those of 350M
    and 1B are the shapes of that kind (width 1,024 and 2,048, tied embeddings) that have the sizes of the
    published weights of HGRN-355M and HGRN-1B, 1.41 and 3.9 GB in float32. Of the one of 125M nothing is
    known: with the width of GPT-2 small 11 layers come nearest, and its 12 would make 130.8M.

    Of xLSTM[7:1] a few blocks near the input and near the output are of sLSTM, with a gated unit behind.
    Shapes and places are the paper's, the units' widths the released code's. Biases of norms and units, which
    that code has not, are what the counts have more than the paper's 163.7M, 408.4M, 839.7M and 1,420.1M.
    Mixers start as in the released code, with their places among all blocks; the embedding, the head and the
    gated units start as in the other presets.

    Griffin's paper gives widths, depths and heads, and names its models by their sizes. It leaves open how
    many channels of attention's heads turn with their positions; here all do, in RecurrentGemma one half.
    Biases of queries, keys and values, which RecurrentGemma has not, are zeros in what is converted.

    Samba's are the configurations of the released code, whose gated units have no biases.

    H3's are too: the first that of WikiText-103, the others those that the published weights are loaded with.
    Attention knows no positions there, which the layers of H3 do. The smallest has the 126,387,456 parameters
    that the authors' page prints.

    Args:
        name: one of `preset_names()`; hyphens and underscores are equal.

    Raises:
        ValueError: there is no such preset; the message names the nearest one.

    Source:
        GateLoop (Katsch, 2023), appendix C, tables 1, 3 and 4; HGRN (Qin, Yang and Zhong, 2023), section 4.1,
        tables 1 to 5 and 16; the authors' checkpoints OpenNLPLab/HGRN-150M, -355M and -1B; xLSTM (Beck and
        others, 2024), its models of 300B tokens; Griffin (De and others, 2024), the table of its models'
        hyper-parameters; RecurrentGemma (Botev and others, 2024) and its published configuration; Samba (Ren
        and others, 2024) and its released configurations; H3 (Fu, Dao and others, 2023), the configurations
        of HazyResearch/safari and HazyResearch/H3.

    Example:
        >>> preset("memory-horizon").n_layers
        4
    """
    return _named(name, _PRESETS, "preset")


def image_preset_names() -> list[str]:
    """Names of all presets of image classifiers.

    Example:
        >>> image_preset_names()
        ['deit-tiny-hgrn', 'deit-small-hgrn']
    """
    return list(_IMAGE_PRESETS)


def image_preset(name: str) -> ImageClassifierConfig:
    """The image classifier of a paper.

    - "deit-tiny-hgrn": HGRN, table 7. 12 layers of width 192, units of 384, 1,000 classes; 6.1M parameters.
    - "deit-small-hgrn": HGRN, table 7. The same with width 384 and units of 768; 23.7M parameters.

    The paper gives the two counts, says that HGRN's layers replace those of DeiT, and no more. The rest is
    the authors' released code: one scan in raster order and one against it, which share all but the phase, no
    positional embedding, the mean over patches, and patches of 14 x 14 pixels, 256 of an image of 224. DeiT's
    own 16 x 16 would make 6.1M and 23.8M. Rows and columns, `directions=("right", "left", "down", "up")`,
    are 6.1M and 23.7M as well, so the counts do not tell one from the other.

    Two things differ from that code: the outputs of the directions are added instead of their states, and the
    norm before the head has weights (384 and 768 parameters more) and stands before the mean. As in the
    language models, the unit is the GLU of the paper's word; the code has SiLU, `channel_mixing="swiglu"`.

    Args:
        name: one of `image_preset_names()`; hyphens and underscores are equal.

    Raises:
        ValueError: there is no such preset; the message names the nearest one.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 4.1 and table 7, and the authors' code for ImageNet.

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
