"""Seeded random numbers for tests, independent of the global random state."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["generator", "log_decays", "log_uniform", "normal", "phases", "reset_mask"]


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    """Return a new seeded generator, so that inputs do not depend on the global random state."""
    return torch.Generator(device).manual_seed(seed)


def reset_mask(batch: int, time: int, *, rate: float = 0.1, seed: int = 0, device: str = "cpu") -> Tensor:
    """Return resets (b, t) bool, each true with probability `rate`, independently in every row.

    Example:
        >>> reset_mask(2, 4, rate=1.0).all().item()
        True
    """
    return (torch.rand(batch, time, generator=generator(seed)) < rate).to(device)


def normal(shape: Sequence[int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return normal numbers in double precision; rounding them gives equal inputs in every dtype."""
    return torch.randn(shape, generator=random, dtype=torch.complex128 if dtype.is_complex else torch.float64)


def log_uniform(shape: Sequence[int], random: torch.Generator, low: float, high: float) -> Tensor:
    """Return numbers between `low` and `high` whose logarithms are uniform."""
    return low * (high / low) ** torch.rand(shape, generator=random, dtype=torch.float64)


def log_decays(shape: Sequence[int], random: torch.Generator) -> Tensor:
    """Return log a with time scales 1 / (1 - a) that are log-uniform from 1.05 to 1,000 steps."""
    time_scale = (
        torch.exp(torch.rand(shape, generator=random, dtype=torch.float64) * math.log(1000 / 1.05)) * 1.05
    )
    return torch.log1p(-1 / time_scale)


def phases(shape: Sequence[int], random: torch.Generator) -> Tensor:
    """Return uniform angles in radians, from -pi to pi."""
    return (torch.rand(shape, generator=random, dtype=torch.float64) * 2 - 1) * math.pi
