import json

import pytest
import torch

from perf import loss
from perf.__main__ import main
from perf.loss import COMPILED, LINREC, LOSSES, QUICK, ROWS, WHOLE, check, make
from tests.tiers import thorough, tiered

CPU = torch.device("cpu")


@thorough
def test_everything_runs(tmp_path, capsys):
    command = ["loss", "--device", "cpu", "--quick", "--peers", "--out", str(tmp_path)]
    assert main(command) == 0
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    (row,) = results["rows"]
    assert list(row["losses"]) == list(LOSSES)
    entry = row["losses"][LINREC]
    rate = QUICK.operations / entry["ms"]["median"] * 1e3
    assert entry["share"] == pytest.approx(rate / results["matmul_rate"])
    assert sum(line.startswith(QUICK.name) for line in capsys.readouterr().out.splitlines()) == len(LOSSES)


def test_operations_are_those_of_three_products():
    row = ROWS[0]
    assert row.operations == 3 * 2 * 16_384 * 1024 * 32_000


@pytest.mark.parametrize("name", tiered([LINREC, WHOLE], [COMPILED]))
def test_losses_agree_with_pieces_in_float64(name):
    check(LOSSES[name](), QUICK, CPU)


def test_wrong_results_are_not_timed(tmp_path, monkeypatch, capsys):
    right = loss.linear_cross_entropy

    def wrong(x, *rest):
        value, best = right(x, *rest)
        return (value if x.dtype == torch.float64 else 1.01 * value), best

    monkeypatch.setattr(loss, "linear_cross_entropy", wrong)
    assert main(["loss", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    assert f"{QUICK.name}: linrec: wrong, so not timed: loss: " in capsys.readouterr().out


def test_inputs():
    x, weight, targets = make(QUICK, CPU)
    assert (x.shape, weight.shape, targets.shape) == ((12, 8), (20, 8), (12,))


def test_errors(capsys):
    assert main(["loss", "--device", "cpu", "--rows", "16384x1024x3200"]) == 2
    assert "did you mean '16384x1024x32000'" in capsys.readouterr().err
