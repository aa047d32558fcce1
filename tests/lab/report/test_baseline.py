"""Runs beside earlier ones: what is worse, and by how much it must be."""

import json
import math
from pathlib import Path

import pytest

from linrec.cli import main
from linrec.lab.report import Comparison, compare_runs
from linrec.lab.train import ConfigError
from tests.lab.report.conftest import RunMaker
from tests.lab.report.test_write import Page
from tests.tiers import thorough


@pytest.mark.parametrize(
    ("metric", "scores", "baseline", "spread", "verdict"),
    [
        # the standard deviation of the baseline's seeds, not that of the runs
        ("accuracy", (0.79,), (0.8, 0.9, 1.0), 0.1, "regression"),
        ("accuracy", (0.81,), (0.8, 0.9, 1.0), 0.1, "as before"),
        ("accuracy", (0.5, 1.2), (0.8, 0.9, 1.0), 0.1, "as before"),
        ("accuracy", (1.01,), (0.8, 0.9, 1.0), 0.1, "better"),
        # seeds that agree, or a single one, still have a hundredth
        ("accuracy", (0.995,), (0.999, 1.001), 0.01, "as before"),
        ("accuracy", (0.985,), (1.0,), 0.01, "regression"),
        # errors and perplexities are better where they are lower
        ("mse", (0.3,), (0.1, 0.2), 0.05 * 2**0.5, "regression"),
        ("mse", (0.05,), (0.1, 0.2), 0.05 * 2**0.5, "better"),
        ("perplexity", (20.3,), (20.0,), 0.2, "regression"),
        ("perplexity", (20.1,), (20.0,), 0.2, "as before"),
        ("mse", (math.nan,), (0.1,), 0.001, "regression"),
        ("accuracy", (math.nan,), (0.1,), 0.001, "regression"),
    ],
)
def test_the_verdict_is_on_means_and_the_spread_of_the_baseline(metric, scores, baseline, spread, verdict):
    compared = Comparison("arm", metric, scores, baseline)
    assert compared.spread == pytest.approx(spread) and compared.verdict == verdict


def rows_of(*folders: Path) -> str:
    """Return lines of a table; the last run has not finished."""
    rows = []
    for folder in folders:
        stored, result = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "result"))
        rows.append({"folder": folder.name, "config": stored["config"], "result": result})
    return "".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "folder": "late", "result": None}])


@pytest.fixture
def runs(make_run: RunMaker) -> list[Path]:
    """An arm of two seeds, and another that has become worse."""
    # a baseline of another place, of other seeds and watched more closely
    return [
        make_run("same-0"),
        make_run("same-1", seed=1),
        make_run("worse-0", mixer="gla", right_to_span=2, loop={"log_every": 7}),
    ]


@thorough
def test_regressions_are_marked_and_are_the_exit_status(runs, make_run, tmp_path, capsys):
    earlier = [make_run("old-2", seed=2), make_run("old-gla", seed=3, mixer="gla", right_to_span=20)]
    file = tmp_path / "rows.jsonl"
    file.write_text(rows_of(*earlier))
    words = ["report", *map(str, runs), "--out", str(tmp_path / "report"), "--baseline", str(file)]
    assert main(words) == 1
    told = capsys.readouterr().out.splitlines()
    (new, old) = (
        json.loads((folder / "result.json").read_text())["test"]["accuracy"]
        for folder in (runs[2], earlier[1])
    )
    assert told[1:] == [f"regression: mixer: gla: accuracy {new:.3f} (1 seed), baseline {old:.3f} (1 seed)"]
    table = [
        row
        for row in Page(tmp_path / "report" / "report.html").rows
        if row[-1] in ("regression", "as before")
    ]
    assert [(row[0], row[-1]) for row in table] == [
        ("mixer: gla", "regression"),
        ("mixer: gate_loop", "as before"),
    ]
    assert table[0][1:5] == [f"{new:.3f} (1 seed)", f"{old:.3f} (1 seed)", f"{0.01 * old:.2g}", "accuracy"]
    # the arm that is as before alone
    assert main([*words[:3], *words[4:]]) == 0


@thorough
def test_results_of_runs_are_a_baseline_and_what_it_lacks_is_said(runs, make_run, tmp_path):
    earlier = make_run("old", seed=2)
    stored, result = (json.loads((earlier / f"{name}.json").read_text()) for name in ("config", "result"))
    (earlier / "result.json").write_text(json.dumps({**result, "config": stored["config"]}, indent=1))
    (found,) = compare_runs(runs, [earlier / "result.json"])
    assert (found.label, len(found.scores), len(found.baseline)) == ("mixer: gate_loop", 2, 1)
    words = ["report", *map(str, runs), "--out", str(tmp_path / "report")]
    assert main([*words, "--baseline", str(earlier / "result.json")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "The baseline has no run like those of mixer: gla." in page
    assert compare_runs(runs, []) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "rows.jsonl cannot be read: No such file"),
        ("{", "line 1 of .*rows.jsonl cannot be used"),
        ('{"folder": "a", "config": {}, "result": {}}\n', "must be rows.jsonl of a table.*does not fit this"),
        ('{"folder": "a", "config": {}}\n', "no run of the baseline has the configuration"),
        ('{"folder": "a", "config": {}, "status": "done"}\n', "of an earlier version; give the folder"),
        ("[1]\n", "`the line` must be an object"),
    ],
)
def test_a_baseline_that_says_nothing_is_refused(make_run, tmp_path, text, complaint):
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        compare_runs([make_run("run")], [file])
