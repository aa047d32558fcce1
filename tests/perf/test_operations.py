"""Inputs, checks and bytes of the operators: `ops`, `matrix` and `steps`."""

import pytest
import torch

from perf import matrix
from perf.engine import BOTH, FORWARD, Calls, Implementation
from perf.matrix import ASKED, Matrix, Steps, check_step, limits_of, make_step
from perf.operations import OPERATIONS, Row, check, make
from perf.peers import PEERS
from perf.timing import Bench, Budget, Timing, UnsuitedError
from tests.perf.conftest import wrong
from tests.tiers import tiered

CPU = torch.device("cpu")
BENCH = Bench(CPU, Budget(0, 0))
KINDS = [(name, dtype) for name in OPERATIONS for dtype in ("f32", "bf16")] + [("scan", "c64")]


def inputs_of(operation, dtype="f32", size=(2, 48, 4)):
    return make(Row(operation, size, dtype), CPU)


@pytest.mark.parametrize(
    ("operation", "dtype", "forward", "both"),
    [
        ("scan", "f32", 3 * 4, 8 * 4),
        ("scan", "bf16", 3 * 2, 8 * 2),
        ("scan", "c64", 3 * 8, 8 * 8),
        ("gate_loop", "f32", 6 * 4, 17 * 4),
        ("gate_loop", "bf16", 6 * 2, 17 * 2),
        ("selective", "bf16", 3 * 2, 8 * 2),
        # u of (2, 48, 4) in bfloat16, and K of (4, 48) in float32
        ("conv", "bf16", 2 * 2 + 4 / 2, 5 * 2 + 3 * 4 / 2),
    ],
)
def test_fewest_bytes_per_element(operation, dtype, forward, both):
    elements = 2 * 48 * 4
    expected = {FORWARD: elements * forward, BOTH: elements * both}
    assert OPERATIONS[operation].fewest_bytes(inputs_of(operation, dtype)[0]) == expected


@pytest.mark.parametrize(("operation", "dtype"), KINDS)
# windows of 4, of 256 and of one step
@pytest.mark.parametrize("time", [52, 512, 33])
def test_right_operations_pass_the_check(operation, dtype, time):
    check(operation, *inputs_of(operation, dtype, (3, time, 20)))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("step", [0, 255, 256, 511])
def test_one_wrong_output_is_found(operation, step):
    def off(*xs):
        y = OPERATIONS[operation].run(*xs).clone()
        y.data[-1, step, -1] += 0.05
        return y

    with pytest.raises(AssertionError, match="y"):
        check(operation, *inputs_of(operation, size=(2, 512, 4)), off)


@pytest.mark.parametrize("operation", tiered(["selective", "conv"], ["scan", "gate_loop"]))
def test_a_wrong_gradient_is_found(operation):
    inputs, dy = inputs_of(operation, size=(2, 512, 4))
    for number, x in enumerate(inputs):
        factor = torch.ones_like(x)
        factor.flatten()[-1] = 1.1

        def off(*xs, number=number, factor=factor):
            # the output stays, the last gradient of one input is too large
            scaled = xs[number] * factor
            changed = scaled + (xs[number] - scaled).detach()
            return OPERATIONS[operation].run(*xs[:number], changed, *xs[number + 1 :])

        with pytest.raises(AssertionError, match=f"gradient of input {number + 1}"):
            check(operation, inputs, dy, off)


def test_decays_are_realistic_in_every_dtype():
    for dtype in ("f32", "bf16", "c64"):
        magnitude = inputs_of("scan", dtype, (4, 100, 30))[0][0].abs().float()
        assert magnitude.min() > 0.89 and magnitude.max() < 1


@pytest.mark.parametrize(
    ("operation", "dtype", "names"),
    [
        *(("scan", dtype, ("torch", "loop")) for dtype in ("f32", "c64")),
        ("gate_loop", "f32", ("torch", "loop")),
        ("conv", "f32", ("fft",)),
    ],
)
def test_peers_on_the_cpu_compute_the_same(operation, dtype, names):
    inputs, dy = inputs_of(operation, dtype)
    y = OPERATIONS[operation].run(*inputs)
    for peer in (peer for peer in PEERS if peer.name in names):
        calls = peer.prepare(operation, inputs, dy)
        torch.testing.assert_close(calls.outputs()[0], y, rtol=1e-4, atol=1e-4)
        assert sum(x.numel() for x in calls.passes[BOTH]()) == sum(x.numel() for x in inputs)


@pytest.mark.parametrize("peer", PEERS[1:], ids=lambda peer: peer.name)
def test_peers_refuse_operations_that_they_lack(peer):
    lacking = "scan" if peer.name in ("mamba", "fft", "flash") else "conv"
    with pytest.raises(UnsuitedError, match=f"has no {lacking}"):
        peer.calls(lacking, *inputs_of(lacking))


def measured(command, row, peers, monkeypatch, bench=BENCH):
    monkeypatch.setattr(command, "known", peers)
    return command("cpu", peers=True).measure(bench, row)


SIZE = (2, 9, 3, 4)
ONE = (2, 1, 3, 4)


def test_limits_of_a_row():
    forward, both = limits_of(Row("channel", (1, 10, 2, 4, 8), "bf16")).values()
    # q and k of 4 channels, v and y of 8 in bfloat16, and log decays of 4 in float32
    assert forward == (20 * (8 + 8 + 16 + 16 + 16), 20 * (4 * 4 * 8 + 64 * 12))
    # q, k, v, log decays and dy are read, and four gradients written
    assert both == (forward[0] + 20 * (8 + 8 + 16 + 16 + 16 + 8 + 8 + 16 + 16), 3 * forward[1])


