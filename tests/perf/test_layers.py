"""`loops`, `nonlinear`, `cells`, `iterations`, `loss` and `tasks`, beyond what every command does."""

import dataclasses
import itertools
import json

import pytest
import torch

from linrec import mixers
from linrec.lab.tasks.dynamics import Adding
from linrec.lab.train import LoopConfig, TrainConfig, fit
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.ops import nonlinear_scan
from linrec.ops.nonlinear_scan import OPERATOR, Convergence
from linrec.testing import assert_agree
from perf import cells, loss, nonlinear, tasks
from perf.__main__ import main
from perf.cells import CellRow, Cells, gradient_of_loops, model_of
from perf.loss import LOSSES, QUICK, WHOLE
from perf.nonlinear import CELLS, Nonlinear, NonlinearRow, counting
from perf.timing import Bench, Windows
from tests.tiers import thorough, tiered

CPU = torch.device("cpu")
BENCH = Bench(CPU, windows=Windows(1, 0.0))


@thorough
def test_methods_are_timed_and_their_iterations_counted(run):
    _, results, _ = run("nonlinear", "--rows", "lem-n4-t20")
    (row,) = results["rows"]
    for entries in row["passes"].values():
        assert list(entries) == [*nonlinear.METHODS, "lstm", "gru", "rnn"]
        for entry in entries.values():
            assert entry["us_per_step"] == pytest.approx(entry["ms"]["median"] * 1e3 / 20)
    for gains in row["iterations"].values():
        assert list(gains) == ["x1", "x3"]
        assert all(1 < entry["iterations"] <= 50 and entry["residual"] <= 1 for entry in gains.values())


def test_iterations_that_do_not_converge_are_said(monkeypatch):
    monkeypatch.setattr(nonlinear, "MAX_ITERATIONS", 2)
    row, _ = Nonlinear("cpu", quick=True).all_rows()
    found = nonlinear.count_iterations(row, nonlinear.make(row, CPU)[0], "newton", 3)
    assert found == {"missing": "no convergence"}


@pytest.mark.parametrize("name", CELLS)
def test_diagonals(name):
    cell, diagonal = CELLS[name]
    (x, state, *weights), _ = nonlinear.make(NonlinearRow(name, 3, 1, 2), CPU)
    state = torch.randn_like(state)
    whole = torch.func.jacrev(lambda h: cell(h, x[:, 0], *weights).sum(0))(state).diagonal(dim1=0, dim2=2)
    found = diagonal(state, x[:, 0], *weights)
    # the path of y through products is left out
    kept = slice(None) if name == "tanh" else slice(3)
    assert_agree(found[:, kept], whole[:, kept])


def test_memory_of_a_step_excludes_the_model(monkeypatch):
    peaks = iter([1000, 1000 + 2 * 40 * 512])
    monkeypatch.setattr(Bench, "peak_bytes", lambda self: next(peaks))
    row = CellRow("unicornn", "reversible", False, 40, 2, 4)
    found = Cells("cpu").measure(BENCH, row)
    assert (found["held_bytes"], found["bytes_per_step"]) == (1000, 512)
    rate = found["steps_per_second"]["median"]
    assert found["us_per_step"] == pytest.approx(1e6 / rate / 40)
    model = SequenceClassifier(model_of(row))
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert model_of(row).mixer_args["reversible"]
    assert not model_of(dataclasses.replace(row, gradient="adjoint")).mixer_args.get("reversible")


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (torch.OutOfMemoryError("Tried to allocate 20.00 GiB."), 0, "out of memory"),
        (ValueError("no such thing"), 1, "ValueError: no such thing"),
    ],
)
def test_too_little_memory_is_no_failure(monkeypatch, error, status, told, run):
    def fails(*rest):
        raise error

    monkeypatch.setattr(cells, "make_step", fails)
    found, _, printed = run("cells", "--models", "lem", "--lengths", "1001")
    assert found == status
    assert "lem-autograd-eager-t1001: over 1,000 steps\n" in printed
    assert f"lem-adjoint-eager-t1001: {told}\n" in printed


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


