"""The encoders that `python -m perf models` compares: equal but for their mixers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from linrec.models import SequenceClassifierConfig, preset

BASELINE = "Transformer"

# GateLoop's language model as its preset reads it: with an output gate and a projection, as HGRN has
MIXER_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {"gate_loop": preset("wikitext103").mixer_args}
"""Arguments with which a mixer is compared, where these differ from its defaults."""


@dataclass(frozen=True)
class Size:
    """The shape of all encoders and of their input.

    The defaults are HGRN's for Text of the Long Range Arena: bytes, two classes, and layers, width, batch and
    dropout of the authors' scripts. Their unit has SiLU; the scripts leave its width to a default, here the
    width of their language models, twice `d_model`.
    """

    batch: int = 32
    n_layers: int = 4
    d_model: int = 128
    d_channel_mixing: int = 256
    dropout: float = 0.1
    vocab_size: int = 256
    n_outputs: int = 2


@dataclass(frozen=True)
class Encoder:
    """One encoder of any size.

    Args:
        name: heads its row; `--models` takes it.
        mixer: a name of `linrec.mixers`.
        options: further arguments of `SequenceClassifierConfig`.
    """

    name: str
    mixer: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self, size: Size) -> SequenceClassifierConfig:
        """Return the configuration at this size."""
        return SequenceClassifierConfig(
            n_outputs=size.n_outputs,
            vocab_size=size.vocab_size,
            n_layers=size.n_layers,
            d_model=size.d_model,
            d_channel_mixing=size.d_channel_mixing,
            channel_mixing="swiglu",
            dropout=size.dropout,
            mixer=self.mixer,
            **{"mixer_args": dict(MIXER_ARGUMENTS.get(self.mixer, {})), **self.options},
        )


ENCODERS = (
    Encoder(BASELINE, "attention", {"bidirectional": False, "mixer_args": {"causal": False}}),
    # the directions share all but the phase, as in the authors' code
    Encoder("HGRN", "hgru", {"unshared": ("theta",)}),
    Encoder("GateLoop", "gate_loop"),
    Encoder("LRU", "lru"),
)
