"""Gates of a mixer at its start, for several tests."""

import math

import torch
from torch import Tensor


def assert_uniform(found: Tensor, low: float, high: float) -> None:
    """Assert that numbers are in a range, and uniform by the test of Kolmogorov and Smirnov at 1%."""
    start = ((found - low) / (high - low)).sort().values
    assert start[0] > -1e-4 and start[-1] < 1 + 1e-4
    steps = (torch.arange(len(start)) + 0.5) / len(start)
    assert (start - steps).abs().max() < 1.63 / math.sqrt(len(start))
