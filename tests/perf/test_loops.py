import json

import pytest
import torch

from perf import loops
from perf.__main__ import main
from perf.loops import FUSED, NAMES, check_loop, loop_rows_of, make
from perf.rows import PASSES

CPU = torch.device("cpu")


def test_everything_runs(tmp_path, capsys):
    assert main(["loops", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    for name in PASSES:
        entries = row["passes"][name]
        assert list(entries) == list(NAMES)
        assert entries[FUSED] == {"missing": "runs on CUDA alone"}
        assert entries["loop"]["ratio"] == entries["loop"]["called_ratio"] == 1
        medians = [entries[which]["ms"]["median"] for which in ("loop", "lstm")]
        assert entries["lstm"]["ratio"] == pytest.approx(medians[0] / medians[1])
    shown = capsys.readouterr().out
    assert sum(line.split()[:3] == ["b2-d4-f32", "fwd", "lstm"] for line in shown.splitlines()) == 1


def test_wrong_results_are_not_timed(tmp_path, monkeypatch, capsys):
    right = loops.slstm_steps

    def wrong(Wx, R, start, *, backend):
        h, end = right(Wx, R, start, backend=backend)
        return (h if Wx.dtype == torch.float64 else 1.01 * h), end

    monkeypatch.setattr(loops, "slstm_steps", wrong)
    assert main(["loops", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    assert "b2-d4-f32: loop: wrong, so not timed: h: " in capsys.readouterr().out


def test_rows_of_a_gpu():
    rows = {row.name: row for row in loop_rows_of("cuda")}
    assert len(rows) == 12 and rows["b16-d256-bf16"].size == 256
    row = loop_rows_of("cpu", quick=True)[0]
    inputs, dy = make(row, CPU)
    check_loop(row, inputs, dy, "torch")


def test_errors(capsys):
    assert main(["loops", "--device", "cpu", "--rows", "b16-d64-f23"]) == 2
    assert "did you mean 'b16-d64-f32'" in capsys.readouterr().err
