"""generalized_delta_rule against formulas written apart from it; test_laws.py has the laws."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from linrec.ops import delta_rule, generalized_delta_rule
from linrec.ops.generalized_delta_rule import OPERATOR
from linrec.ops.generalized_delta_rule.torch import GeneralizedDeltaRule
from linrec.testing import (
    assert_agree,
    check_operator,
    delta_rule_inputs,
    generalized_delta_rule_inputs,
    reset_mask,
)
from tests.ops.entries import check_forgetting
from tests.tiers import thorough

# test_delta_rule_triton.py and test_matrix_triton.py have the others
HERE = [pair for pair in OPERATOR.pairs if pair[1] != "triton"]
FAST = [pair for pair in HERE if pair[1] != "reference"]
every_pair = pytest.mark.parametrize(("mode", "backend"), HERE)
every_fast_pair = pytest.mark.parametrize(("mode", "backend"), FAST)


@thorough
@every_fast_pair
def test_every_shape_of_the_decays(mode, backend):
    for log_decay, time in itertools.product((None, "h", "hk", "bth", "bthk"), (19, 130)):
        inputs = generalized_delta_rule_inputs(2, time, 2, 3, 4, log_decay=log_decay)
        options = {"reset": reset_mask(2, time, rate=0.1)}
        pair = {"mode": mode, "backend": backend}
        check_operator(generalized_delta_rule, inputs, **pair, dtype=torch.float32, options=options)


@every_fast_pair
def test_every_size_of_a_head(mode, backend):
    for dk, dv in ((1, 1), (1, 5), (5, 1), (17, 3), (8, 8)):
        inputs = generalized_delta_rule_inputs(1, 70, 1, dk, dv)
        check_operator(generalized_delta_rule, inputs, mode=mode, backend=backend, dtype=torch.float32)


@every_pair
def test_the_papers_equation(mode, backend):
    # RWKV-7 (17), as it stands: the state is the transpose, (dv, dk), with w decay and kappa, a of the rule
    inputs = generalized_delta_rule_inputs(1, 70, 1, 3, 4, dtype=torch.float64)
    r, k, v, kappa, erasing, w = (inputs[x][0, :, 0].numpy() for x in ("q", "k", "v", "r", "w", "log_decay"))
    a, w, S, expected = erasing / kappa, np.exp(w), inputs["state"][0, 0].numpy().T, []
    for t in range(70):
        S = S @ (np.diag(w[t]) - np.outer(kappa[t], a[t] * kappa[t])) + np.outer(v[t], k[t])
        expected.append(S @ r[t])
    y, state = generalized_delta_rule(**inputs, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0, :, 0], expected, atol=1e-12)
    np.testing.assert_allclose(state[0, 0], S.T, atol=1e-12)


@every_pair
@pytest.mark.parametrize("log_decay", [None, "bth", "bthk"])
def test_the_delta_rule_is_a_case(mode, backend, log_decay):
    inputs = delta_rule_inputs(2, 70, 2, 3, 4, dtype=torch.float64, log_decay=log_decay, largest_beta=2.0)
    reset = reset_mask(2, 70)
    expected = delta_rule(**inputs, reset=reset)
    beta, decay = inputs.pop("beta")[..., None], inputs["log_decay"]
    # the decayed state is read
    a = 1 if decay is None else decay.reshape(2, 70, 2, -1).exp()
    more = {"v": beta * inputs["v"], "r": beta * a * inputs["k"], "w": inputs["k"]}
    found = generalized_delta_rule(**inputs | more, reset=reset, mode=mode, backend=backend)
    assert_agree(found, expected)


@every_pair
def test_a_value_moves_from_one_key_to_another(mode, backend):
    # unlike the delta rule, what r reads is added under another vector w
    e = torch.eye(3)
    state = torch.tensor([[5.0], [7.0], [0.0]])[None, None]
    row = [x.reshape(1, 1, 1, -1) for x in (e[2], 0 * e[0], torch.zeros(1), e[0], e[0] - e[2])]
    y, last = generalized_delta_rule(*row, state=state, mode=mode, backend=backend)
    assert (y.item(), last.flatten().tolist()) == (5.0, [0.0, 7.0, 5.0])


@every_pair
def test_the_undecayed_state_is_read(mode, backend):
    # of 8 decayed to 2, the read 8 / 4 is erased: with log decays of -inf alone, -2 is left
    one = torch.ones(1, 1, 1, 1)
    for decay, left in ((0.25, 0.0), (0.0, -2.0)):
        given = (one, one, 0 * one, one / 4, one, torch.full_like(one, decay).log())
        y, last = generalized_delta_rule(*given, state=8 * one, mode=mode, backend=backend)
        assert (y.item(), last.item()) == (left, left)


@every_fast_pair
@pytest.mark.parametrize("strong", [-math.inf, -3.0e38, -1.0e4])
def test_a_forgetting_step_costs_later_steps_no_digits(mode, backend, strong):
    check_forgetting(generalized_delta_rule, generalized_delta_rule_inputs, (mode, backend), strong)


@every_fast_pair
def test_long_products_of_reflections_keep_the_norm_of_a_state(mode, backend):
    inputs = generalized_delta_rule_inputs(1, 4096, 1, 8, 8, log_decay=None)
    r = normalize(inputs["r"], dim=-1)
    inputs |= {"r": r, "w": 2 * r, "v": torch.zeros(1, 4096, 1, 8)}
    _, state = generalized_delta_rule(**inputs, mode=mode, backend=backend)
    torch.testing.assert_close(state.norm(), inputs["state"].norm(), rtol=1e-4, atol=0)


@every_fast_pair
def test_vmap(mode, backend):
    inputs = generalized_delta_rule_inputs(2, 9, 2, 3, 2)
    stacked = [torch.stack([x, x.flip(0)]) for x in inputs.values()]

    def of(*tensors):
        return generalized_delta_rule(**dict(zip(inputs, tensors, strict=True)), mode=mode, backend=backend)

    expected = [of(*(tensor[i] for tensor in stacked)) for i in range(2)]
    for actual, pieces in zip(torch.func.vmap(of)(*stacked), zip(*expected, strict=True), strict=True):
        assert_agree(actual, torch.stack(pieces))


@pytest.mark.parametrize(
    ("device", "machine", "time", "dk", "expected"),
    [
        ("cpu", {}, 4, 3, ("recurrent", "torch")),
        ("cpu", {}, 5, 3, ("chunkwise", "torch")),
        ("cpu", {"numba": True}, 99, 3, ("recurrent", "numba")),
        ("cuda", {"triton": True}, 1, 600, ("recurrent", "triton")),
        ("cuda", {"triton": True}, 2, 3, ("chunkwise", "triton")),
        ("cuda", {"triton": True}, 99, 600, ("chunkwise", "torch")),
        ("cuda", {"triton": True, "exporting": True}, 99, 3, ("chunkwise", "torch")),
    ],
)
def test_auto(machine_with, chosen, device, machine, time, dk, expected):
    machine_with(**machine)
    given = GeneralizedDeltaRule(reset=None, **generalized_delta_rule_inputs(1, time, 2, dk, 2))
    assert chosen(OPERATOR, given, device) == expected


X = torch.zeros(2, 5, 3, 4)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"r": X[..., :2]}, ValueError, r"`r` must have shape .*, that of `q`, .*; got \(2, 5, 3, 2\)"),
        ({"w": X[:, :4]}, ValueError, r"`w` must have shape .*, that of `q`, .*; got \(2, 4, 3, 4\)"),
        ({"r": X.bfloat16()}, TypeError, r"`r` must have the real precision of `q`, float32; got bfloat16"),
        ({"w": X.to(torch.complex64)}, TypeError, r"`w` of `generalized_delta_rule` must be real; got"),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        generalized_delta_rule(**{"q": X, "k": X, "v": X, "r": X, "w": X} | changed)
