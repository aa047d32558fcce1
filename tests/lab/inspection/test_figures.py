"""Pictures show the numbers that they are given."""

import math

import numpy as np
import pytest
import torch

from linrec.lab.inspection import (
    Layer,
    draw_histograms,
    draw_over_text,
    draw_token_mixing,
    histogram,
    time_scales,
)
from linrec.testing import generator

TIME, CHANNELS = 50, 6


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=generator(seed))


def two_layers(phases: float = 9.0) -> list[Layer]:
    return [
        Layer(
            name,
            random(2, TIME, CHANNELS, seed=seed),
            phases * (2 * random(2, TIME, CHANNELS, seed=seed + 5) - 1),
            random(2, TIME, TIME, seed=seed + 9).tril(),
        )
        for seed, name in enumerate(("1", "2"))
    ]


def shown(figure) -> list:
    return [axes for axes in figure.axes if axes.get_title(loc="left")]


def test_histograms():
    layers = [*two_layers(), Layer("3", mixing=torch.ones(1, 2, 2))]
    panels = shown(draw_histograms(layers))
    assert [axes.get_title(loc="left") for axes in panels] == ["layer 1", "layer 2"]
    for axes, layer in zip(panels, layers, strict=False):
        (stairs,) = axes.patches
        assert stairs.get_data().values == pytest.approx(100 * histogram(layer))
        mean, median = float(layer.magnitude.mean()), float(np.median(layer.magnitude))
        assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([mean, median])
        assert axes.get_title(loc="right") == f"mean {mean:.2f}  median {median:.2f}"
    assert draw_histograms(layers[2:]) is None


def test_rows_of_token_mixing_are_shares():
    layers = two_layers()
    panels = shown(draw_token_mixing(layers))
    assert len(panels) == 2
    for axes, layer in zip(panels, layers, strict=True):
        drawn = axes.images[0].get_array()
        W = layer.mixing[0].double().numpy()
        assert drawn.filled(0) == pytest.approx(np.maximum(W / W.sum(1, keepdims=True), 5e-5) * (W > 0))
        # what cannot be is no colour at all
        assert (drawn.mask == (np.arange(TIME) > np.arange(TIME)[:, None])).all()
    backward = Layer("1 backward", mixing=layers[0].mixing.flip(1, 2))
    both = Layer("1", mixing=random(1, TIME, TIME))
    masks = [axes.images[0].get_array().mask for axes in shown(draw_token_mixing([backward, both]))]
    assert (masks[0] == (np.arange(TIME) < np.arange(TIME)[:, None])).all() and not masks[1].any()
    assert draw_token_mixing([Layer("1", torch.ones(3))]) is None


def test_a_token_that_nothing_reaches_has_the_colour_of_nothing():
    W = torch.tensor([[[0.0, 0.0], [0.2, 0.6]]])
    drawn = shown(draw_token_mixing([Layer("1", mixing=W)]))[0].images[0].get_array()
    assert drawn.filled(-1).tolist() == [[5e-5, -1], pytest.approx([0.25, 0.75])]


def test_tokens_are_named_where_there_is_room():
    few = [Layer("1", random(1, 3, 4), None, random(1, 3, 3).tril())]
    labels = ["the", "$x$", "."]
    (matrix,) = shown(draw_token_mixing(few, labels))
    (text,) = shown(draw_over_text(few, labels))
    for axis in (matrix.xaxis, matrix.yaxis, text.xaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == labels
        assert not any(label.get_parse_math() for label in axis.get_ticklabels())
        assert axis.get_ticklocs().tolist() == [0, 1, 2]
    many = [str(number) for number in range(TIME)]
    for figure in (draw_token_mixing(two_layers(), many), draw_over_text(two_layers(), many)):
        assert shown(figure)[0].get_xticks().tolist() != list(range(TIME))


def test_over_text_channels_are_sorted_and_phases_are_turned_into_one_circle():
    layers = two_layers()
    titles = [f"layer {n}: {kind}" for n in (1, 2) for kind in ("magnitude", "phase")]
    for labels, n_steps in ((None, None), (["a"] * TIME, 40)):
        panels = shown(draw_over_text(layers, labels, n_steps=n_steps))
        assert [axes.get_title(loc="left") for axes in panels] == titles
        for layer, (magnitude, phase) in zip(layers, (panels[:2], panels[2:]), strict=True):
            order = np.argsort(-time_scales(layer))
            expected = layer.magnitude[0, :n_steps].numpy()[:, order].T
            assert np.asarray(magnitude.images[0].get_array()) == pytest.approx(expected)
            drawn = np.asarray(phase.images[0].get_array())
            turns = (drawn - layer.phase[0, :n_steps].numpy()[:, order].T) / (2 * math.pi)
            assert turns == pytest.approx(np.round(turns), abs=1e-6)
            assert abs(drawn).max() <= math.pi + 1e-6
            assert phase.images[0].get_clim() == (-math.pi, math.pi)


def test_small_phases_have_colours_of_their_own():
    phase = shown(draw_over_text(two_layers(phases=0.7)))[1].images[0]
    assert phase.get_clim() == (-math.pi / 4, math.pi / 4)


def test_constants_are_left_out():
    constant, changing = random(CHANNELS), random(1, TIME, CHANNELS)
    assert draw_over_text([Layer("1", constant, constant), Layer("2")]) is None
    panels = shown(draw_over_text([Layer("1", changing, constant), Layer("2", constant)]))
    assert [axes.get_title(loc="left") for axes in panels] == ["layer 1: magnitude"]
