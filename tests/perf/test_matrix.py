import json

import pytest
import torch

from linrec.ops import gate_loop
from perf import matrix
from perf.__main__ import main
from perf.matrix import OPERATIONS, MatrixRow, check, head_rows, make, measure_row
from perf.matrix_peers import MATRIX_PEERS
from perf.peers import Peer, torch_calls
from perf.timing import Budget, Timing
from tests.tiers import thorough

CPU = torch.device("cpu")
SIZE = (2, 9, 3, 4)


@thorough
def test_everything_runs(tmp_path, capsys):
    arguments = ["matrix", "--device", "cpu", "--quick", "--peers", "--out", str(tmp_path)]
    assert main(arguments) == 0
    (path,) = tmp_path.glob("*-matrix.json")
    results = json.loads(path.read_text())
    assert [row["operation"] for row in results["rows"]] == list(OPERATIONS)
    for row in results["rows"]:
        assert "error" not in row
        for entry in row["passes"].values():
            assert set(entry["peers"]) == {"torch", "reference", "attention", "fla"}
            reference = entry["peers"]["reference"]
            ratio = entry["ms"]["median"] / reference["ms"]["median"]
            assert reference["ratio"] == pytest.approx(ratio)
            assert reference["asked"] == 0.1 and reference["met"] == (ratio <= 0.1)
            assert entry["peers"]["fla"]["missing"] in ("not installed", "runs on CUDA alone")
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown[:-1])) <= 80 and not any("…" in line for line in shown)
    assert any(line.startswith("gated_delta-f32-2x70x2x8") for line in shown)


def test_head_sizes_have_shares_of_their_limits(tmp_path, capsys):
    assert main(["matrix", "--heads", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-heads.json")
    results = json.loads(path.read_text())
    assert [row["size"][3:] for row in results["rows"]] == [[16, 16], [16, 32]] * 3
    for row, made in zip(results["rows"], head_rows(quick=True), strict=True):
        for name, (n_bytes, products) in made.limits.items():
            entry = row["passes"][name]
            least = max(n_bytes / results["copy_rate"], products / results["matmul_rate"])
            assert entry["share"] == pytest.approx(least / entry["ms"]["median"] * 1e3)
    assert capsys.readouterr().out.count("largest step between neighbours") == 2


def test_limits_of_a_row():
    forward, both = MatrixRow("channel", (1, 10, 2, 4, 8), "bf16").limits.values()
    # q and k of 4 channels, v and y of 8 in bfloat16, and log decays of 4 in float32
    assert forward == (20 * (8 + 8 + 16 + 16 + 16), 20 * (4 * 4 * 8 + 64 * 12))
    # q, k, v, log decays and dy are read, and four gradients written
    assert both == (forward[0] + 20 * (8 + 8 + 16 + 16 + 16 + 8 + 8 + 16 + 16), 3 * forward[1])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_operator_is_found(operation, monkeypatch):
    row = MatrixRow(operation, SIZE, "f32")
    inputs, dy = make(row, CPU)
    check(row, inputs, dy)
    name = "delta_rule" if "delta" in operation else "gate_loop"
    right = getattr(matrix, name)

    def wrong(q, *rest, **options):
        # what it is compared with comes in double precision
        return right(q * (1.0 if q.dtype == torch.float64 else 1.01), *rest, **options)

    monkeypatch.setattr(matrix, name, wrong)
    with pytest.raises(AssertionError, match=r"^y: "):
        check(row, inputs, dy)
    result = measure_row(row, CPU, Budget(0, 0), ())
    assert result["error"].startswith("wrong, so not timed: y: ") and "passes" not in result


def test_ratios_and_what_is_asked(monkeypatch):
    times = iter([Timing(2.0, 2.0, 2.0), Timing(9.0, 9.0, 9.0), Timing(8.0, 8.0, 8.0), Timing(3.0, 3.0, 3.0)])
    monkeypatch.setattr(matrix, "measure", lambda *rest, **named: next(times))
    attention = next(peer for peer in MATRIX_PEERS if peer.name == "attention")
    passes = measure_row(MatrixRow("head", SIZE, "f32"), CPU, Budget(0, 0), [attention])["passes"]
    forward, both = (passes[name]["peers"]["attention"] for name in ("forward", "forward+backward"))
    assert (forward["ratio"], forward["met"]) == (0.25, True)
    assert (both["ratio"], both["met"]) == (3.0, False)


def test_a_peer_that_computes_something_else_is_named():
    def half(operation, inputs, dy):
        return torch_calls(lambda q, *rest: gate_loop(q / 2, *rest)[0], inputs, dy)

    def broken(operation, inputs, dy):
        raise RuntimeError("no such kernel")

    peers = [
        Peer("half", "", "torch", half),
        Peer("broken", "", "torch", broken),
    ]
    passes = measure_row(MatrixRow("linear", SIZE, "f32"), CPU, Budget(0, 0), peers)["passes"]
    for entry in passes.values():
        assert entry["peers"]["half"]["off"] == pytest.approx(0.5)
        assert entry["peers"]["broken"] == {"missing": "RuntimeError: no such kernel"}


def test_names_that_do_not_exist(capsys):
    assert main(["matrix", "--device", "cpu", "--quick", "--rows", "heads-f32-2x70x2x8"]) == 2
    assert "did you mean 'head-f32-2x70x2x8'" in capsys.readouterr().err
    assert main(["matrix", "--device", "cpu", "--without", "fla"]) == 2
    assert "--without leaves peers out; pass --peers too." in capsys.readouterr().err
