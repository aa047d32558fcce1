import json

import pytest
import torch

from linrec.testing import assert_agree
from perf import nonlinear
from perf.__main__ import main
from perf.nonlinear import CELLS, METHODS, NAMES, NonlinearRow, left_out, make, nonlinear_rows_of
from perf.rows import PASSES
from tests.tiers import thorough

CPU = torch.device("cpu")


@thorough
def test_everything_runs(tmp_path, capsys):
    assert main(["nonlinear", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["tanh-n4-t20", "lem-n4-t20"]
    for row in rows:
        for name in PASSES:
            entries = row["passes"][name]
            assert list(entries) == list(NAMES)
            assert entries["loop"]["ratio"] == 1
            medians = {which: entries[which]["ms"]["median"] for which in ("loop", "lstm")}
            assert entries["lstm"]["ratio"] == pytest.approx(medians["loop"] / medians["lstm"])
            assert entries["lstm"]["us_per_step"] == pytest.approx(medians["lstm"] * 1e3 / 20)
        for gains in row["iterations"].values():
            assert all(1 < entry["iterations"] <= 50 and entry["residual"] <= 1 for entry in gains.values())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(line[:3] == ["lem-n4-t20", "fwd", "gru"] for line in lines) == 1
    assert sum(line[:3] == ["lem-n4-t20", "newton", "x3"] for line in lines) == 1


def test_wrong_results_are_not_timed(tmp_path, monkeypatch, capsys):
    right = nonlinear.nonlinear_scan

    def wrong(*arguments, **options):
        y, state = right(*arguments, **options)
        return (1.01 * y if options.get("gradient") == "adjoint" else y), state

    monkeypatch.setattr(nonlinear, "nonlinear_scan", wrong)
    assert main(["nonlinear", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    assert "lem-n4-t20: adjoint: wrong, so not timed: h: " in capsys.readouterr().out


def test_iterations_that_do_not_converge_are_said(monkeypatch):
    monkeypatch.setattr(nonlinear, "MAX_ITERATIONS", 2)
    (row, _) = nonlinear_rows_of("cpu", quick=True)
    found = nonlinear._iterations(row, make(row, CPU)[0], "newton", 3)
    assert found == {"missing": "no convergence"}


def test_rows_of_a_gpu_and_what_they_leave_out():
    rows = {row.name: row for row in nonlinear_rows_of("cuda")}
    assert len(rows) == 18 and rows["lem-n512-t100000"].batch == 1
    taken = {
        name: [method for method in METHODS if left_out(rows[name], method) is None]
        for name in ("lem-n16-t1000", "lem-n64-t1000", "tanh-n64-t10000")
    }
    assert taken == {
        "lem-n16-t1000": ["loop", "adjoint", "newton", "quasi_newton", "damped"],
        "lem-n64-t1000": ["loop", "adjoint", "quasi_newton", "damped"],
        "tanh-n64-t10000": ["adjoint", "newton", "quasi_newton", "damped"],
    }


@pytest.mark.parametrize("name", CELLS)
def test_diagonals(name):
    cell, diagonal = CELLS[name]
    (x, state, *weights), _ = make(NonlinearRow(name, 3, 1, 2), CPU)
    state = torch.randn_like(state)
    whole = torch.func.jacrev(lambda h: cell(h, x[:, 0], *weights).sum(0))(state).diagonal(dim1=0, dim2=2)
    found = diagonal(state, x[:, 0], *weights)
    # the path of y through products is left out
    kept = slice(None) if name == "tanh" else slice(3)
    assert_agree(found[:, kept], whole[:, kept])


def test_errors(capsys):
    assert main(["nonlinear", "--device", "cpu", "--rows", "lem-n16-t100"]) == 2
    assert "did you mean 'lem-n16-t1000'" in capsys.readouterr().err
