import dataclasses
import io

import pytest
import torch
from rich.console import Console

from linrec.ops import gate_loop
from perf import lines, operations, ops, table
from perf.check import check
from perf.operations import OPERATIONS, make
from perf.peers import PEERS, Calls, Peer, UnsuitedError, reason
from perf.rows import CPU_ROWS, CUDA_LINES, CUDA_ROWS, PASSES, Row, lines_of, rows_of, select
from perf.timing import Budget, Timing, measure, percent_of
from tests.tiers import thorough

CPU = torch.device("cpu")
SHORT = Budget(0, 0)
KINDS = [("scan", "f32"), ("scan", "bf16"), ("scan", "c64"), ("gate_loop", "f32"), ("gate_loop", "bf16")]
KINDS += [("selective", "f32"), ("selective", "bf16"), ("conv", "f32"), ("conv", "bf16")]


def row(operation="scan", dtype="f32", shape=(2, 48, 4), targets=(50, 80)):
    return Row(operation, shape, dtype, targets)


def test_percent_of_a_rate():
    # 12 GB in 4 ms are 3 TB/s
    assert percent_of(12 * 10**9, 4.0, 4e12) == pytest.approx(75)


@pytest.mark.parametrize(
    ("operation", "dtype", "forward", "both"),
    [
        ("scan", "f32", 3 * 4, 8 * 4),
        ("scan", "bf16", 3 * 2, 8 * 2),
        ("scan", "c64", 3 * 8, 8 * 8),
        ("gate_loop", "f32", 6 * 4, 17 * 4),
        ("gate_loop", "bf16", 6 * 2, 17 * 2),
        ("selective", "bf16", 3 * 2, 8 * 2),
    ],
)
def test_fewest_bytes_per_element(operation, dtype, forward, both):
    inputs, _ = make(row(operation, dtype), CPU)
    elements = 2 * 48 * 4
    assert OPERATIONS[operation].fewest_bytes(inputs) == (elements * forward, elements * both)


def test_percentages_and_targets_follow_from_bytes_time_and_rate(monkeypatch):
    monkeypatch.setattr(ops, "measure", lambda *rest, **named: Timing(2.0, 1.0, 3.0))
    result = ops.measure_row(row(), CPU, SHORT, (), copy=4e6)
    # 384 floats: 4,608 and 12,288 bytes in 2 ms, of 8,000 bytes
    forward, both = (result["passes"][name] for name in PASSES)
    assert forward["bytes"] == 4608 and forward["percent"] == pytest.approx(57.6) and forward["met"]
    assert both["bytes"] == 12288 and both["percent"] == pytest.approx(153.6) and both["met"]
    slower = ops.measure_row(row(), CPU, SHORT, (), copy=8e6)
    assert not slower["passes"]["forward"]["met"] and slower["passes"]["forward"]["rate"] == 8e6
    free = ops.measure_row(row(targets=(None, None)), CPU, SHORT, (), copy=8e6)
    assert free["passes"]["forward"]["met"] is None


def test_timing_orders_its_percentiles():
    timing = measure(lambda: None, CPU, Budget(0, 1))
    assert 0 <= timing.p20 <= timing.median <= timing.p80


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_call_runs_once_to_compile_and_once_to_capture():
    x, calls = torch.zeros(1, device="cuda"), []

    def call():
        calls.append(x.add_(1))

    measure(call, x.device, Budget(1, 1), replayed=True)
    assert len(calls) == 2 and x > 2
    # what cannot be captured is called
    calls.clear()
    measure(lambda: calls.append(x.item()), x.device, Budget(1, 1), replayed=True)
    assert len(calls) > 2


@pytest.mark.parametrize(("operation", "dtype"), KINDS)
# windows of 4, of 256 and of one step
@pytest.mark.parametrize("time", [52, 512, 33])
def test_right_operations_pass_the_check(operation, dtype, time):
    inputs, dy = make(row(operation, dtype, (3, time, 20)), CPU)
    check(operation, OPERATIONS[operation].run, inputs, dy)


