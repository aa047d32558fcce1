"""Tables of runs: reports from them are reports from the folders, and errors name the broken line."""

import itertools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from linrec.cli import main
from linrec.files import read_json
from linrec.lab.report import collect_runs, compare_runs, read_runs, write_report
from linrec.lab.report.records import CURVES, ROWS
from linrec.lab.train import RunFolderError, load_run
from tests.lab.report.conftest import RunMaker
from tests.lab.report.test_write import Page
from tests.tiers import thorough

# the beginning of a line of a table
DATA = '{"folder": "arms/data-0"'


@pytest.fixture
def runs(make_run: RunMaker) -> Path:
    """A folder of two arms: three runs have ended, a fourth has not, and no run has weights."""
    make_run("arms/data-0", right_to_span=20, checkpoint=False, command="linrec train <small>")
    make_run("arms/data-1", right_to_span=30, checkpoint=False, seed=1)
    make_run("arms/fixed-0", transition="fixed", checkpoint=False)
    make_run("other/fixed-1", transition="fixed", checkpoint=False, seed=1, finished=False)
    return make_run.root


@pytest.fixture
def table(runs: Path, tmp_path: Path) -> Path:
    collect_runs([runs], tmp_path / "table")
    return tmp_path / "table"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_table_has_a_line_per_run_with_all_that_the_folder_has(runs: Path, table: Path) -> None:
    rows, curves = lines(table / "rows.jsonl"), lines(table / "curves.jsonl")
    names = ["arms/data-0", "arms/data-1", "arms/fixed-0", "other/fixed-1"]
    assert [row["folder"] for row in rows] == [curve["folder"] for curve in curves] == names
    for name, row, run in zip(names, rows, read_runs([table]), strict=True):
        stored = read_json(runs / name / "config.json")
        assert {key: row[key] for key in stored} == stored
        of_folder = load_run(runs / name)
        assert run.path == table / name and run.config == of_folder.config
        assert (run.about, run.metrics) == (of_folder.about, of_folder.metrics)
        if of_folder.result is None:
            assert run.result is row["result"] is None
        else:
            # what config.json says already stands once
            assert {**run.about, **run.result} == {**of_folder.about, **of_folder.result}
            assert not run.result.keys() & run.about.keys()


@thorough
def test_a_report_from_a_table_is_the_report_from_the_folders(
    runs: Path, table: Path, tmp_path: Path
) -> None:
    made = {}
    for name, folder in (("old", runs), ("new", table)):
        page = write_report([folder], tmp_path / name)
        pictures = {path.name: path.read_bytes() for path in page.parent.glob("*.png")}
        made[name] = page.read_text().replace(str(folder), "FOLDER"), pictures
    assert made["old"] == made["new"]
    assert made["old"][1].keys() == {"learning_curves.png", "accuracy_by_span.png"}
    assert "<li>fixed-1 has no result" in made["new"][0]


def test_a_name_within_a_table_is_its_runs(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*paths: Path | str) -> list[str]:
        return [run.path.name for run in read_runs(paths)]

    assert names(table / "arms") == ["data-0", "data-1", "fixed-0"]
    assert names(table / "other" / "fixed-1", table / "arms/data-1") == ["fixed-1", "data-1"]
    # each counts once
    assert names(table, table / "arms") == ["data-0", "data-1", "fixed-0", "fixed-1"]
    monkeypatch.chdir(table)
    assert names("arms/fixed-0") == ["fixed-0"]
    with pytest.raises(
        RunFolderError, match=r"the table in \. has no run arms/data; did you mean arms/data-0\?"
    ):
        names("arms/data")


