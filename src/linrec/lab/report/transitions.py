"""Magnitudes of the state transitions of a model (GateLoop, figure 5)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from linrec.lab.report import style
from linrec.models import Block
from linrec.nn.gates import Transition

# steps to either side of a reset in the enlarged part
AROUND = 16
RESET = "#D55E00"


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Magnitudes |a| of all state transitions of a model over one sequence.

    Attributes:
        layers: one tensor per layer that has transitions, shape (t, channels), in [0, 1].
        resets: where the sequence has a reset token, shape (t,), bool.
        numbers: which layers of the model these are, counted from 1; None where they are all of them.
    """

    layers: tuple[Float[Tensor, "t c"], ...]
    resets: Bool[Tensor, "t"]
    numbers: tuple[int, ...] | None = None

    @property
    def mean(self) -> Float[Tensor, "t"]:
        """Average over channels, then over layers."""
        return torch.stack([layer.mean(1) for layer in self.layers]).mean(0)

    @property
    def at_resets(self) -> float:
        """Average of `mean` over the steps that are resets; NaN without resets."""
        return float(self.mean[self.resets].mean())

    @property
    def elsewhere(self) -> float:
        """Average of `mean` over all other steps."""
        return float(self.mean[~self.resets].mean())


def transition_magnitudes(
    model: nn.Module, tokens: Int64[Tensor, "t"], reset_token: int | None
) -> Magnitudes | None:
    """Run a model over one sequence and collect |a_n| = exp(log_decay_n) of every layer.

    Args:
        model: maps tokens (b, t) to (logits, state); its transitions are modules `linrec.nn.Transition`. Its
            layers are its modules `Block`, where it has any.
        tokens: the sequence, shape (t,), int64.
        reset_token: the token to mark; None marks nothing.

    Returns:
        The magnitudes, constant in time where the transition is; None where the model has no transitions.

    Source: GateLoop (Katsch 2023), figure 5.

    Example:
        >>> from linrec.models import LanguageModel, ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=8, n_layers=2))
        >>> found = transition_magnitudes(model, torch.tensor([1, 5, 2, 0]), reset_token=5)
        >>> len(found.layers), found.layers[0].shape, found.resets.tolist()
        (2, torch.Size([4, 8]), [False, True, False, False])
    """
    length = len(tokens)
    layers: list[Tensor] = []
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    numbers = [n for n, block in enumerate(blocks, start=1) for m in block.modules() if _is_transition(m)]

    def collect(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor | None]) -> None:
        magnitude = outputs[0].exp().cpu()
        # (1, t, h, dk) where data-controlled, (h, dk) where fixed
        layers.append(magnitude.expand(1, length, *magnitude.shape[-2:]).reshape(length, -1))

    hooks = [m.register_forward_hook(collect) for m in model.modules() if _is_transition(m)]
    try:
        with torch.no_grad():
            model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    resets = torch.zeros(length, dtype=torch.bool) if reset_token is None else tokens.cpu() == reset_token
    return Magnitudes(tuple(layers), resets, tuple(numbers) or None) if layers else None


def draw_transitions(magnitudes: Magnitudes) -> Figure:
    """Draw the magnitudes of every layer over time, and their average over channels and layers below.

    Channels are sorted by their average, largest on top. Resets are marked above and below each layer, where
    a mark covers no value, and by lines in the average. On the right, the steps around one
    reset.

    Args:
        magnitudes: magnitudes of one sequence, from `transition_magnitudes`.

    Source: GateLoop (Katsch 2023), figure 5.

    Example:
        >>> layers = (torch.rand(20, 4), torch.rand(20, 4))
        >>> figure = draw_transitions(Magnitudes(layers, torch.arange(20) == 7))
        >>> figure.axes[0].get_ylabel().split("\\n")
        ['layer 1', '4 channels']
    """
    n_layers, length = len(magnitudes.layers), len(magnitudes.resets)
    resets = magnitudes.resets.nonzero()[:, 0].tolist()
    windows = [(0, length)]
    if resets:
        middle = _loneliest(resets, length)
        windows.append((max(0, middle - AROUND), min(length, middle + AROUND + 1)))

    figure = style.make_figure(height=1.3 * n_layers + 1.9)
    widths = [3.2, 1.0][: len(windows)]
    panels = figure.subplots(
        n_layers + 1, len(windows), sharex="col", sharey="row", squeeze=False, width_ratios=widths
    )
    for row, layer in zip(panels, magnitudes.layers, strict=False):
        largest_first = layer.mean(0).argsort(descending=True, stable=True)
        for axes in row:
            axes.imshow(
                layer[:, largest_first].T.numpy(),
                aspect="auto",
                interpolation="nearest",
                cmap="viridis",
                vmin=0,
                vmax=1,
                extent=(-0.5, length - 0.5, layer.shape[1], 0),
            )
            _mark_resets(axes, resets)
    numbers = magnitudes.numbers or range(1, n_layers + 1)
    for number, layer, axes in zip(numbers, magnitudes.layers, panels[:-1, 0], strict=True):
        n_channels = layer.shape[1]
        axes.set_ylabel(f"layer {number}\n{n_channels} channels", fontsize=style.LETTERS)
        axes.set_yticks([])
    for axes, (start, end) in zip(panels[-1], windows, strict=True):
        axes.plot(magnitudes.mean.numpy(), color="black", linewidth=1.0)
        for reset in resets:
            axes.axvline(reset, color=RESET, linewidth=0.9, zorder=1.5)
        axes.set_ylim(0, 1)
        style.finish_axes(axes, x="step")
        _mark_resets(axes, resets)
        # last, because ticks widen the limits
        axes.set_xlim(start - 0.5, end - 0.5)
    panels[-1, 0].set_ylabel("average", fontsize=style.LETTERS)
    bar = figure.colorbar(
        panels[0, 0].images[0], ax=panels[:-1, :], location="top", shrink=0.6, aspect=40, pad=0.02
    )
    bar.set_label("magnitude of the state transition |a|", fontsize=style.LETTERS)
    bar.ax.tick_params(labelsize=style.LETTERS - 1)
    return figure


def _is_transition(module: nn.Module) -> bool:
    return isinstance(module, Transition)


def _loneliest(resets: list[int], length: int) -> int:
    # the reset that is farthest from the next one and from both ends
    def room(reset: int) -> int:
        return min(abs(reset - other) for other in (-1, length, *resets) if other != reset)

    return max(resets, key=room)


def _mark_resets(axes: Axes, resets: list[int]) -> None:
    # a reset keeps its mark where the axis has a tick of its own
    axes.xaxis.remove_overlapping_locs = False
    axes.set_xticks(resets, minor=True)
    axes.tick_params(which="minor", axis="x", top=True, bottom=True, color=RESET, length=4, width=1.4)