@pytest.mark.parametrize("operation", ["scan", "gate_loop", "selective", "conv"])
@pytest.mark.parametrize("step", [0, 255, 256, 511])
def test_one_wrong_output_is_found(operation, step):
    inputs, dy = make(row(operation, shape=(2, 512, 4)), CPU)

    def wrong(*xs):
        y = OPERATIONS[operation].run(*xs).clone()
        y.data[-1, step, -1] += 0.05
        return y

    with pytest.raises(AssertionError, match="y"):
        check(operation, wrong, inputs, dy)


@thorough
@pytest.mark.parametrize(("operation", "n_inputs"), [("scan", 2), ("gate_loop", 5)])
def test_a_wrong_gradient_is_found(operation, n_inputs):
    inputs, dy = make(row(operation, shape=(2, 512, 4)), CPU)
    for number in range(n_inputs):

        def wrong(*xs, number=number):
            # the output stays, the gradient of one input is too large at one step
            factor = torch.ones_like(xs[number])
            factor[-1, 300, -1] = 1.1
            scaled = xs[number] * factor
            xs = [*xs[:number], scaled + (xs[number] - scaled).detach(), *xs[number + 1 :]]
            return OPERATIONS[operation].run(*xs)

        with pytest.raises(AssertionError, match=f"gradient of input {number + 1}"):
            check(operation, wrong, inputs, dy)


@pytest.mark.parametrize("operation", ["selective", "conv"])
def test_a_wrong_gradient_of_an_operation_that_is_checked_as_a_whole_is_found(operation):
    inputs, dy = make(row(operation), CPU)
    for number, x in enumerate(inputs):
        factor = torch.ones_like(x)
        # sums over channels and over rows are compared too
        factor.flatten()[-1] = 1.1

        def wrong(*xs, number=number, factor=factor):
            scaled = xs[number] * factor
            return OPERATIONS[operation].run(
                *xs[:number], scaled + (xs[number] - scaled).detach(), *xs[number + 1 :]
            )

        with pytest.raises(AssertionError, match=f"gradient of input {number + 1}"):
            check(operation, wrong, inputs, dy)


def test_a_failing_operation_is_not_timed(monkeypatch):
    def broken(*rest, **named):
        raise RuntimeError("no such kernel\nand much more")

    monkeypatch.setattr(operations, "scan", broken)
    result = ops.measure_row(row(), CPU, SHORT, (), copy=1.0)
    assert result["error"] == "failed, so not timed: RuntimeError: no such kernel" and "passes" not in result


def test_decays_are_realistic_in_every_dtype():
    for dtype in ("f32", "bf16", "c64"):
        magnitude = make(row(dtype=dtype, shape=(4, 100, 30)), CPU)[0][0].abs().float()
        assert magnitude.min() > 0.89 and magnitude.max() < 1


def test_peers_that_cannot_are_listed_with_the_reason():
    def raises(operation, inputs, dy):
        raise RuntimeError("needs CUDA\nTraceback ...")

    def unsuited(operation, inputs, dy):
        raise UnsuitedError("has no scan")

    def other(operation, inputs, dy):
        return Calls(lambda: None, lambda: None, lambda: 2 * inputs[1])

    def half(operation, inputs, dy):
        run = OPERATIONS[operation].run
        return Calls(lambda: None, lambda: 1 / 0, lambda: run(*inputs))

    peers = [
        Peer("absent", "", "a_module_that_is_not_there", raises),
        Peer("raises", "", "torch", raises),
        Peer("unsuited", "", "torch", unsuited),
        Peer("other", "", "torch", other),
        Peer("half", "", "torch", half),
    ]
    passes = ops.measure_row(row(), CPU, SHORT, peers, copy=1.0)["passes"]
    forward, both = (passes[name]["peers"] for name in PASSES)
    assert forward["absent"] == {"missing": "not installed"}
    assert forward["raises"] == {"missing": "RuntimeError: needs CUDA"}
    assert forward["unsuited"] == {"missing": "has no scan"}
    assert forward["other"]["off"] > 0.05 and "ms" in forward["other"] and "off" not in forward["half"]
    assert forward["half"]["ratio"] > 0
    assert both["half"] == {"missing": "ZeroDivisionError: division by zero"}