def test_iterations_are_counted_for_each_layer_and_mode():
    torch.manual_seed(0)
    x, W = torch.randn(2, 30, 5, dtype=torch.float64), 0.3 * torch.randn(5, 5, dtype=torch.float64)

    def cell(h, x, W):
        return torch.tanh(h @ W.mT + x)

    counts, expected = [], []
    with counting(counts):
        h, _ = nonlinear_scan(cell, x, (W,))
        nonlinear_scan(cell, h, (W,))
    for layer, inputs in enumerate((x, h)):
        for mode in ("newton", "quasi_newton"):
            report = Convergence()
            nonlinear_scan(cell, inputs, (W,), mode=mode, convergence=report)
            count = {"layer": layer, "mode": mode, "steps": 30, "state": 5}
            expected.append(count | {"iterations": int(report.iterations)})
    assert counts == expected


def test_large_states_and_missing_convergence_are_told():
    counts = []
    with counting(counts):
        for size in (65, 1):
            x, W = torch.ones(1, 200, size), 10 * torch.eye(size)
            nonlinear_scan(lambda h, x, W: torch.sin(h @ W.mT + x), x, (W,))
    missing = [count["missing"] for count in counts]
    assert missing == 2 * ["state over 64"] + 2 * ["no convergence in 50"]


def test_a_run_is_counted_before_and_after_training(tmp_path, capsys):
    task = Adding(length=40, n_train=20, n_validation=8, n_test=8)
    model = SequenceClassifierConfig(
        n_outputs=1, n_features=2, d_model=6, n_layers=2, mixer="lem", bidirectional=False
    )
    fit(TrainConfig("adding", task, model, loop=LoopConfig(steps=2, batch_size=4)), tmp_path / "run")
    arguments = ["--device", "cpu", "--samples", "3", "--out", str(tmp_path / "out")]
    assert main(["iterations", str(tmp_path / "run"), *arguments]) == 0
    (path,) = tmp_path.glob("out/*.json")
    (run,) = json.loads(path.read_text())["runs"]
    assert (run["task"], run["mixer"]) == ("adding", "lem")
    places = [(count["weights"], count["layer"]) for count in run["counts"][::2]]
    assert places == list(itertools.product(("start", "end"), (0, 1)))
    assert all(count["iterations"] >= 2 and count["steps"] == 40 for count in run["counts"])
    assert "quasi_newton" in capsys.readouterr().out


def test_the_share_of_three_products(run):
    assert loss.ROWS[0].operations == 3 * 2 * 16_384 * 1024 * 32_000
    _, results, _ = run("loss")
    for entry in results["rows"][0]["losses"].values():
        rate = QUICK.operations / entry["ms"]["median"] * 1e3
        assert entry["share"] == pytest.approx(rate / results["matmul_rate"])


@pytest.mark.parametrize("name", tiered([WHOLE], ["linrec, compiled"]))
def test_losses_agree_with_pieces_in_float64(name):
    loss.check(LOSSES[name](), QUICK, CPU)


def test_what_is_asked_of_a_task_is_compared_in_its_unit(monkeypatch):
    clock = itertools.count(0.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    task = tasks.drawn_tasks()["adding"]
    assert tasks.drawn_tasks().keys() >= tasks.ASKED.keys()
    for unit, met in (("tokens", True), ("samples", False)):
        monkeypatch.setitem(tasks.ASKED, "adding", (30.0, unit))
        found = tasks.measure_task("adding", task, 0.0, 2)
        # two samples of 1,000 steps; the clock is read at the start, once after a draw, and at the end
        assert found["per_second"] == {"samples": 1.0, "tokens": 1000.0}
        assert found["asked"] == {"per_second": 30.0, "unit": unit, "met": met}
