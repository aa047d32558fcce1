import json

import pytest
import torch

from linrec import mixers
from linrec.models import SequenceClassifier
from linrec.ops.nonlinear_scan import OPERATOR
from perf import cells
from perf.__main__ import main
from perf.cells import CellRow, cell_rows_of, gradient_of_loops, measure_cell, model_of
from perf.training import Windows
from tests.tiers import thorough

CPU = torch.device("cpu")


def run(folder, *arguments):
    status = main(["cells", "--device", "cpu", "--quick", "--out", str(folder), *arguments])
    (path,) = folder.glob("*.json")
    return status, json.loads(path.read_text())["rows"]


@thorough
def test_everything_runs(tmp_path, capsys):
    status, found = run(tmp_path, "--models", "cornn", "unicornn")
    rows = cell_rows_of(["cornn", "unicornn"], (), "cpu", quick=True)
    assert status == 0 and [row.gradient for row in rows[2:]] == ["autograd", "adjoint", "reversible"]
    assert [entry["name"] for entry in found] == [row.name for row in rows]
    for entry, row in zip(found, rows, strict=True):
        rate = entry["steps_per_second"]
        assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]
        assert entry["us_per_step"] == pytest.approx(1e6 / rate["median"] / 80)
        model = SequenceClassifier(model_of(row))
        assert entry["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert entry["peak_bytes"] is entry["bytes_per_step"] is None
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("unicornn-reversible-eager-t80 ") for line in shown) == 1
    assert max(len(line) for line in shown if not line.startswith("wrote ")) <= 80


def test_memory_is_what_a_step_takes_beside_the_model(monkeypatch):
    monkeypatch.setattr(cells, "held_bytes", lambda device: 1000)
    monkeypatch.setattr(cells, "peak_bytes", lambda device: 1000 + 2 * 40 * 512)
    found = measure_cell(CellRow("unicornn", "reversible", False, 40, 2, 4), CPU, Windows(1, 0.0))
    assert found["bytes_per_step"] == 512


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (torch.OutOfMemoryError("Tried to allocate 20.00 GiB."), 0, "out of memory"),
        (ValueError("no such thing"), 1, "ValueError: no such thing"),
    ],
)
def test_failures_are_told_and_too_little_memory_is_no_failure(
    tmp_path, monkeypatch, capsys, error, status, told
):
    def fails(*rest):
        raise error

    monkeypatch.setattr(cells, "make_step", fails)
    assert run(tmp_path, "--models", "lem", "--lengths", "1001")[0] == status
    shown = capsys.readouterr().out
    assert "lem-autograd-eager-t1001: over 1,000 steps\n" in shown
    assert f"lem-adjoint-eager-t1001: {told}\n" in shown


def test_rows_of_a_gpu():
    rows = {row.name: row for row in cell_rows_of(["lem", "unicornn"], (), "cuda")}
    assert len(rows) == 18
    shapes = {(row.time, row.batch, row.size) for row in rows.values()}
    assert shapes == {(1000, 50, 128), (4000, 50, 128), (17_984, 8, 128)}
    eager = {(row.model, row.gradient) for row in rows.values() if not row.compiled}
    assert eager == {("unicornn", "adjoint"), ("unicornn", "reversible")}
    assert model_of(rows["unicornn-reversible-eager-t1000"]).mixer_args["reversible"]
    assert not model_of(rows["unicornn-adjoint-eager-t1000"]).mixer_args.get("reversible")


@pytest.mark.parametrize("gradient", ["autograd", "adjoint"])
def test_the_gradient_of_a_mixers_loop_is_chosen(monkeypatch, gradient):
    right, ran = OPERATOR.run, []
    monkeypatch.setattr(OPERATOR, "run", lambda given, entry: ran.append(entry.kernel) or right(given, entry))
    mixer, x = mixers.build("tarnn", 4), torch.randn(2, 5, 4)
    expected = mixer(x)[0]
    with gradient_of_loops(gradient):
        found = mixer(x)[0]
    assert ran == ["autograd", gradient]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--models", "unicorn"], "did you mean 'unicornn'"),
        (["--models", "lem", "gla"], "got 'gla', a mixer without it"),
        (["--lengths", "1000", "32"], "must be above 32, up to which torch.compile unrolls loops; got 32"),
    ],
)
def test_errors(capsys, tmp_path, arguments, told):
    assert main(["cells", "--device", "cpu", "--out", str(tmp_path), *arguments]) == 2
    message = capsys.readouterr().err
    assert told in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())
