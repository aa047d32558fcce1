"""Collect the transitions and token-mixing matrices of a model's mixers on one input, layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.mixers import Mixer
from linrec.models.bidirectional import Directions

__all__ = ["Layer", "inspect_model"]

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
        magnitude, phase = _turned(magnitude), _turned(phase)
        mixing = None if mixing is None else mixing.flip(1, 2)
    name = number if direction is None else f"{number} {direction}"
    of_layer.append(Layer(name, _kept(magnitude), _kept(phase), _kept(mixing)))


def _turned(steps: Tensor | None) -> Tensor | None:
    """Return steps in the order of the input; a tensor without a time axis stays as it is."""
    return steps.flip(1) if steps is not None and steps.dim() == 3 else steps


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()
