"""gate_loop's bonus against formulas written apart from it; test_laws.py has the laws."""

import itertools

import numpy as np
import pytest
import torch

from linrec.ops import gate_loop, gate_loop_matrix
from linrec.testing import assert_agree, check_operator, gate_loop_inputs, reset_mask
from linrec.trees import double
from tests.tiers import thorough

# Triton's kernels need a GPU
HERE = [pair for pair in gate_loop.operator.pairs if pair[1] != "triton"]
every_pair = pytest.mark.parametrize(("mode", "backend"), HERE)
every_fast_pair = pytest.mark.parametrize(
    ("mode", "backend"), [pair for pair in HERE if pair[1] != "reference"]
)


@every_pair
def test_rwkv(mode, backend):
    # wkv_t = diag(u) k_t^T v_t + sum_{i<t} (prod_{i<j<t} diag(w_j)) k_i^T v_i, one product per pair of steps
    inputs = gate_loop_inputs(1, 9, 1, 3, 2, dtype=torch.float64, phase=None, bonus=True) | {"state": None}
    r, k, v, log_w = (inputs[name][0, :, 0].numpy() for name in ("q", "k", "v", "log_decay"))
    u = inputs["bonus"][0].numpy()
    expected = np.zeros((9, 2))
    for t in range(9):
        expected[t] = r[t] @ np.outer(u * k[t], v[t])
        for i in range(t):
            expected[t] += r[t] @ np.outer(np.exp(log_w[i + 1 : t].sum(0)) * k[i], v[i])
    y, _ = gate_loop(**inputs, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0, :, 0], expected, atol=1e-12)


@every_pair
def test_the_state_is_that_without_a_bonus(mode, backend):
    inputs = gate_loop_inputs(2, 9, 2, 3, 2, bonus=True)
    _, state = gate_loop(**inputs, mode=mode, backend=backend)
    del inputs["bonus"]
    assert_agree(state, gate_loop(**inputs, mode=mode, backend=backend)[1])


@every_pair
def test_a_reset_leaves_the_current_token_alone(mode, backend):
    inputs = gate_loop_inputs(2, 9, 2, 3, 2, bonus=True)
    y, _ = gate_loop(**inputs, reset=torch.ones(2, 9).bool(), mode=mode, backend=backend)
    q, k, v, bonus = (inputs[name] for name in ("q", "k", "v", "bonus"))
    assert_agree(y, (q * bonus * k).sum(-1, keepdim=True) * v)


@every_pair
def test_the_past_and_the_current_token_are_rounded_once_together(mode, backend):
    inputs = gate_loop_inputs(2, 20, 2, 1, 1, bonus=True, dtype=torch.bfloat16)
    y, _ = gate_loop(**inputs, mode=mode, backend=backend)
    exact, _ = gate_loop(**double(inputs), mode="recurrent", backend="reference")
    # the spacing of bfloat16 is 2^-8 to 2^-7 of a number, and rounding is off by half of it
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


@thorough
@every_fast_pair
@pytest.mark.parametrize("sizes", [(3, 2), (1, 1)])
def test_gates_lengths_and_precisions(mode, backend, sizes):
    cases = [
        {},
        {"phase": None},
        {"log_decay": "h", "phase": "hk"},
        {"log_decay": None, "phase": None, "complex_qk": True},
    ]
    for case, time in itertools.product(cases, (1, 2, 70)):
        inputs = gate_loop_inputs(2, time, 2, *sizes, bonus=True, **case)
        options = {"reset": reset_mask(2, time, rate=0.05)}
        check_operator(gate_loop, inputs, mode=mode, backend=backend, dtype=torch.float32, options=options)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = gate_loop_inputs(2, 20, 2, *sizes, bonus=True, dtype=dtype)
        check_operator(gate_loop, inputs, mode=mode, backend=backend, dtype=dtype)


@pytest.mark.parametrize("time", [1, 7, 40])
def test_matrix_times_values_is_the_output(time):
    gates = (None, "h", "hk", "bth", "bthk")
    for log_decay, phase, complex_qk in itertools.product(gates, gates, (False, True)):
        inputs = gate_loop_inputs(
            2, time, 2, 3, 2, log_decay=log_decay, phase=phase, complex_qk=complex_qk, bonus=True
        )
        del inputs["state"]
        for reset in (None, reset_mask(2, time)):
            y, _ = gate_loop(**inputs, reset=reset, mode="recurrent", backend="torch")
            given = {name: tensor for name, tensor in inputs.items() if name != "v"}
            matrix = gate_loop_matrix(**given, reset=reset)
            assert_agree(torch.einsum("bhnm,bmhd->bnhd", matrix, inputs["v"]), y)
            assert torch.equal(matrix, matrix.tril())


def test_vmap():
    inputs = gate_loop_inputs(2, 9, 2, 3, 2, bonus=True)
    names = list(inputs)
    stacked = [torch.stack([inputs[name], inputs[name].flip(0)]) for name in names]

    def of(*tensors):
        return gate_loop(**dict(zip(names, tensors, strict=True)))

    expected = [of(*(tensor[i] for tensor in stacked)) for i in range(2)]
    for actual, pieces in zip(torch.func.vmap(of)(*stacked), zip(*expected, strict=True), strict=True):
        assert_agree(actual, torch.stack(pieces))


X = torch.zeros(2, 5, 3, 4)


@pytest.mark.parametrize(
    ("bonus", "error", "words"),
    [
        (X[0, 0, 0], ValueError, r"`bonus` must have shape \(h, dk\) = \(3, 4\); got \(4,\)"),
        (X, ValueError, r"`bonus` must have shape .* one factor per head and key channel"),
        (X[0, 0].double(), TypeError, r"`bonus` must be float32; got float64"),
        (X[0, 0].to(torch.complex64), TypeError, r"`bonus` must be float32; got complex64"),
        (X[0, 0].to("meta"), ValueError, r"`bonus` must be on the device of `q`, 'cpu'; got 'meta'"),
    ],
)
def test_errors(bonus, error, words):
    with pytest.raises(error, match=words):
        gate_loop(X, X, X, bonus=bonus)
    with pytest.raises(error, match=words):
        gate_loop_matrix(X, X, bonus=bonus)
