import json

import numpy as np
import pytest
import torch

from linrec.lab.inspection import Layer, inspect_model
from linrec.lab.report import (
    draw_accuracy_by_span,
    draw_learning_curves,
    draw_score_by_number,
    draw_transitions,
    group_runs,
)
from linrec.lab.style import colour
from linrec.lab.train import load_run
from linrec.models import LanguageModel, ModelConfig


def _arms(*folders):
    return group_runs([load_run(folder) for folder in folders])


def _curves(axes, index):
    """The lines of one arm, but not the level of chance."""
    return [line for line in axes.lines if line.get_color() == colour(index)]


def _accuracy(folder):
    return json.loads((folder / "result.json").read_text())["test"]["accuracy"]


def test_learning_curves_are_means_with_bands_from_lowest_to_highest(make_run):
    arms = _arms(
        make_run("a", transition="data", loss=3.0),
        make_run("b", transition="data", loss=4.0, seed=1),
        make_run("c", transition="fixed", loss=2.0),
    )
    loss, accuracy = draw_learning_curves(arms).axes
    validation, train = _curves(loss, 0)
    assert validation.get_xdata().tolist() == [10, 20, 30]
    assert validation.get_ydata() == pytest.approx([3.4, 3.3, 3.2])
    assert (validation.get_linestyle(), train.get_linestyle()) == ("-", ":")
    assert _curves(loss, 1)[0].get_ydata() == pytest.approx([1.9, 1.8, 1.7])
    # an arm of one run has no band
    assert len(loss.collections) == 2
    band = loss.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((2.7, 3.9))
    assert _curves(accuracy, 0)[0].get_ydata() == pytest.approx([0.1, 0.2, 0.3])


def test_learning_curves_of_runs_logged_at_different_steps_are_interpolated_where_all_have_values(make_run):
    arms = _arms(make_run("a", steps=(10, 20, 30)), make_run("b", steps=(15, 25), loss=5.0, seed=1))
    line = _curves(draw_learning_curves(arms).axes[0], 0)[0]
    assert line.get_xdata().tolist() == [15, 20, 25]
    assert line.get_ydata() == pytest.approx([3.85, 3.8, 3.75])


def test_learning_curves_leave_out_what_is_not_a_number_and_what_is_not_there(make_run):
    folder = make_run("a", steps=())
    assert draw_learning_curves(_arms(folder)) is None
    records = [
        {"step": s, "split": "train", "loss": loss} for s, loss in ((1, 2.0), (2, float("nan")), (3, 1.0))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    figure = draw_learning_curves(_arms(folder))
    assert _curves(figure.axes[0], 0)[0].get_ydata().tolist() == [2.0, 1.0]
    assert _curves(figure.axes[1], 0) == []


def test_accuracy_by_span_is_the_mean_of_the_runs(make_run):
    arms = _arms(
        make_run("a", transition="data", right_to_span=20),
        make_run("b", transition="data", right_to_span=10, seed=1),
        make_run("c", transition="fixed", right_to_span=5),
    )
    figure = draw_accuracy_by_span(arms)
    axes = figure.axes[0]
    data, fixed = (_curves(axes, index)[0] for index in range(2))
    spans = np.array(data.get_xdata())
    # bins are one span wide at this length
    assert spans[:3].tolist() == [1, 2, 3]
    assert data.get_ydata()[spans <= 10].tolist() == [1.0] * 10
    assert data.get_ydata()[(spans > 10) & (spans <= 20)].tolist() == [0.5] * 10
    assert data.get_ydata()[spans > 20].max() == 0
    assert fixed.get_ydata()[4:6].tolist() == [1.0, 0.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "transition: data",
        "transition: fixed",
        "chance 0.02",
    ]


def test_accuracy_by_span_ends_after_what_is_learned(make_run):
    folder = make_run("a")
    result = json.loads((folder / "result.json").read_text())
    # long spans are rare, so one right answer there is noise
    result["test"]["span_curve"] = {
        "width": 10,
        "accuracy": [1.0, 0.9, 0.4, 0.03, 0.02, None, 0.5],
        "count": [900, 800, 700, 600, 500, 0, 2],
    }
    (folder / "result.json").write_text(json.dumps(result))
    axes = draw_accuracy_by_span(_arms(folder)).axes[0]
    assert axes.get_xlim() == pytest.approx((0, 42))
    assert _curves(axes, 0)[0].get_xdata().tolist() == [5.5, 15.5, 25.5, 35.5, 45.5, 65.5]


def test_names_with_dollars_are_no_formulas(make_run):
    arms = _arms(make_run("a", recipe="$\\frac"), make_run("b", recipe="$\\frac$"))
    for draw in (draw_learning_curves, draw_accuracy_by_span):
        draw(arms).draw_without_rendering()


def test_many_arms_with_long_labels_are_told_apart_within_the_picture(make_run):
    names = [f"{'norm_eps: None, output_norm: none, ' * 4}{number}" for number in range(9)]
    arms = _arms(*(make_run(str(n), recipe=name, checkpoint=False) for n, name in enumerate(names)))
    for draw in (draw_learning_curves, draw_accuracy_by_span):
        figure = draw(arms)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert legend.get_window_extent().x0 >= 0
        looks = [(line.get_color(), line.get_linestyle()) for line in legend.get_lines()]
        assert len(set(looks)) == len(looks)


def test_a_score_by_number_has_the_mean_at_each_number_in_their_order(make_run):
    spans = {16: 5, 8: 2, 128: 80}
    made = {
        size: [
            make_run(f"{size}-{seed}", loop={"batch_size": size}, seed=seed, right_to_span=span)
            for seed in (0, 1)
        ]
        for size, span in spans.items()
    }
    axes = draw_score_by_number(_arms(*(folder for folders in made.values() for folder in folders))).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "16", "128"]
    means = [np.mean([_accuracy(folder) for folder in made[size]]) for size in sorted(spans)]
    assert axes.lines[0].get_ydata() == pytest.approx(means)
    assert means[0] < means[1] < means[2] == 1
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("batch_size", "test accuracy")