def test_shares_of_the_limits(run):
    _, results, _ = run("matrix", "--heads", "--rows", "channel-bf16-1x70x1x16x32")
    (found,) = results["rows"]
    made = Row("channel", (1, 70, 1, 16, 32), "bf16")
    for name, (n_bytes, products) in limits_of(made).items():
        entry = found["passes"][name]
        least = max(n_bytes / results["copy_rate"], products / results["matmul_rate"])
        assert entry["share"] == pytest.approx(least / entry["ms"]["median"] * 1e3)


@pytest.mark.parametrize("operation", ASKED)
def test_a_wrong_matrix_operator_is_found(operation, monkeypatch):
    row = Row(operation, SIZE, "f32")
    inputs, dy = matrix.make(row, CPU)
    matrix.check(row, inputs, dy)
    name = matrix.operator(operation).__name__
    monkeypatch.setattr(matrix, name, wrong(getattr(matrix, name)))
    with pytest.raises(AssertionError, match=r"^y: "):
        matrix.check(row, inputs, dy)


def test_ratios_are_compared_with_the_asked_ones(monkeypatch):
    times = iter([2.0, 9.0, 8.0, 3.0])
    monkeypatch.setattr(Bench, "measure", lambda *rest, **named: Timing(*3 * (next(times),)))
    attention = [peer for peer in Matrix.known if peer.name == "attention"]
    passes = measured(Matrix, Row("head", SIZE, "f32"), attention, monkeypatch)["passes"]
    forward, both = (passes[name]["peers"]["attention"] for name in (FORWARD, BOTH))
    assert (forward["ratio"], forward["asked"], forward["met"]) == (0.25, 1.0, True)
    assert (both["ratio"], both["asked"], both["met"]) == (3.0, 1.0, False)


def test_peers_of_matrix_operators_compute_the_same(monkeypatch):
    for operation in ASKED:
        row = Row(operation, SIZE, "f32")
        passes = measured(Matrix, row, Matrix.known, monkeypatch)["passes"]
        for entry in passes.values():
            assert "off" not in entry["peers"]["torch"] and "off" not in entry["peers"]["reference"]
            reason = entry["peers"]["fla"]["missing"]
            assert reason in ("not installed", "runs on CUDA alone")


@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("operation", ASKED)
def test_arguments_of_flash_linear_attention(operation, kind, monkeypatch):
    given = []

    class Fla:
        def __getattr__(self, name):
            return lambda *tensors, **named: given.append((name, tensors, named))

    monkeypatch.setattr(
        "importlib.import_module", lambda name: Fla() if name.startswith("fla.ops.") else 1 / 0
    )
    inputs, _ = matrix.make(Row(operation, ONE, "f32"), CPU)
    matrix._fla(kind, operation)(*inputs)
    ((name, tensors, named),) = given
    names = {"linear": "linear_attn", "head": "simple_gla", "channel": "gla"}
    assert name == f"{kind}_{names.get(operation, f'{operation}_rule')}"
    assert len(tensors) == 3 and named.pop("scale") == 1.0 and named.pop("normalize", False) is False
    gate = "gk" if (operation, kind) == ("channel", "fused_recurrent") else "g"
    expected = {"head": [gate], "channel": [gate], "delta": ["beta"], "gated_delta": ["beta", "g"]}
    assert list(named) == expected.get(operation, [])
    assert all(found is mine for found, mine in zip(named.values(), inputs[3:], strict=True))


def middle(found):
    # one number, in the middle of the batch, heads and channels
    changed = found.clone()
    changed.flatten()[found.numel() // 2] += 0.01
    return changed


@pytest.mark.parametrize(
    ("operation", "dtype", "part", "change"),
    [
        *((operation, "f32", part, middle) for operation in ASKED for part in (0, 1)),
        # a state is float32 for inputs of every dtype
        ("head", "bf16", 1, lambda state: state.bfloat16().float()),
    ],
)
def test_one_wrong_number_of_a_step_is_found(operation, dtype, part, change, monkeypatch):
    row = Row(operation, ONE, dtype)
    check_step(row, *make_step(row, CPU))
    name = matrix.operator(operation).__name__
    monkeypatch.setattr(matrix, name, wrong(getattr(matrix, name), part, change))
    result = measured(Steps, row, (), monkeypatch)
    told = f"linrec: wrong, so not timed: {('y', 'state')[part]}: "
    assert result["error"].startswith(told) and "ms" not in result


@pytest.mark.parametrize(
    ("operation", "numbers", "singles"),
    # beside q, k, v and y: strengths in the dtype of q, decays in float32
    [("linear", 0, 0), ("head", 0, 6), ("channel", 0, 24), ("delta", 6, 0), ("gated_delta", 6, 6)],
)
def test_fewest_bytes_of_a_step(operation, numbers, singles):
    inputs, state = make_step(Row(operation, ONE, "bf16"), CPU)
    expected = 2 * (4 * 24 + numbers) + 4 * (singles + 2 * 96)
    assert matrix.fewest_bytes(inputs, inputs[2], state) == expected


def test_peers_of_a_step_are_compared_without_gradients(monkeypatch):
    recorded = []

    def forgets(operation, inputs, state):
        right = matrix.STEP_PEERS[0].prepare(operation, inputs, state)

        def step():
            recorded.append(torch.is_grad_enabled())
            return right.outputs()[0], torch.zeros_like(state)

        return Calls({FORWARD: step}, step)

    peers = [Implementation("forgets", "", "torch", forgets), matrix.STEP_PEERS[0]]
    found = measured(Steps, Row("delta", ONE, "f32"), peers, monkeypatch)["peers"]
    assert found["forgets"]["off"] == pytest.approx(1.0) and found["forgets"]["ratio"] > 0
    assert recorded and not any(recorded) and "off" not in found["torch"]
