"""FalconMamba, as in `FalconMambaForCausalLM` of transformers: Mamba with norms of s, B and C."""

import dataclasses

from linrec.convert import mamba
from linrec.convert.checkpoint import Options
from linrec.convert.mamba import layout
from linrec.models import ModelConfig

__all__ = ["config", "layout"]


def config(options: Options) -> ModelConfig:
    """Return the model configuration that config.json describes."""
    found = mamba.config(options)
    norm = {"inner_norm": "rms", "norm_eps": options.read("mixer_rms_eps", float)}
    return dataclasses.replace(found, mixer_args={**found.mixer_args, **norm})
