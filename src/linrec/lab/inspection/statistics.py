"""Statistics of a layer: the distribution of its forget values, and the mean distance of token mixing."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from linrec.lab.inspection.collect import Layer

__all__ = ["Forgetting", "forgetting", "histogram", "reach", "time_scales"]

BINS = 50


@dataclass(frozen=True)
class Forgetting:
    """The distribution of |a| over sequences, steps and channels.

    Args:
        channels: number of channels.
        mean: mean of the values.
        median: median of the values.
        above_090: share of values above 0.9.
        above_099: share of values above 0.99.
        time_scale: median over channels of `time_scales`, in steps.
        longest: largest time scale; infinite if a channel never forgets.
        constant: whether the values are constant over time.
    """

    channels: int
    mean: float
    median: float
    above_090: float
    above_099: float
    time_scale: float
    longest: float
    constant: bool

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON supports them; infinity becomes None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(self).items()
        }


def forgetting(layer: Layer) -> Forgetting | None:
    """Return statistics of the forget values |a| of a layer.

    Args:
        layer: a layer that `inspect_model` returns.

    Returns:
        The statistics; None if the layer has no transitions.

    Source: HGRN (Qin, Yang and Zhong, 2023), table 12, which lists mean and median.

    Example:
        >>> import torch
        >>> found = forgetting(Layer("1", torch.tensor([[[0.5, 0.92], [0.5, 1.0]]])))
        >>> round(found.mean, 2), round(found.median, 2), found.above_090, found.above_099
        (0.73, 0.71, 0.5, 0.25)
    """
    if layer.magnitude is None:
        return None
    values, scales = _values(layer), time_scales(layer)
    return Forgetting(
        channels=len(scales),
        mean=float(values.mean()),
        median=float(np.median(values)),
        above_090=float((values > 0.9).mean()),
        above_099=float((values > 0.99).mean()),
        time_scale=float(np.median(scales)),
        longest=float(scales.max()),
        constant=layer.magnitude.dim() == 1,
    )


def time_scales(layer: Layer) -> Float64[np.ndarray, "c"]:
    """Return tau_c = -1 / mean_t log |a_tc|: the steps in which channel c decays to 1/e, on average.

    Args:
        layer: a layer that has transitions.

    Returns:
        Steps, shape (c,); 0 if a step forgets everything, infinite if no step forgets anything.

    Example:
        >>> import torch
        >>> time_scales(Layer("1", torch.tensor([1.0, 0.0, 0.9]))).round(2).tolist()
        [inf, 0.0, 9.49]
    """
    values = _values(layer)
    with np.errstate(divide="ignore"):
        rate = -np.log(values).reshape(-1, values.shape[-1]).mean(0)
        # abs turns -0.0 into 0.0, whose inverse is +infinity
        return 1 / np.abs(rate)


def histogram(layer: Layer) -> Float64[np.ndarray, "bins"]:
    """Return shares of the forget values |a| in 50 bins of equal width over [0, 1].

    Args:
        layer: a layer that has transitions.

    Returns:
        Shares that add up to 1, shape (50,).

    Source: HGRN (Qin, Yang and Zhong, 2023), figures 2 and 3.
    """
    values = _values(layer)
    counts, _ = np.histogram(values, bins=BINS, range=(0, 1))
    return counts / values.size


def reach(layer: Layer) -> float | None:
    """Return mean_n (sum_m W_nm |n - m| / sum_m W_nm): the mean distance of the steps that a step depends on.

    Args:
        layer: a layer that `inspect_model` returns.

    Returns:
        The distance in steps, averaged over the rows with a non-zero sum; None without such rows or a matrix.

    Example:
        >>> import torch
        >>> reach(Layer("1", mixing=torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])))
        0.25
    """
    if layer.mixing is None:
        return None
    W = layer.mixing.double()
    step = np.arange(W.shape[-1])
    total, far = W.sum(-1).numpy(), (W.numpy() * abs(step[:, None] - step)).sum(-1)
    reached = total > 0
    return float((far[reached] / total[reached]).mean()) if reached.any() else None


def _values(layer: Layer) -> Float64[np.ndarray, "*bt c"]:
    if layer.magnitude is None:
        raise ValueError(f"`layer` must have transitions; layer {layer.name!r} has none.")
    return layer.magnitude.double().numpy()
