import html
import re

import pytest

from linrec.lab.bench import write_page
from linrec.lab.bench.page import pictures
from linrec.lab.bench.rows import level, standings
from tests.tiers import thorough


def row(
    mixer, seed=0, *, score=0.5, status="done", task="copying", metric="accuracy", lr=0.01, loss=1.0, **more
):
    made = {
        **{"task": task, "mixer": mixer, "seed": seed, "trial": "", "parameters": 1234, "state_size": 16},
        **{"chance": None, "trivial_score": None, "speed_by_length": None, "state_elements": None},
        **{"metric": metric, "status": status, "message": "", "lr": lr, "d_model": 8},
        **{"peak_bytes": {"device": None, "process": 2**20}, "folder": f"b/{task}/{mixer}/seed-{seed}"},
        **{"command": f"linrec bench smoke --mixers {mixer}", "config": {"name": "<recipe> & more"}},
    }
    if status == "done":
        made |= {
            **{"score": score, "test": {"loss": loss, "accuracy": score}, "validation": {"loss": loss}},
            **{"curve": [[1, 2.0, 0.1], [2, loss, score]], "tokens_per_second": 10.0, "seconds": 1.0},
            **{"probes": {"5": {"accuracy": score, "loss": 1}, "20": {"accuracy": 0.2, "loss": 1}}},
            **{"device": {"name": "a <device>"}, "chance": 0.125, "trivial_score": 0.55},
            "speed_by_length": [
                {"length": length, "batch_size": 1, "tokens_per_second": 9.0, "step_bytes": length * 2**20}
                for length in (5, 20, 80)
            ],
        }
    return made | more


def cells(page):
    body = re.search(r"<tbody>\n(.*?)\n</tbody>", page, re.DOTALL)[1]
    return [
        [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall("<td.*?</td>", line, re.DOTALL)]
        for line in re.findall("<tr>.*?</tr>", body, re.DOTALL)
    ]


@thorough
def test_a_page_has_means_and_spreads_and_holds_everything_itself(tmp_path):
    rows = [row("gla", score=0.5), row("gla", 1, score=0.7), row("lru", score=1.0, state_size=0)]
    page = write_page(rows, tmp_path, title="a <suite>").read_text()
    (gla, lru) = cells(page)
    assert gla[:5] == ["copying", "gla", "0.600", "0.141", "accuracy"]
    assert gla[5:13] == ["0.125", "0.550", "0.200 at 20", "2", "1,234", "16", "10", "1"]
    assert lru[:5] == ["copying", "lru", "1.000", "1 seed", "accuracy"]
    assert "linrec bench smoke --mixers gla" in gla[-1] and "<recipe> & more" in gla[-1]
    assert "<h1>a &lt;suite&gt;</h1>" in page and "3 of 3 jobs are done. a &lt;device&gt;" in page
    # nothing is fetched, and each picture is inside and beside the page
    assert not re.search(r'(src|href)="(?!data:)', page)
    names = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert names == {"copying-curves", "copying-lengths", "copying-states", "copying-speed"}
    assert page.count("data:image/png;base64,") == 4
    assert "What is missing" not in page


def test_what_failed_and_what_was_not_run_is_said(tmp_path):
    rows = [row("gla", status="diverged", message="the loss is <not> finite"), row("lru", status="not run")]
    page = write_page(rows, tmp_path, title="suite").read_text()
    assert "b/copying/gla/seed-0: diverged: the loss is &lt;not&gt; finite" in page
    assert "Jobs that have not been run: 1" in page and "0 of 2 jobs are done" in page
    assert [line[:3] for line in cells(page)] == [
        ["copying", "gla", "diverged"],
        ["copying", "lru", "not run"],
    ]
    # what was to be run is there all the same
    for line in cells(page):
        assert line[4] == "accuracy" and line[7:13] == ["", "", "1,234", "", "", ""]
        assert f"linrec bench smoke --mixers {line[1]}" in line[-1] and "<recipe> & more" in line[-1]
    assert not list((tmp_path / "pictures").iterdir())


def test_seeds_that_are_missing_and_states_that_grow(tmp_path):
    rows = [row("attention", state_elements=2048), row("attention", 1, status="killed")]
    (line,) = cells(write_page(rows, tmp_path, title="suite").read_text())
    assert line[8:11] == ["1 of 2", "1,234", "2,048"]


def test_a_level_is_what_any_job_of_the_task_says():
    rows = [row("gla", status="killed"), row("lru"), row("lru", task="adding", status="killed")]
    assert level(rows, "copying", "chance") == 0.125 and level(rows, "copying", "trivial_score") == 0.55
    assert level(rows, "adding", "chance") is None


def test_of_several_rates_the_one_of_the_lowest_validation_loss_counts():
    tried = [row("gla", lr=0.1, loss=0.3, score=0.1), row("gla", lr=0.01, loss=0.2, score=0.9)]
    (standing,) = standings(
        [*tried, row("gla", 1, lr=0.01, loss=0.9, score=0.8), row("gla", 2, status="killed")]
    )
    assert standing.scores == [0.9, 0.8] and [row["status"] for row in standing.failed] == ["killed"]


