"""normalized_gate_loop against the formulas of the models that divide; test_laws.py has the laws."""

import math

import numpy as np
import pytest
import torch

from linrec.ops import gate_loop, normalized_gate_loop
from linrec.testing import assert_agree, check_operator, gate_loop_inputs, generator, reset_mask
from linrec.trees import double
from tests.tiers import thorough

# Triton's kernels need a GPU
HERE = [pair for pair in normalized_gate_loop.operator.pairs if pair[1] != "triton"]
every_pair = pytest.mark.parametrize(("mode", "backend"), HERE)


def features(time: int = 12, **arguments) -> dict:
    """Inputs without a state, and features >= 0."""
    arguments = {"log_decay": None, "phase": None, "dtype": torch.float64} | arguments
    inputs = gate_loop_inputs(1, time, 2, 3, 2, **arguments) | {"state": None}
    return inputs | {name: inputs[name].abs() for name in "qk"}


@every_pair
def test_linear_attention(mode, backend):
    # rows of weights that sum to one
    inputs = features()
    q, k, v = (inputs[name][0].transpose(0, 1).numpy() for name in "qkv")
    weights = np.tril(q @ k.transpose(0, 2, 1))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    y, state = normalized_gate_loop(**inputs, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0].transpose(0, 1), expected, atol=1e-12)
    np.testing.assert_allclose(state[0, ..., :-1], k.transpose(0, 2, 1) @ v, atol=1e-12)
    np.testing.assert_allclose(state[0, ..., -1], k.sum(1), atol=1e-12)


@every_pair
def test_cosformer(mode, backend):
    # weights relu(q).relu(k) cos(pi (n - m) / (2 M)): a constant phase
    inputs = features()
    q, k, v = (inputs[name][0].transpose(0, 1).numpy() for name in "qkv")
    n = np.arange(12)
    weights = np.tril(q @ k.transpose(0, 2, 1) * np.cos(np.pi * (n[:, None] - n) / 48))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    inputs["phase"] = torch.full((2,), math.pi / 48, dtype=torch.float64)
    y, _ = normalized_gate_loop(**inputs, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0].transpose(0, 1), expected, atol=1e-12)


@every_pair
def test_mlstm(mode, backend):
    # eq. 19-27 without a stabiliser, against gates and a floor that are stabilised by m_t
    inputs = gate_loop_inputs(1, 12, 1, 3, 2, dtype=torch.float64, log_decay=None, phase=None)
    q, k, v = (inputs[name][0, :, 0].numpy() for name in "qkv")
    log_i, log_f = torch.randn(2, 12, generator=generator(), dtype=torch.float64).mul(2).numpy()
    log_f = -np.log1p(np.exp(-log_f))
    matrix, sums, m = np.zeros((2, 3)), np.zeros(3), 0.0
    expected, gates, floors = np.zeros((12, 2)), np.zeros((2, 12)), np.zeros(12)
    for t in range(12):
        matrix = np.exp(log_f[t]) * matrix + np.exp(log_i[t]) * np.outer(v[t], k[t])
        sums = np.exp(log_f[t]) * sums + np.exp(log_i[t]) * k[t]
        expected[t] = matrix @ q[t] / max(abs(sums @ q[t]), 1)
        before, m = m, max(log_f[t] + m, log_i[t])
        gates[:, t] = np.exp(log_i[t] - m), log_f[t] + before - m
        floors[t] = np.exp(-m)
    i, log_decay = torch.from_numpy(gates)[:, None, :, None]
    y, _ = normalized_gate_loop(
        inputs["q"],
        inputs["k"] * i[..., None],
        inputs["v"],
        log_decay,
        floor=torch.from_numpy(floors)[None, :, None],
        signed=False,
        mode=mode,
        backend=backend,
    )
    np.testing.assert_allclose(y[0, :, 0], expected, atol=1e-12)


@every_pair
def test_rwkv4(mode, backend):
    # wkv of one channel: (sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / the same without v
    k, v = torch.randn(2, 9, generator=generator(), dtype=torch.float64).numpy()
    w, u = 0.3, 0.8
    expected = []
    for t in range(9):
        weights = np.exp(np.append(-(t - 1 - np.arange(t)) * w, u) + k[: t + 1])
        expected.append(weights @ v[: t + 1] / weights.sum())
    keys, values = (torch.from_numpy(x)[None, :, None, None] for x in (np.exp(k), v))
    y, _ = normalized_gate_loop(
        torch.ones_like(keys),
        keys,
        values,
        keys.new_tensor([-w]),
        bonus=keys.new_tensor([[math.exp(u)]]),
        mode=mode,
        backend=backend,
    )
    np.testing.assert_allclose(y.flatten(), expected, atol=1e-12)


