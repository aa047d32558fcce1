"""The picture of perplexity over length: what is drawn, on which axis."""

import math

import pytest

from linrec.lab.corpora import TextCounts
from linrec.lab.evaluation import Score
from linrec.lab.evaluation.write import draw_perplexity


def drawn(perplexities: list[float], carried: float | None = None):
    """Return the axes of windows of 512, 1024, .. and the carried state."""
    lengths = [512 * 2**place for place in range(len(perplexities))]
    found = [*zip(lengths, perplexities, strict=True), *([] if carried is None else [(None, carried)])]
    scores = [Score(length, math.log(value), 1, TextCounts(tokens=2)) for length, value in found]
    return draw_perplexity(scores, trained=512).axes[0]


def test_windows_training_and_carried_state():
    axes = drawn([24.8, 24.2, 23.8], 23.5)
    windows, trained, carried = axes.lines
    assert windows.get_xdata().tolist() == [512, 1024, 2048]
    assert windows.get_ydata() == pytest.approx([24.8, 24.2, 23.8])
    assert list(trained.get_xdata()) == [512, 512] and carried.get_ydata() == pytest.approx([23.5, 23.5])
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")


@pytest.mark.parametrize(
    ("perplexities", "carried", "scale"),
    [
        # table 14's FLASH, and a state that falls apart where windows do not
        ([24.69, 16950.45], None, "log"),
        ([24.69, 24.7], 1e6, "log"),
        ([24.69, 240.0], None, "linear"),
    ],
)
def test_a_model_that_falls_apart_gets_a_logarithmic_axis(perplexities, carried, scale):
    assert drawn(perplexities, carried).get_yscale() == scale


@pytest.mark.parametrize("perplexities", [[24.0, math.inf, 25.0], [math.nan] * 3])
def test_what_is_not_finite_leaves_a_gap(perplexities, tmp_path):
    axes = drawn(perplexities, math.inf)
    assert len(axes.lines) == 2 and axes.get_yscale() == "linear"
    axes.figure.savefig(tmp_path / "gap.png")
