"""Words that arguments take, in the library and on the command line.

This module does without PyTorch, because the command line starts with it.
"""

from typing import Literal, TypeAlias

__all__ = ["DeviceName", "Precision", "SplitName"]

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]
Precision: TypeAlias = Literal["32-true", "bf16-mixed"]
SplitName: TypeAlias = Literal["train", "validation", "test"]