@every_pair
def test_denominators_near_zero(mode, backend):
    # one step, so that z is q k
    q = torch.tensor([2.0, -2.0, 0.25, -0.25, 0.0]).reshape(5, 1, 1, 1).requires_grad_()
    k, v = torch.ones(5, 1, 1, 1, requires_grad=True), torch.full((5, 1, 1, 1), 3.0)
    chosen = {"floor": 0.5, "mode": mode, "backend": backend}
    y, _ = normalized_gate_loop(q, k, v, **chosen)
    torch.testing.assert_close(y.flatten(), torch.tensor([3.0, 3.0, 1.5, 1.5, 0.0]))
    # of the numerator alone, 3 k / 0.5, where z is below the floor
    (gradient,) = torch.autograd.grad(y.sum(), q)
    torch.testing.assert_close(gradient.flatten(), torch.tensor([0.0, 0.0, 6.0, -6.0, 6.0]))
    y, _ = normalized_gate_loop(q, k, v, **chosen, signed=False)
    torch.testing.assert_close(y.flatten(), torch.tensor([3.0, -3.0, 1.5, -1.5, 0.0]))


@every_pair
def test_a_floor_has_gradients_where_it_is_the_denominator(mode, backend):
    q = torch.tensor([2.0, 0.25]).reshape(1, 2, 1, 1)
    k, v = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1), torch.full((1, 2, 1, 1), 3.0)
    floor = torch.full((1, 2, 1), 0.5, requires_grad=True)
    y, _ = normalized_gate_loop(q, k, v, floor=floor, mode=mode, backend=backend)
    (gradient,) = torch.autograd.grad(y.sum(), floor)
    # the second is 0.25 * 3 / floor
    torch.testing.assert_close(gradient.flatten(), torch.tensor([0.0, -3.0]))


@every_pair
def test_quotients_are_rounded_once(mode, backend):
    inputs = features(20, dtype=torch.bfloat16)
    y, state = normalized_gate_loop(**inputs, mode=mode, backend=backend)
    exact, _ = normalized_gate_loop(**double(inputs), mode="recurrent", backend="reference")
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


@thorough
@pytest.mark.parametrize(("mode", "backend"), [pair for pair in HERE if pair[1] != "reference"])
def test_heads_of_one_channel(mode, backend):
    # they run as two heads
    for log_decay, phase in (("h", "bthk"), ("hk", "bth"), ("bth", None), ("bthk", "h"), (None, None)):
        for time in (1, 20):
            inputs = gate_loop_inputs(2, time, 3, 1, 1, log_decay=log_decay, phase=phase, bonus=True)
            wider = gate_loop_inputs(2, time, 3, 1, 2, log_decay=log_decay, phase=phase)
            inputs |= {"state": wider["state"], "floor": torch.full((2, time, 3), 0.3)}
            for given in (inputs, inputs | {"bonus": None, "state": None}):
                options = {"reset": reset_mask(2, time, rate=0.2), "signed": False}
                check_operator(
                    normalized_gate_loop,
                    given,
                    mode=mode,
                    backend=backend,
                    dtype=torch.float32,
                    options=options,
                )


def test_no_steps_hand_the_state_on():
    state = torch.rand(2, 3, 4, 6)
    none = torch.zeros(2, 0, 3, 4)
    for backend in ("auto", "reference"):
        y, last = normalized_gate_loop(none, none, none.new_zeros(2, 0, 3, 5), state=state, backend=backend)
        assert y.shape == (2, 0, 3, 5)
        assert_agree(last, state)


def test_the_sums_are_those_of_gate_loop():
    inputs = gate_loop_inputs(2, 9, 2, 3, 2, phase=None)
    _, expected = gate_loop(**inputs | {"state": None})
    _, state = normalized_gate_loop(**inputs | {"state": None})
    assert_agree(state[..., :-1], expected)


X = torch.zeros(2, 5, 3, 4)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"floor": 0.0}, ValueError, r"`floor` must be positive and finite; got 0.0"),
        ({"floor": math.nan}, ValueError, r"`floor` must be positive and finite; got nan"),
        ({"floor": X[..., 0, 0]}, ValueError, r"`floor` must .* \(b, t, h\) = \(2, 5, 3\); got \(2, 5\)"),
        ({"floor": X[..., 0].double()}, TypeError, r"`floor` must be float32; got float64"),
        ({"floor": X[..., 0].to("meta")}, ValueError, r"`floor` must be on the device of `q`, 'cpu'"),
        (
            {"state": torch.zeros(2, 3, 4, 4)},
            ValueError,
            r"`state` must have shape \(b, h, dk, dv \+ 1\) = \(2, 3, 4, 5\); got \(2, 3, 4, 4\)",
        ),
        ({"v": X.double()}, TypeError, r"`v` must have the real precision of `q`, float32; got float64"),
        ({"log_decay": X.bfloat16()}, TypeError, r"`log_decay` must be float32; got bfloat16"),
        ({"bonus": X}, ValueError, r"`bonus` must have shape \(h, dk\) = \(3, 4\)"),
        ({"mode": "chunk"}, ValueError, r"no `mode` of `normalized_gate_loop` called 'chunk'; did you mean"),
        ({"mode": "scan", "backend": "reference"}, ValueError, r"`normalized_gate_loop` has no"),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        normalized_gate_loop(**{"q": X, "k": X, "v": X} | changed)
