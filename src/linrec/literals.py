"""Literal types of string arguments, for the library and the command line.

This module does not import PyTorch, because the command line imports it at startup.
"""

from typing import Literal, TypeAlias

__all__ = ["DeviceName", "Precision", "SplitName"]

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]
Precision: TypeAlias = Literal["32-true", "bf16-mixed"]
SplitName: TypeAlias = Literal["train", "validation", "test"]