def test_reasons_are_one_short_line():
    assert len(reason(ValueError("long " * 100))) <= 120


def test_peers_on_the_cpu_compute_the_same():
    for operation, dtype in (("scan", "f32"), ("scan", "c64"), ("gate_loop", "f32")):
        inputs, dy = make(row(operation, dtype), CPU)
        y = OPERATIONS[operation].run(*inputs)
        for peer in PEERS[:2]:
            calls = peer.prepare(operation, inputs, dy)
            torch.testing.assert_close(calls.output(), y, rtol=1e-4, atol=1e-4)
            assert [gradient.shape for gradient in calls.both()] == [x.shape for x in inputs]


@pytest.mark.parametrize("rows", [CPU_ROWS, CUDA_ROWS])
def test_tables_of_all_rows_fit_80_columns(rows):
    ratio = {"ms": dataclasses.asdict(Timing(1.0, 1.0, 1.0)), "ratio": 0.01234}
    peers = (
        {peer.name: ratio for peer in PEERS}
        | {"fla": ratio | {"off": 0.0849}}
        | {"jax": {"missing": "RuntimeError: " + "why " * 20}}
    )
    entry = {
        "ms": dataclasses.asdict(Timing(0.05623, 0.05619, 0.05768)),
        "called_ms": dataclasses.asdict(Timing(0.05623, 0.05619, 0.05768)),
        "bytes": 1,
        "percent": 100.4,
        "target": 100,
        "met": True,
        "peers": peers,
    }
    number = {"about": "what it is " * 8, "value": 12.345, "unit": "x", "target": 2.0, "met": False}
    results = {
        "yardstick": "torch.add(x, y, out=z)",
        "rows": [{"name": row.name, "passes": dict.fromkeys(PASSES, entry)} for row in rows],
        "lines": [{"name": name, **number} for name in CUDA_LINES],
    }
    results["rows"][-1] = {"name": rows[-1].name, "error": "wrong, so not timed: " + "because " * 20}
    text = io.StringIO()
    table.show(Console(file=text, width=80), results)
    shown = text.getvalue()
    # nothing is too long, nothing is cut short
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert all(row.name in shown for row in rows)
    assert "fla: outputs differ from linrec's by up to 8% of the largest" in shown
    assert "0.0562" in shown and "0.0562-0.0577" in shown and "0.0123" in shown and "12.3 x" in shown


def test_names_are_unique_and_select_their_rows():
    for device in ("cpu", "cuda"):
        rows, names = rows_of(device), lines_of(device)
        assert len({row.name for row in rows} | set(names)) == len(rows) + len(names)
        assert select([], rows, names) == (rows, names)
        assert select([rows[1].name, names[0]], rows, names) == ([rows[1]], [names[0]])


def test_a_step_is_measured_with_both_backends(monkeypatch):
    called = []

    def spied(*xs, **options):
        called.append(options["backend"])
        return gate_loop(*xs, **options)

    monkeypatch.setattr(lines, "gate_loop", spied)
    result = lines.measure_line("step", CPU, SHORT, quick=True)
    ratio = result["kernels_ms"]["median"] / result["torch_ms"]["median"]
    assert result["value"] == pytest.approx(ratio) and result["met"] == (ratio <= 1 / 3)
    # what the layer calls in the second half, once per block and step
    assert called and set(called) == {"torch"} and len(called) % 4 == 0


def test_a_failing_line_has_an_error_and_no_value():
    # there is no CUDA memory to look at
    result = lines.measure_line("memory-f32", torch.device("meta"), SHORT, quick=True)
    assert result["error"].startswith("failed: ") and "value" not in result
