"""The picture of perplexity over length: what is drawn, on which axis."""

import math

import pytest

from linrec.lab.evaluation.write import draw_perplexity


def test_windows_training_and_carried_state():
    figure = draw_perplexity([512, 1024, 2048], [24.8, 24.2, 23.8], trained=512, carried=23.5)
    (axes,) = figure.axes
    windows, trained, carried = axes.lines
    assert windows.get_xdata().tolist() == [512, 1024, 2048]
    assert windows.get_ydata().tolist() == [24.8, 24.2, 23.8]
    assert list(trained.get_xdata()) == [512, 512] and list(carried.get_ydata()) == [23.5, 23.5]
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
    figure = draw_perplexity([512, 768], perplexities, trained=512, carried=carried)
    assert figure.axes[0].get_yscale() == scale


@pytest.mark.parametrize("perplexities", [[24.0, math.inf, 25.0], [math.nan] * 3])
def test_what_is_not_finite_leaves_a_gap(perplexities, tmp_path):
    figure = draw_perplexity([512, 1024, 2048], perplexities, trained=512, carried=math.inf)
    assert len(figure.axes[0].lines) == 2 and figure.axes[0].get_yscale() == "linear"
    figure.savefig(tmp_path / "gap.png")
