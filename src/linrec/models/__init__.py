"""Sequence models: one residual block, one model, presets of the papers."""

from linrec.models.block import Block
from linrec.models.config import ModelConfig, StackConfig
from linrec.models.language_model import LanguageModel
from linrec.models.presets import preset, preset_names
from linrec.models.stack import make_blocks

__all__ = ["Block", "LanguageModel", "ModelConfig", "StackConfig", "make_blocks", "preset", "preset_names"]
