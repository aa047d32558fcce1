import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from perf import matrix, ops, steps, steps_report
from perf.__main__ import main
from perf.matrix import OPERATIONS, MatrixRow
from perf.peers import UnsuitedError
from perf.steps import check_step, fewest_bytes, make_step, measure_step, step_rows_of
from perf.steps_peers import STEP_PEERS, StepPeer
from perf.timing import Budget, Timing

CPU = torch.device("cpu")
SIZE = (2, 1, 3, 4)


def test_everything_runs(tmp_path, capsys):
    arguments = ["steps", "--device", "cpu", "--quick", "--peers", "--out", str(tmp_path)]
    assert main(arguments) == 0
    (path,) = tmp_path.glob("*-steps.json")
    results = json.loads(path.read_text())
    assert [row["operation"] for row in results["rows"]] == list(OPERATIONS)
    for row in results["rows"]:
        assert row["checked"] and "error" not in row
        percent = 100 * row["bytes"] / (row["ms"]["median"] * 1e-3) / row["rate"]
        assert row["percent"] == pytest.approx(percent)
        assert set(row["peers"]) == {"torch", "fla"}
        torch_backend = row["peers"]["torch"]
        assert torch_backend["ratio"] == pytest.approx(row["ms"]["median"] / torch_backend["ms"]["median"])
        assert "off" not in torch_backend
        assert row["peers"]["fla"]["missing"] in ("not installed", "runs on CUDA alone")
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("gated_delta-f32-2x1x2x8") for line in shown)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("part", ["y", "state"])
def test_one_wrong_number_is_found(operation, part, monkeypatch):
    row = MatrixRow(operation, SIZE, "f32")
    inputs, state = make_step(row, CPU)
    check_step(row, inputs, state)
    name = "delta_rule" if "delta" in operation else "gate_loop"
    right = getattr(matrix, name)

    def wrong(q, *rest, **options):
        found = dict(zip(("y", "state"), right(q, *rest, **options), strict=True))
        # what it is compared with comes in double precision
        if q.dtype != torch.float64:
            found[part] = found[part].clone()
            # in the middle of the batch, heads and channels
            found[part].flatten()[found[part].numel() // 2] += 0.01
        return found["y"], found["state"]

    monkeypatch.setattr(matrix, name, wrong)
    result = measure_step(row, CPU, Budget(0, 0), (), copy=None)
    assert result["error"].startswith(f"wrong, so not timed: {part}: ") and "ms" not in result


def test_a_wrong_state_of_half_precision_inputs_is_found(monkeypatch):
    row = MatrixRow("head", SIZE, "bf16")
    inputs, state = make_step(row, CPU)
    check_step(row, inputs, state)
    right = matrix.gate_loop

    def rounded(q, *rest, **options):
        y, state = right(q, *rest, **options)
        return y, state.bfloat16().to(state.dtype) if q.dtype == torch.bfloat16 else state

    # a state is float32 whatever the inputs are
    monkeypatch.setattr(matrix, "gate_loop", rounded)
    with pytest.raises(AssertionError, match=r"^state: "):
        check_step(row, inputs, state)


@pytest.mark.parametrize(
    ("operation", "numbers", "singles"),
    # beside q, k, v and y: strengths in the dtype of q, decays in float32
    [("linear", 0, 0), ("head", 0, 6), ("channel", 0, 24), ("delta", 6, 0), ("gated_delta", 6, 6)],
)
def test_fewest_bytes(operation, numbers, singles):
    inputs, state = make_step(MatrixRow(operation, SIZE, "bf16"), CPU)
    expected = 2 * (4 * 24 + numbers) + 4 * (singles + 2 * 96)
    assert fewest_bytes(inputs, inputs[2], state) == expected


def test_percentages_and_ratios_follow_from_the_times(monkeypatch):
    ours = iter([Timing(2.0, 2.0, 2.0), Timing(5.0, 5.0, 5.0)])
    monkeypatch.setattr(ops, "measure", lambda *rest, **named: next(ours))
    monkeypatch.setattr(steps, "measure", lambda *rest, **named: Timing(8.0, 8.0, 8.0))
    row = MatrixRow("linear", SIZE, "f32")
    result = measure_step(row, CPU, Budget(0, 0), STEP_PEERS[:1], copy=1e6)
    # 4 * 24 and 2 * 96 floats in 2 ms, of 2,000 bytes
    assert result["bytes"] == 1152 and result["percent"] == pytest.approx(57.6)
    assert result["called_ms"]["median"] == 5.0 and result["peers"]["torch"]["ratio"] == 0.25


def test_steps_are_measured_without_gradients(monkeypatch):
    recorded = []

    def spied(operation, inputs, state):
        def step():
            recorded.append(torch.is_grad_enabled())
            return inputs[2], state

        return step

    measure_step(
        MatrixRow("linear", SIZE, "f32"), CPU, Budget(0, 0), [StepPeer("spied", "", "torch", spied)], None
    )
    assert recorded and not any(recorded)


def test_a_peer_that_computes_something_else_is_named():
    def forgets(operation, inputs, state):
        right = STEP_PEERS[0].prepare(operation, inputs, state)
        return lambda: (right()[0], torch.zeros_like(state))

    def unsuited(operation, inputs, state):
        raise UnsuitedError("has no such step")

    peers = [
        StepPeer("forgets", "", "torch", forgets),
        StepPeer("unsuited", "", "torch", unsuited),
        StepPeer("absent", "", "a_module_that_is_not_there", unsuited),
    ]
    found = measure_step(MatrixRow("delta", SIZE, "f32"), CPU, Budget(0, 0), peers, None)["peers"]
    assert found["forgets"]["off"] == pytest.approx(1.0) and found["forgets"]["ratio"] > 0
    assert found["unsuited"] == {"missing": "has no such step"}
    assert found["absent"] == {"missing": "not installed"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_of_all_rows_fits_80_columns(device):
    rows = step_rows_of(device)
    ms = dataclasses.asdict(Timing(0.05623, 0.05619, 0.05768))
    peers = {"torch": {"ms": ms, "ratio": 0.01234, "off": 0.0849}, "fla": {"missing": "because " * 20}}
    measured = [
        {"name": row.name, "ms": ms, "called_ms": ms, "percent": 100.4, "peers": peers} for row in rows[:-1]
    ]
    wrong = {"name": rows[-1].name, "error": "wrong, so not timed: " + "because " * 20}
    results = {"yardstick": "torch.add(x, y, out=z)", "peers": peers, "rows": [*measured, wrong]}
    text = io.StringIO()
    steps_report.show_steps(Console(file=text, width=80), results)
    shown = text.getvalue()
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert all(row.name in shown for row in rows)
    assert "0.0562  100  0.0562  0.012    -" in shown
    assert "torch: outputs differ from linrec's by up to 8% of the largest" in shown


def test_names_that_do_not_exist(capsys):
    assert main(["steps", "--device", "cpu", "--quick", "--rows", "heads-f32-2x1x2x8"]) == 2
    assert "did you mean 'head-f32-2x1x2x8'" in capsys.readouterr().err
    assert main(["steps", "--device", "cpu", "--without", "fla"]) == 2
    assert "--without leaves peers out; pass --peers too." in capsys.readouterr().err
    assert main(["steps", "--device", "cpu", "--peers", "--without", "flo"]) == 2
    assert "did you mean 'fla'" in capsys.readouterr().err
