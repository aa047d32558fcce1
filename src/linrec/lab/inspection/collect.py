"""Transitions and token-mixing matrices of a model's mixers on one input, and their statistics by layer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from linrec.mixers import Mixer
from linrec.models.bidirectional import Directions
from linrec.nn.documents import turned_round

BINS = 50
# directions whose mixer runs from the last step to the first
AGAINST = ("backward", "left", "up")


@dataclass(frozen=True, eq=False)
class Layer:
    """Transitions and token mixing of one mixer on one input.

        a_t = magnitude_t exp(i phase_t)        y_n = sum_m W_nm v_m, with the mean of |W_nm| in `mixing`

    Steps are in the order of the input, even if the mixer ran in reverse.

    Args:
        name: number of the layer, from "1"; with the direction if the layer has several, as in "1 backward".
        magnitude: |a|, shape (b, t, c), or (c,) if constant over time; None if the mixer has no transitions.
        phase: arg a in radians, shape (b, t, c) or (c,); None if a is real, or if the mixer has no
            transitions.
        mixing: (b, t, t), entry (n, m) is the weight of step m in step n; None if the mixer has no such
            matrix, or if it was not requested.
    """

    name: str
    magnitude: Float[Tensor, "*bt c"] | None = None
    phase: Float[Tensor, "*bt c"] | None = None
    mixing: Float[Tensor, "b t t"] | None = None


def inspect_model(
    model: nn.Module, *inputs: Any, token_mixing: bool = True, **arguments: Any
) -> tuple[Layer, ...]:
    """Run a model once, and return the transitions and token-mixing matrix of every mixer in it.

    The model may be any module that contains mixers: each mixer is inspected on its own input in that run. A
    `Bidirectional` or an `ImageScan` gives one layer per direction. In an `ImageScan`, the batch then
    consists of the lines of the images, one image after the other. Dropout follows the model's mode: call
    `model.eval()`.

    Args:
        model: a mixer, or a module that contains mixers.
        inputs: positional arguments of the model, such as tokens (b, t).
        token_mixing: whether to compute the matrices, which need memory quadratic in the length.
        arguments: keyword arguments of the model, such as `reset`.

    Returns:
        The layers in order, with tensors on the CPU.

    Raises:
        ValueError: no mixer ran.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), table 12, figures 2 to 4; GateLoop (Katsch, 2023), figure 8.

    Example:
        >>> from linrec.models import LanguageModel, ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=8, n_layers=2)).eval()
        >>> layers = inspect_model(model, torch.tensor([[1, 5, 2, 0]]))
        >>> [layer.name for layer in layers], layers[0].magnitude.shape, layers[0].mixing.shape
        (['1', '2'], torch.Size([1, 4, 8]), torch.Size([1, 4, 4]))
    """
    found: list[list[Layer]] = []
    hooks = []
    for number, mixer in enumerate(dict.fromkeys(_outermost(model)), start=1):
        of_layer: list[Layer] = []
        found.append(of_layer)
        directions = mixer.directions if isinstance(mixer, Directions) else ()
        hook = partial(_collect, of_layer, str(number), directions, token_mixing)
        for inner in mixer.mixers if isinstance(mixer, Directions) else [mixer]:
            hooks.append(inner.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*inputs, **arguments)
    finally:
        for handle in hooks:
            handle.remove()
    layers = tuple(layer for of_layer in found for layer in of_layer)
    if not layers:
        raise ValueError(
            f"`model` must run at least one `linrec.mixers.Mixer`; got {type(model).__name__} "
            "without a mixer. Pass a model of `linrec.models`, or a module that contains mixers."
        )
    return layers


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


def _outermost(model: nn.Module) -> Iterator[Mixer]:
    """Yield the mixers that are not inside another mixer."""
    if isinstance(model, Mixer):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _collect(
    of_layer: list[Layer],
    number: str,
    directions: tuple[str, ...],
    token_mixing: bool,
    mixer: Mixer,
    inputs: tuple[Tensor, ...],
    arguments: dict[str, Any],
) -> None:
    """Record the transitions and token mixing of a mixer that is about to run."""
    x, reset = inputs[0], arguments.get("reset")
    # directions run in order, with a mixer each or with a shared mixer
    direction = directions[len(of_layer) % len(directions)] if directions else None
    transitions = mixer.transitions(x)
    mixing = mixer.token_mixing(x, reset=reset) if token_mixing else None
    magnitude, phase = (None, None) if transitions is None else transitions
    if direction in AGAINST:
        magnitude, phase = _turned(magnitude, reset), _turned(phase, reset)
        if mixing is not None:
            mixing = turned_round(turned_round(mixing, reset).mT, reset).mT
    name = number if direction is None else f"{number} {direction}"
    of_layer.append(Layer(name, _kept(magnitude), _kept(phase), _kept(mixing)))


def _turned(steps: Tensor | None, reset: Tensor | None) -> Tensor | None:
    """Return steps in the order of the input; a tensor without a time axis stays as it is."""
    return turned_round(steps, reset) if steps is not None and steps.dim() == 3 else steps


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def _values(layer: Layer) -> Float64[np.ndarray, "*bt c"]:
    if layer.magnitude is None:
        raise ValueError(f"`layer` must have transitions; layer {layer.name!r} has none.")
    return layer.magnitude.double().numpy()
