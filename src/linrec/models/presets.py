"""Models of the papers, by name."""

from linrec.errors import unknown
from linrec.models.config import ModelConfig

__all__ = ["preset", "preset_names"]


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


def _wikitext103_hgrn() -> ModelConfig:
    return ModelConfig(
        vocab_size=50265,
        d_model=512,
        n_layers=6,
        mixer="hgru",
        d_channel_mixing=1024,
        channel_mixing="glu",
        dropout=0.1,
        tie_embeddings=True,
    )


_PRESETS = {
    "memory-horizon": _memory_horizon,
    "wikitext103": _wikitext103,
    "wikitext103-hgrn": _wikitext103_hgrn,
}


def preset_names() -> list[str]:
    """Names of all presets.

    Example:
        >>> preset_names()
        ['memory-horizon', 'wikitext103', 'wikitext103-hgrn']
    """
    return list(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The model of a paper.

    - "memory-horizon": GateLoop, table 3. 4 layers, widths d_model 64, d_channel_mixing 128, d_qk 64,
      d_v 64, 64 heads of d_h = 1; 6 input tokens, 50 outputs; 154,290 parameters.
    - "wikitext103": GateLoop, table 4. 12 layers, widths 624 / 1872 / 624 / 624, 624 heads of d_h = 1, the
      50,257 tokens of GPT-2's BPE, embedding and head untied.
    - "wikitext103-hgrn": HGRN, table 1. 6 layers of width 512 with gated linear units of 1,024, embedding and
      head tied; the 50,265 tokens that fairseq makes of the same BPE; 46.25M parameters.

    The paper gives 125M parameters for the second and no count of its parts. Equations 24 and 25 with the
    "simple FNN" of appendix C, all with biases, make 114.3M; with an output projection in the mixer 118.9M;
    with an output gate as well 123.6M, nearest to 125M, and tied embeddings would put every reading under
    93M. A gated linear unit as channel mixing would make 128.3M, but the paper says FNN. So this preset
    has the gate and the projection; `mixer_args={}` is the layer to the letter.

    HGRN says "GLU" and gives no formula; the authors' code has no activation, `channel_mixing="bilinear"`.
    Dropout of 0.1 is from their code too.

    Args:
        name: one of `preset_names()`; hyphens and underscores are equal.

    Raises:
        ValueError: there is no such preset; the message names the nearest one.

    Source:
        GateLoop (Katsch, 2023), appendix C, tables 1, 3 and 4; HGRN (Qin, Yang and Zhong, 2023), tables 1
        and 16.

    Example:
        >>> preset("memory-horizon").n_layers
        4
    """
    make = _PRESETS.get(name.replace("_", "-"))
    if make is None:
        raise unknown("preset", name, _PRESETS)
    return make()
