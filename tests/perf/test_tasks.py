import itertools
import json

from perf.__main__ import main
from perf.tasks import ASKED, measure_task, task_rows
from tests.tiers import thorough


@thorough
def test_every_task_that_is_drawn_is_measured(tmp_path, capsys):
    names = ["mqar", "adding", "lra-pathfinder"]
    assert main(["tasks", "--quick", "--out", str(tmp_path), "--rows", *names]) == 0
    (path,) = tmp_path.glob("*.json")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == {*names} and "asked" not in rows["adding"]
    # two samples of 64, 1,000 and 32 * 32 steps
    assert [rows[name]["tokens"] for name in names] == [2 * 64, 2 * 1000, 2 * 1024]
    for row in rows.values():
        assert row["per_second"]["tokens"] == row["tokens"] / row["seconds"]
    assert "1,000,000 tokens" in capsys.readouterr().out
    assert {row.name for row in task_rows()} >= {*names, *ASKED}


def test_what_is_asked_is_compared_in_its_unit(monkeypatch):
    clock = itertools.count(0.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    (row,) = (row for row in task_rows() if row.name == "adding")
    for unit, met in (("tokens", True), ("samples", False)):
        monkeypatch.setitem(ASKED, "adding", (30.0, unit))
        found = measure_task(row, 0.0, 2)
        # two samples of 1,000 steps; the clock is read at the start, once after a draw, and at the end
        assert found["per_second"] == {"samples": 1.0, "tokens": 1000.0}
        assert found["asked"] == {"per_second": 30.0, "unit": unit, "met": met}


def test_a_name_that_does_not_exist(capsys):
    assert main(["tasks", "--rows", "mqa"]) == 2
    assert "did you mean 'mqar'" in capsys.readouterr().err
