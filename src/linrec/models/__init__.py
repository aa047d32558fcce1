"""Sequence models: one residual block, one model, presets of the papers."""

from linrec.models.block import Block
from linrec.models.config import ModelConfig
from linrec.models.language_model import LanguageModel
from linrec.models.presets import preset, preset_names

__all__ = ["Block", "LanguageModel", "ModelConfig", "preset", "preset_names"]