def test_lengths_are_those_that_all_seeds_were_probed_with():
    of_more = {str(length): {"accuracy": length / 100, "loss": 1.0} for length in (5, 20, 40)}
    kinds = {"64x4": {"accuracy": 1.0, "loss": 0.0}}
    (standing,) = standings(
        [row("gla", probes=of_more), row("gla", 1, probes=of_more | kinds), row("gla", 2)]
    )
    assert standing.probes == {"length": {5: [0.05, 0.05, 0.5], 20: [0.2, 0.2, 0.2]}}


@thorough
def test_scores_by_noise_begin_with_the_test_split(tmp_path):
    levels = {"noise": (0.3, 0.1), "salt-and-pepper": (0.03, 0.05, 0.2)}
    probes = {
        f"{kind} {level}": {"accuracy": 0.5 - level, "loss": 1.0} for kind in levels for level in levels[kind]
    }
    # a probe of the other task is named by a folder, which is no kind of noise
    rows = [row("gla", score=0.5, probes=probes), row("gla", 1, score=0.75, probes=probes)]
    rows.append(row("gla", task="adding", probes={"mnist 2": {"accuracy": 1.0, "loss": 0.0}}))
    (standing, other) = table = standings(rows)
    assert other.probes == {}
    assert standing.probes.keys() == levels.keys()
    assert [*standing.probes["noise"].items()] == [(0, [0.5, 0.75]), (0.1, [0.4, 0.4]), (0.3, [0.2, 0.2])]
    (drawing,) = (drawing for drawing in pictures("copying", table) if drawing.name.endswith("-noise"))
    assert drawing.title == "copying: score by noise"
    white, salt = drawing.figure.axes
    assert white.get_xlabel() == "standard deviation of white noise"
    assert salt.get_xlabel() == "share of pixels made black or white"
    assert white.lines[0].get_xydata().tolist() == [[0, 0.625], [0.1, 0.4], [0.3, 0.2]]
    # 0.03 and 0.05 are too close for two labels
    assert [label.get_text() for label in salt.get_xticklabels()] == ["0", "0.03", "0.2"]
    assert white.get_xscale() == salt.get_xscale() == "linear"
    write_page(rows, tmp_path, title="suite")
    assert (tmp_path / "pictures" / "copying-noise.png").exists()
    assert not (tmp_path / "pictures" / "copying-lengths.png").exists()


def test_a_loss_that_is_no_number_is_the_lowest_of_none():
    tried = [row("gla", lr=0.1, loss=float("nan"), score=0.1), row("gla", lr=0.01, loss=0.2, score=0.9)]
    (standing,) = standings(tried)
    assert standing.scores == [0.9]


@pytest.mark.parametrize("metric", ["mse", "perplexity"])
def test_other_scores_than_accuracies(tmp_path, metric):
    rows = [row("gla", score=0.25, metric=metric, probes={}, curve=[[1, 0.3, None]])]
    write_page(rows, tmp_path, title="suite")
    (line,) = cells((tmp_path / "report.html").read_text())
    score, trivial = ("0.250000", "0.550000") if metric == "mse" else ("0.25", "0.55")
    assert line[2:8] == [score, "1 seed", metric, "0.125", trivial, ""]


@thorough
def test_many_mixers_with_long_names_are_told_apart():
    long = "transformer_xl(segment_length=24, memory_length=12)@enhanced_recurrence(segment_length=24)"
    names = [long, *(f"gla(n_heads={n}, d_qk={n})" for n in range(1, 14))]
    for drawing in pictures("copying", standings([row(name) for name in names])):
        (legend,) = drawing.figure.legends
        drawing.figure.canvas.draw()
        assert legend.get_window_extent().width <= drawing.figure.bbox.width
        assert legend.get_window_extent().x0 >= 0
        texts = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
        assert texts == names
        looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in legend.get_lines()]
        assert len(set(looks)) == len(names)


def test_the_perplexity_of_the_trivial_predictor_is_not_drawn():
    levels = {"chance": None, "trivial_score": 65.0}
    rows = [row(mixer, metric="perplexity", score=4.0, **levels) for mixer in ("a", "b")]
    for drawing in pictures("copying", standings(rows)):
        assert "dotted" not in drawing.caption
        shown = [axes for axes in drawing.figure.axes if axes.get_ylabel() == "perplexity"]
        assert all(axes.get_ylim()[1] < 50 for axes in shown)


def test_errors_that_differ_by_orders_of_magnitude_have_a_logarithmic_axis():
    rows = [
        row(mixer, metric="mse", curve=[[1, 1.0], [2, loss]]) for mixer, loss in (("a", 1e-6), ("b", 0.1))
    ]
    (axes,) = pictures("copying", standings(rows))[0].figure.axes
    assert axes.get_yscale() == "log"
    axes.figure.canvas.draw()
    shown = [text.get_text() for text in axes.get_yticklabels() if text.get_text()]
    assert len(shown) >= 3
