"""Figures of forget values, token-mixing matrices, and transitions over a text."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray
from torch import Tensor

from linrec.lab import style
from linrec.lab.inspection.collect import BINS, Layer, forgetting, histogram, time_scales

# panels per row: as many as stay legible on a narrow screen
COLUMNS = 2
# maximal number of tokens whose names are drawn
NAMED = 40
# weights below this share of a row have the lowest colour
LEAST = 1e-4
TOKEN_LETTERS = 7
# the colours of phases span pi divided by the smallest sufficient divisor
FRACTIONS = (1, 2, 4, 8, 16)
_KINDS = {"magnitude": "magnitude |a|", "phase": "phase arg a (radians)"}


def draw_histograms(layers: Sequence[Layer]) -> Figure | None:
    """Draw a histogram of the forget values |a| of each layer over [0, 1].

    Args:
        layers: the layers that `inspect_model` returns.

    Returns:
        The figure; None if no layer has transitions.

    Source: HGRN (Qin, Yang and Zhong, 2023), figures 2 and 3.

    Example:
        >>> figure = draw_histograms([Layer("1", torch.rand(2, 5, 4)), Layer("2", torch.rand(4))])
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['layer 1', 'layer 2']
    """
    shown = [(layer, found) for layer in layers if (found := forgetting(layer)) is not None]
    if not shown:
        return None
    panels, figure = _panels(len(shown), height=1.7, n_columns=COLUMNS)
    edges = np.linspace(0, 1, BINS + 1)
    for axes, (layer, found) in zip(panels, shown, strict=True):
        axes.stairs(100 * histogram(layer), edges, fill=True, color=style.colour(0), alpha=0.85)
        axes.axvline(found.mean, color="black", linewidth=1.2)
        axes.axvline(found.median, color=style.colour(1), linewidth=1.2, linestyle="--")
        _head(axes, layer.name, f"mean {found.mean:.2f}  median {found.median:.2f}")
        style.finish_axes(axes)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    _name_axes(figure, x="forget value |a|", y="% of values")
    return figure


def draw_token_mixing(layers: Sequence[Layer], labels: Sequence[str] | None = None) -> Figure | None:
    """Draw the token-mixing matrix of each layer: row n shows the weights of all tokens in token n.

    Every row is divided by its sum, so that layers can be compared. Colours are logarithmic, down to 1e-4.
    The first sequence of the batch is drawn.

    Args:
        layers: the layers that `inspect_model` returns.
        labels: names of the tokens, shown for at most 40 tokens; None shows numbers.

    Returns:
        The figure; None if no layer has a matrix.

    Source: HGRN (Qin, Yang and Zhong, 2023), figure 4.

    Example:
        >>> layer = Layer("1", mixing=torch.rand(1, 3, 3).tril())
        >>> figure = draw_token_mixing([layer], labels=["a", "b", "c"])
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['a', 'b', 'c']
    """
    shown = [(layer, layer.mixing[0]) for layer in layers if layer.mixing is not None]
    if not shown:
        return None
    named = labels is not None and len(labels) <= NAMED
    # names need space: each matrix then has the full width, unless there are few tokens
    n_columns = 1 if named and len(labels or ()) > NAMED // 2 else COLUMNS
    panels, figure = _panels(len(shown), height=5.2 if n_columns == 1 else 2.75, n_columns=n_columns)
    colours = colormaps["viridis"].with_extremes(bad="#f0f0f0", under=colormaps["viridis"](0.0))
    image = None
    for axes, (layer, mixing) in zip(panels, shown, strict=True):
        image = axes.imshow(
            _shares(mixing),
            norm=LogNorm(LEAST, 1),
            cmap=colours,
            interpolation="nearest" if named else "auto",
        )
        _head(axes, layer.name)
        style.finish_axes(axes)
        axes.grid(False)
        if named:
            _name_tokens(axes.xaxis, labels or ())
            _name_tokens(axes.yaxis, labels or ())
        else:
            axes.yaxis.set_major_locator(axes.xaxis.get_major_locator())
    assert image is not None
    _name_axes(figure, x="from token", y="to token")
    _bar(figure, image, panels, label="share of the row's weights", location="top")
    return figure


def draw_over_text(
    layers: Sequence[Layer], labels: Sequence[str] | None = None, *, n_steps: int | None = None
) -> Figure | None:
    """Draw magnitudes and phases of the transitions over the first sequence, with a row per channel.

    Channels are sorted by time scale, longest on top, in the same order in both panels. Quantities that are
    constant over time are omitted. Phases are taken modulo 2 pi.

    Args:
        layers: the layers that `inspect_model` returns.
        labels: names of the tokens, shown if at most 40 tokens are drawn; None shows numbers.
        n_steps: number of steps to draw, from the first; None draws all.

    Returns:
        The figure; None if no transition changes over time.

    Source: GateLoop (Katsch, 2023), figure 8.

    Example:
        >>> figure = draw_over_text([Layer("1", torch.rand(1, 99, 4), torch.randn(1, 99, 4))])
        >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
        ['layer 1: magnitude', 'layer 1: phase']
    """
    kinds = [kind for kind in _KINDS if any(_changes(layer, kind) for layer in layers)]
    if not kinds:
        return None
    shown = [layer for layer in layers if any(_changes(layer, kind) for kind in kinds)]
    labels = None if labels is None else labels[:n_steps]
    named = labels is not None and len(labels) <= NAMED
    # names need the full width: the phases of a layer are then below its magnitudes
    n_rows, n_columns = (len(shown) * len(kinds), 1) if named else (len(shown), len(kinds))
    longest = max(map(len, labels)) if named and labels else 0
    figure = style.make_figure(height=(1.2 + 0.07 * longest) * n_rows + 1.0)
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharex=not named)
    drawn: dict[str, AxesImage] = {}
    span = _phase_span(shown)
    for axes, (layer, kind) in zip(panels.flat, itertools.product(shown, kinds), strict=True):
        if not _changes(layer, kind):
            axes.set_axis_off()
            continue
        image = _draw_channels(axes, layer, kind, n_steps, span)
        _head(axes, f"{layer.name}: {kind}")
        drawn[kind] = image
        if named:
            _name_tokens(axes.xaxis, labels or ())
            _bar(figure, image, axes, location="right")
    _name_axes(figure, x="token", y="channels")
    if not named:
        for column, kind in enumerate(kinds):
            _bar(figure, drawn[kind], panels[:, column], label=_KINDS[kind], location="top")
    return figure


def _draw_channels(axes: Axes, layer: Layer, kind: str, n_steps: int | None, span: float) -> AxesImage:
    """Draw a quantity for all channels, sorted by time scale, longest on top."""
    steps = layer.magnitude if kind == "magnitude" else layer.phase
    assert steps is not None
    longest_first = np.argsort(-time_scales(layer), kind="stable")
    values = steps[0, :n_steps].double().numpy()[:, longest_first].T
    n_channels = len(values)
    options: dict[str, Any] = {"cmap": "viridis", "vmin": 0, "vmax": 1}
    if kind == "phase":
        values = np.angle(np.exp(1j * values))
        # a cyclic colour map has equal colours at both ends, which is right only for the full circle
        options = {"cmap": "twilight_shifted" if span == math.pi else "RdBu_r", "vmin": -span, "vmax": span}
    image = style.draw_channels(axes, values, **options)
    style.finish_axes(axes)
    axes.grid(False)
    axes.set_yticks([0, n_channels], ["1", str(n_channels)])
    return image


def _changes(layer: Layer, kind: str) -> bool:
    steps = layer.magnitude if kind == "magnitude" else layer.phase
    return steps is not None and steps.dim() == 3


def _phase_span(layers: Sequence[Layer]) -> float:
    """Return the smallest of pi, pi/2, pi/4, .. that bounds nearly all phases, for the best contrast."""
    phases = [layer.phase[0].double().flatten() for layer in layers if _changes(layer, "phase")]  # type: ignore[index]
    if not phases:
        return math.pi
    size = np.abs(np.angle(np.exp(1j * torch.cat(phases).numpy())))
    largest = float(np.quantile(size, 0.99))
    return min((math.pi / part for part in FRACTIONS if math.pi / part >= largest), default=math.pi)


def _shares(mixing: Tensor) -> NDArray[np.floating]:
    """Divide each row by its sum; mask a triangle that is entirely zero."""
    W = mixing.double()
    shares = (W / W.sum(-1, keepdim=True)).nan_to_num(0).clamp(min=LEAST / 2).numpy()
    ones = np.ones_like(shares, dtype=bool)
    nothing = [part for part in (np.triu(ones, 1), np.tril(ones, -1)) if not W.numpy()[part].any()]
    # a matrix without off-diagonal weights is treated as causal: the upper half is masked
    return np.ma.masked_array(shares, nothing[0] if nothing else ~ones)


def _panels(n: int, *, height: float, n_columns: int) -> tuple[list[Axes], Figure]:
    """Return a figure of n panels, each `height` inches high."""
    n_columns = min(n, n_columns)
    n_rows = -(-n // n_columns)
    figure = style.make_figure(height=height * n_rows + 0.4)
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes in grid.flat[n:]:
        axes.set_axis_off()
    return list(grid.flat[:n]), figure


def _name_axes(figure: Figure, *, x: str, y: str) -> None:
    """Label the axes of all panels at once."""
    figure.supxlabel(x, fontsize=style.LETTERS)
    figure.supylabel(y, fontsize=style.LETTERS)


def _name_tokens(axis: Axis, labels: Sequence[str]) -> None:
    """Write the names of tokens on an axis; on a horizontal axis, names of several characters are rotated."""
    axis.set_ticks(range(len(labels)), labels=list(labels), fontsize=TOKEN_LETTERS)
    for text in axis.get_ticklabels():
        # a dollar sign does not start a formula
        text.set_parse_math(False)
        if isinstance(axis, XAxis) and max(map(len, labels)) > 1:
            text.set_rotation(90)


def _head(axes: Axes, name: str, numbers: str = "") -> None:
    axes.set_title(f"layer {name}", loc="left", fontsize=style.LETTERS)
    axes.set_title(numbers, loc="right", fontsize=style.LETTERS - 2, color=style.GREY)


def _bar(figure: Figure, image: AxesImage, axes: Any, *, location: str, label: str = "") -> None:
    """Add a colour bar to the panels."""
    above = location == "top"
    size: dict[str, Any] = {"shrink": 0.8, "aspect": 40} if above else {"aspect": 10}
    bar = figure.colorbar(image, ax=axes, location=location, pad=0.02, **size)
    bar.set_label(label, fontsize=style.LETTERS)
    bar.ax.tick_params(labelsize=style.LETTERS - 1)
    if isinstance(image.norm, LogNorm):
        return
    low, high = image.get_clim()
    if low == 0:
        bar.set_ticks([0, 0.5, 1], labels=["0", "0.5", "1"])
    else:
        part = round(math.pi / high)
        name = "π" if part == 1 else f"π/{part}"
        bar.set_ticks([low, 0, high], labels=[f"−{name}", "0", name])