def test_tables_are_collected_too_and_found_below_a_folder(runs: Path, table: Path, tmp_path: Path) -> None:
    collect_runs([table / "arms" / "data-0", table / "other"], tmp_path / "part")
    assert [row["folder"] for row in lines(tmp_path / "part" / "rows.jsonl")] == [
        "arms/data-0",
        "other/fixed-1",
    ]
    collect_runs([table], tmp_path / "again")
    for name in ("rows.jsonl", "curves.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (table / name).read_bytes()
    # a single run is named too
    collect_runs([runs / "arms" / "data-0"], tmp_path / "one" / "below")
    assert [run.path for run in read_runs([tmp_path / "one"])] == [tmp_path / "one" / "below" / "data-0"]


def test_curves_keep_the_precision_of_float32(make_run: RunMaker, tmp_path: Path) -> None:
    folder = make_run("run", checkpoint=False)
    records = [
        {"step": 123456789, "split": "train", "loss": 2 / 3, "lr": 1e-9 / 3, "grad_norm": math.inf},
        {"step": 123456789, "split": "validation", "loss": math.nan},
        {"step": 123456790, "split": "train", "loss": 1234567.89, "lr": 0.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    collect_runs([folder], tmp_path / "table")
    (run,) = read_runs([tmp_path / "table"])
    first, second, third = run.metrics
    assert first == records[0] | {"loss": 0.6666667, "lr": 3.333333e-10}
    assert math.isnan(second.pop("loss")) and second == {"step": 123456789, "split": "validation"}
    assert third == records[2] | {"loss": 1234568.0}


def test_curves_have_at_most_200_points_a_run(make_run: RunMaker, tmp_path: Path) -> None:
    for steps in (100, 101, 200, 333):
        folder = make_run(f"run-{steps}", checkpoint=False, steps=tuple(range(1, steps + 1)), seed=steps)
        collect_runs([folder], tmp_path / f"table-{steps}")
        (run,) = read_runs([tmp_path / f"table-{steps}"])
        assert len(run.metrics) == 200
        assert [record["step"] for record in run.metrics[-2:]] == [steps, steps]
        kept = [record["step"] for record in run.metrics if record["split"] == "train"]
        assert {b - a for a, b in itertools.pairwise(kept)} <= {steps // 100, steps // 100 + 1}
        # a table of a table is thinned no further
        collect_runs([tmp_path / f"table-{steps}"], tmp_path / "again" / str(steps))
        again = tmp_path / "again" / str(steps) / "curves.jsonl"
        assert lines(again)[0]["curves"] == lines(tmp_path / f"table-{steps}" / "curves.jsonl")[0]["curves"]


def test_runs_are_added_to_a_table_once(make_run: RunMaker, runs: Path, table: Path, tmp_path: Path) -> None:
    before = {name: (table / name).read_bytes() for name in ("rows.jsonl", "curves.jsonl")}
    shutil.copytree(runs, tmp_path / "copies" / "runs")
    shutil.copytree(runs / "other", tmp_path / "copies" / "more")
    collect_runs([runs, tmp_path / "copies"], table)
    assert {name: (table / name).read_bytes() for name in before} == before

    # a run that went on takes the place of its part, under its name; other runs are added
    shutil.rmtree(runs / "other")
    options = {"transition": "fixed", "checkpoint": False}
    make_run("further/fixed-1", steps=(10, 20, 30, 40), seed=1, **options)
    make_run("further/fixed-2", seed=2, finished=False, **options)
    collect_runs([tmp_path / "copies", runs / "further"], table)
    rows = lines(table / "rows.jsonl")
    names = ["arms/data-0", "arms/data-1", "arms/fixed-0", "other/fixed-1", "runs/further/fixed-2"]
    assert [row["folder"] for row in rows] == names
    assert [row["result"] is None for row in rows] == [False, False, False, False, True]
    assert [row["folder"] for row in lines(table / "curves.jsonl")] == names
    collect_runs([table], tmp_path / "new")
    assert (tmp_path / "new" / "rows.jsonl").read_bytes() == (table / "rows.jsonl").read_bytes()

    # of two names, only runs of another commit are two experiments
    for name in ("later/one", "later/two"):
        shutil.copytree(runs / "arms" / "data-0", runs / name)
    stored = json.loads((runs / "later" / "two" / "config.json").read_text())
    (runs / "later" / "two" / "config.json").write_text(json.dumps({**stored, "commit": "another"}))
    collect_runs([runs / "later"], table)
    assert [row["folder"] for row in lines(table / "rows.jsonl")] == [*names, "two"]

    # models that began from other weights are other runs
    make_run("from/a", command="linrec train lm --init-from a --out x", checkpoint=False)
    make_run("from/b", command="linrec train lm --init-from=b --out x", checkpoint=False)
    collect_runs([runs / "from"], table)
    assert [row["folder"] for row in lines(table / "rows.jsonl")] == [*names, "two", "a", "b"]


def test_two_runs_of_a_name_are_refused(make_run: RunMaker, table: Path, tmp_path: Path) -> None:
    make_run("else/arms/data-0", seed=9, checkpoint=False)
    before = (table / "rows.jsonl").read_bytes()
    with pytest.raises(
        RunFolderError, match="two runs of other configurations called 'arms/data-0'; pass an"
    ):
        collect_runs([make_run.root / "else"], table)
    assert (table / "rows.jsonl").read_bytes() == before


def test_half_a_table_is_not_overwritten_and_a_failure_leaves_nothing(
    runs: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rows.jsonl", "curves.jsonl"):
        (tmp_path / name).mkdir()
        shutil.copy(table / name, tmp_path / name / name)
        with pytest.raises(RunFolderError, match=rf"is no table of runs: it has {name}"):
            collect_runs([runs], tmp_path / name)
        assert os.listdir(tmp_path / name) == [name]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("linrec.files.force_to_disk", full)
    with pytest.raises(
        RunFolderError, match=r"could not write the table to .*/new: No space left on device\."
    ):
        collect_runs([runs], tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("name", "line", "content", "message"),
    [
        (ROWS, 1, "{", r"line 2 of .*rows\.jsonl cannot be used"),
        (ROWS, 0, "[1]", r"line 1 of .*rows\.jsonl cannot be used: `the line` must be an object"),
        (ROWS, 0, '{"config": {}}', r"line 1 of .*: `folder` must be a text"),
        (ROWS, 0, '{"folder": "../x"}', r"`folder` must be a path below the table; got '\.\./x'"),
        (ROWS, 0, f"{DATA}}}", r"data-0 cannot be used: its row has no config"),
        (ROWS, 0, f'{DATA}, "config": 3}}', r"data-0/config\.json cannot be used"),
        (ROWS, 0, f'{DATA}, "job": 3}}', "`job` must be an object or null; got 3"),
        (ROWS, 0, f'{DATA}, "job": {{}}}}', "cannot be used: it has no 'job.task'"),
        (ROWS, 0, f'{DATA}, "config": {{}}, "result": 1}}', "`result` must be an object"),
        (ROWS, 0, f'{DATA}, "config": {{}}, "extra": {{"perplexity": {{}}}}}}', "no 'extra.perplexity.data'"),
        (ROWS, 1, f"{DATA}}}", "have other runs"),
        (CURVES, 0, None, "have other runs"),
        (CURVES, 0, f"{DATA}}}", "the curves of .*data-0 cannot be used"),
        (CURVES, 0, f'{DATA}, "curves": {{"train": {{"step": [1], "loss": []}}}}}}', "curves"),
        (CURVES, 0, f'{DATA}, "curves": {{"train": {{"loss": [1]}}}}}}', "an integer `step`"),
    ],
)
def test_a_broken_table_is_one_line(
    table: Path, name: str, line: int, content: str | None, message: str
) -> None:
    stored = (table / name).read_text().splitlines()
    stored[line : line + 1] = [] if content is None else [content]
    (table / name).write_text("\n".join(stored) + "\n")
    with pytest.raises(RunFolderError, match=message) as error:
        read_runs([table])
    assert "\n" not in str(error.value)


def test_further_numbers_of_a_run_are_in_its_row(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run("a", checkpoint=False)
    (run / "extra-copies.json").write_text('{"loss": 1.5}')
    collect_runs([run], tmp_path / "table")
    assert lines(tmp_path / "table" / "rows.jsonl")[0]["extra"] == {"copies": {"loss": 1.5}}
    (run / "extra-sample.json").write_text("{}")
    with pytest.raises(RunFolderError, match=r"a cannot be used: it has no 'sample\.text'"):
        read_runs([run])


def test_a_run_folder_is_newer_than_its_row(make_run: RunMaker) -> None:
    make_run("a", checkpoint=False, finished=False)
    make_run("b", checkpoint=False, seed=1)
    collect_runs([make_run.root], make_run.root)
    (make_run.root / "b" / "config.json").unlink()
    make_run("c", checkpoint=False, seed=2)
    with (make_run.root / "a" / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 99, "split": "train", "loss": 1.0}) + "\n")
    runs = read_runs([make_run.root])
    assert [(run.path.name, run.metrics[-1]["step"]) for run in runs] == [("a", 99), ("b", 30), ("c", 30)]


def test_a_table_needs_both_files(table: Path) -> None:
    (table / "curves.jsonl").unlink()
    with pytest.raises(RunFolderError, match=r"it has rows\.jsonl, and no curves\.jsonl beside it"):
        read_runs([table])


def test_a_run_twice_is_refused(table: Path) -> None:
    for name in ("rows.jsonl", "curves.jsonl"):
        text = (table / name).read_text()
        (table / name).write_text(text + text)
    with pytest.raises(RunFolderError, match="has the run 'arms/data-0' twice"):
        read_runs([table])


def test_models_of_other_libraries_are_no_runs_and_damaged_runs_are_not_skipped(runs: Path) -> None:
    (runs / "arms" / "exported").mkdir()
    (runs / "arms" / "exported" / "config.json").write_text('{"model_type": "mamba"}')
    assert len(read_runs([runs])) == 4
    (runs / "arms" / "exported" / "config.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"exported/config\.json cannot be read"):
        read_runs([runs])


@thorough
def test_a_table_is_a_baseline(runs: Path, table: Path) -> None:
    for baseline in (table, table / "rows.jsonl", table / "arms", runs):
        found = compare_runs([runs / "arms"], [baseline])
        assert [(len(each.scores), each.verdict) for each in found] == [(2, "as before"), (1, "as before")]
        assert [each.scores for each in found] == [each.baseline for each in found]


@thorough
def test_the_command_line_collects_and_reports(runs: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "table"
    assert main(["report", "--collect", str(runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out / 'rows.jsonl'} and curves.jsonl\n"
    assert main(["report", str(out)]) == 0
    assert [row[0] for row in Page(out / "report.html").rows if row[1:2] == ["0"]] == ["data-0", "fixed-0"]
    for words in (["--collect", str(runs)], [str(runs), "--collect", "--out", "x", "--baseline", str(out)]):
        assert main(["report", *words]) == 2
        assert "--collect needs --out FOLDER, and takes no --baseline." in capsys.readouterr().err
    assert main(["report", "--collect", str(runs), "--out", str(out)]) == 0
    assert len(lines(out / "rows.jsonl")) == 4
