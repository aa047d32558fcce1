"""Perplexity over the length of the windows: train short, test long (HGRN, table 14)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from linrec.field_types import read_content
from linrec.lab.report import style

FILE = "perplexity.json"
CURE = "Delete it, or evaluate again."
UNITS = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


class Score(TypedDict):
    """The perplexities of windows of one length; the length is None for the state that is carried."""

    length: int | None
    perplexity: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float | None


class _Perplexity(TypedDict):
    data: str
    trained_length: int
    scores: list[Score]


class Perplexity(_Perplexity, total=False):
    """The fields of `perplexity.json` that readers rely on."""

    split: str | None
    command: str | None


def read_perplexity(folder: Path) -> dict[str, Any] | None:
    """Return the content of `perplexity.json`, which `linrec eval` writes; None without that file.

    Args:
        folder: the run folder.

    Raises:
        RunFolderError: the file is damaged.
    """
    return read_content(folder / FILE, Perplexity, CURE)


def draw_perplexity(
    lengths: Sequence[int],
    perplexities: Sequence[float],
    *,
    trained: int,
    carried: float | None = None,
    label: str = "perplexity per token",
) -> Figure:
    """Draw perplexity over window length, the length of training marked.

    The axis of lengths is logarithmic, in powers of two. That of perplexities is linear, and logarithmic
    where a model falls apart beyond its training length. Values that are not finite leave a gap.

    Args:
        lengths: tokens of a window, ascending.
        perplexities: a perplexity per length.
        trained: tokens of context in training.
        carried: perplexity with the state carried through the whole text; None draws none.
        label: of the vertical axis.

    Returns:
        The picture.

    Source: HGRN (Qin, Yang and Zhong, 2023), table 14, as a picture.

    Example:
        >>> figure = draw_perplexity([512, 1024], [24.9, 24.2], trained=512, carried=23.5)
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['windows', 'length in training: 512', 'state carried through the whole text']
    """
    figure = style.make_figure(height=3.4)
    axes = figure.subplots()
    axes.plot(lengths, perplexities, "o-", color=style.colour(0), markersize=4, label="windows")
    mark = f"length in training: {trained:,}"
    axes.axvline(trained, color=style.GREY, linewidth=1, linestyle=(0, (5, 3)), label=mark)
    if carried is not None and math.isfinite(carried):
        axes.axhline(carried, color=style.colour(1), label="state carried through the whole text")
        # a line across the picture leaves no margin of its own
        axes.update_datalim([(lengths[0], carried)])
        axes.autoscale_view()
    style.finish_axes(axes, x="tokens of a window", y=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    values = [y for y in (*perplexities, carried) if y is not None and math.isfinite(y)]
    if values and max(values) > 10 * min(values):
        axes.set_yscale("log")
    style.add_legend(figure, axes.lines)
    return figure