def test_two_numbers_or_words_have_no_score_by_number(make_run):
    sizes = [make_run(str(size), loop={"batch_size": size}) for size in (8, 16, 128)]
    assert draw_score_by_number(_arms(*sizes)) is not None
    assert draw_score_by_number(_arms(*sizes[:2])) is None
    assert draw_score_by_number(_arms(*sizes, make_run("fixed", transition="fixed"))) is None


def test_accuracy_by_span_needs_results_by_span(make_run):
    unfinished, finished = make_run("a", finished=False), make_run("b")
    assert draw_accuracy_by_span(_arms(unfinished)) is None
    result = json.loads((finished / "result.json").read_text())
    del result["test"]["span_curve"]
    (finished / "result.json").write_text(json.dumps(result))
    assert draw_accuracy_by_span(_arms(finished)) is None


def _layers(length, n=3):
    return [
        Layer(str(i + 1), torch.rand(1, length, 6, generator=torch.Generator().manual_seed(i)))
        for i in range(n)
    ]


def _resets(length, resets):
    return torch.isin(torch.arange(length), torch.tensor(resets, dtype=torch.int64))


def test_transitions_show_every_layer_sorted_and_the_average_with_its_resets():
    layers = _layers(100)
    figure = draw_transitions(layers, _resets(100, [3, 60, 66]))
    *panels, bar = figure.axes
    left, right = panels[0::2], panels[1::2]
    assert len(left) == len(right) == 4
    for axes, layer in zip(left, layers, strict=False):
        drawn = torch.from_numpy(np.array(axes.images[0].get_array()))
        assert drawn.shape == (6, 100)
        assert (drawn.mean(1).diff() <= 0).all()
        torch.testing.assert_close(drawn.mean(0), layer.magnitude[0].mean(1))
        assert axes.images[0].get_clim() == (0, 1)
        assert axes.get_xticks(minor=True).tolist() == [3, 60, 66]
    average, *lines = left[-1].lines
    mean = torch.cat([layer.magnitude[0] for layer in layers], 1).mean(1)
    assert average.get_ydata() == pytest.approx(mean.numpy())
    assert [line.get_xdata()[0] for line in lines] == [3, 60, 66]
    assert left[-1].get_xlim() == (-0.5, 99.5)
    # 60 and 66 are 6 apart, 3 is 4 from the start
    assert right[-1].get_xlim() == (43.5, 76.5)
    assert "|a|" in bar.get_xlabel()


def test_transitions_of_a_hybrid_have_the_numbers_of_their_layers_and_fixed_ones_are_constant_in_time():
    config = ModelConfig(vocab_size=6, d_model=8, n_layers=3, mixer=("attention", "gate_loop", "lru"))
    tokens = torch.tensor([[1, 4, 5, 0, 2, 5, 3]])
    layers = inspect_model(LanguageModel(config).eval(), tokens, token_mixing=False)
    axes = draw_transitions(layers, tokens[0] == 5).axes
    assert [panel.get_ylabel().split("\n")[0] for panel in axes[::2][:2]] == ["layer 2", "layer 3"]
    fixed = axes[2].images[0].get_array()
    assert layers[2].magnitude.dim() == 1 and (fixed == fixed[:, :1]).all() and fixed.shape[1] == 7
    assert draw_transitions(layers[:1], tokens[0] == 5) is None


def test_transitions_without_resets_have_nothing_to_enlarge():
    assert len(draw_transitions(_layers(100), _resets(100, [])).axes) == 3 + 1 + 1


def test_transitions_of_short_sequences_are_enlarged_within_their_ends():
    assert draw_transitions(_layers(5), _resets(5, [4])).axes[-2].get_xlim() == (-0.5, 4.5)
