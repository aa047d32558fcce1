"""delta_rule against formulas written apart from it; test_laws.py has the laws."""

import itertools
import math

import numpy as np
import pytest
import torch

from linrec.ops import delta_rule, gate_loop
from linrec.ops.delta_rule import OPERATOR
from linrec.ops.delta_rule.torch import DeltaRule
from linrec.testing import assert_agree, check_operator, delta_rule_inputs, reset_mask
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
        inputs = delta_rule_inputs(2, time, 2, 3, 4, log_decay=log_decay, largest_beta=2.0)
        options = {"reset": reset_mask(2, time, rate=0.1)}
        check_operator(delta_rule, inputs, mode=mode, backend=backend, dtype=torch.float32, options=options)


@every_fast_pair
def test_every_size_of_a_head(mode, backend):
    for dk, dv in ((1, 1), (1, 5), (5, 1), (17, 3), (8, 8)):
        inputs = delta_rule_inputs(1, 70, 1, dk, dv)
        check_operator(delta_rule, inputs, mode=mode, backend=backend, dtype=torch.float32)


@every_pair
def test_the_papers_equation(mode, backend):
    # Gated DeltaNet (10), as it stands: the state is the transpose, (dv, dk)
    inputs = delta_rule_inputs(1, 70, 1, 3, 4, dtype=torch.float64, largest_beta=2.0)
    q, k, v, beta, alpha = (inputs[name][0, :, 0].numpy() for name in ("q", "k", "v", "beta", "log_decay"))
    alpha = np.exp(alpha)
    S, expected = inputs["state"][0, 0].numpy().T, []
    for t in range(70):
        S = S @ (alpha[t] * (np.eye(3) - beta[t] * np.outer(k[t], k[t]))) + beta[t] * np.outer(v[t], k[t])
        expected.append(S @ q[t])
    y, state = delta_rule(**inputs, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0, :, 0], expected, atol=1e-12)
    np.testing.assert_allclose(state[0, 0], S.T, atol=1e-12)


@every_pair
def test_a_decay_per_channel_comes_before_the_correction(mode, backend):
    # S_0 = (8, 8)^T decays to (4, 2)^T, of which k = (1, 0) reads 4; beta = 1/2 moves it half the way to 0
    one = torch.ones(1, 1, 1, 1)
    k = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    log_decay = torch.tensor([[0.5, 0.25]]).log()
    start = torch.full((1, 1, 2, 1), 8.0)
    beta = torch.full((1, 1, 1), 0.5)
    y, state = delta_rule(k, k, 0 * one, beta, log_decay, state=start, mode=mode, backend=backend)
    torch.testing.assert_close((y.item(), state.flatten().tolist()), (2.0, [2.0, 2.0]))


@every_pair
def test_with_orthogonal_keys_it_is_linear_attention(mode, backend):
    inputs = delta_rule_inputs(2, 8, 2, 8, 3, dtype=torch.float64, log_decay=None)
    del inputs["state"]
    k = torch.eye(8, dtype=torch.float64)[None, :, None].expand(2, 8, 2, 8)
    expected, last = gate_loop(inputs["q"], k, inputs["beta"][..., None] * inputs["v"])
    y, state = delta_rule(**inputs | {"k": k}, mode=mode, backend=backend)
    assert_agree((y, state), (expected, last))


@every_pair
def test_what_is_written_is_found_again(mode, backend):
    inputs = delta_rule_inputs(2, 100, 2, 4, 3, log_decay=None)
    written = inputs | {"q": inputs["k"], "beta": torch.ones_like(inputs["beta"])}
    y, _ = delta_rule(**written, mode=mode, backend=backend)
    assert_agree(y, inputs["v"])
    untouched = inputs | {"beta": torch.zeros_like(inputs["beta"])}
    _, state = delta_rule(**untouched, mode=mode, backend=backend)
    assert_agree(state, inputs["state"])


@every_pair
def test_beta_of_two_counts_parity(mode, backend):
    # each step of key e_1 turns the sign of that row, exactly; a thousand of them are none
    bits = torch.arange(1000) % 3 == 0
    k = bits.float().reshape(1, 1000, 1, 1)
    v, beta = torch.zeros(1, 1000, 1, 1), torch.full((1, 1000, 1), 2.0)
    start = torch.ones(1, 1, 1, 1)
    y, _ = delta_rule(torch.ones_like(k), k, v, beta, state=start, mode=mode, backend=backend)
    assert torch.equal(y.flatten(), 1.0 - 2 * (bits.cumsum(0) % 2))


@every_fast_pair
def test_reflections_keep_the_norm_of_a_state(mode, backend):
    # a long product of reflections: what rounding does to it stays small, in both directions of time
    inputs = delta_rule_inputs(1, 4096, 1, 8, 8, log_decay=None)
    inputs |= {"beta": torch.full((1, 4096, 1), 2.0), "v": torch.zeros(1, 4096, 1, 8)}
    inputs["state"].requires_grad_()
    _, state = delta_rule(**inputs, mode=mode, backend=backend)
    torch.testing.assert_close(state.norm(), inputs["state"].norm(), rtol=1e-4, atol=0)
    (gradient,) = torch.autograd.grad(state.square().sum() / 2, inputs["state"])
    torch.testing.assert_close(gradient, inputs["state"], rtol=0, atol=1e-3)


@every_fast_pair
@pytest.mark.parametrize("strong", [-math.inf, -3.0e38, -1.0e4])
def test_a_forgetting_step_costs_later_steps_no_digits(mode, backend, strong):
    check_forgetting(delta_rule, delta_rule_inputs, (mode, backend), strong)


@every_pair
def test_a_decay_of_zero_everywhere_is_a_reset(mode, backend):
    inputs = delta_rule_inputs(2, 20, 2, 3, 2)
    reset = reset_mask(2, 20)
    expected = delta_rule(**inputs, reset=reset, mode=mode, backend=backend)
    inputs["log_decay"] = inputs["log_decay"].masked_fill(reset[..., None], -math.inf)
    assert_agree(delta_rule(**inputs, mode=mode, backend=backend), expected)


@every_pair
def test_gates_in_float32_beside_half_precision(mode, backend):
    for dtype in (torch.bfloat16, torch.float16):
        inputs = delta_rule_inputs(2, 20, 2, 3, 2, dtype=dtype)
        inputs |= {name: inputs[name].float() for name in ("beta", "log_decay")}
        check_operator(delta_rule, inputs, mode=mode, backend=backend, dtype=dtype)
        y, state = delta_rule(**inputs, mode=mode, backend=backend)
        assert (y.dtype, state.dtype) == (dtype, torch.float32)


@every_pair
def test_autocast_leaves_the_accumulation_alone(mode, backend):
    inputs = delta_rule_inputs(2, 20, 2, 3, 2)
    expected = delta_rule(**inputs, mode=mode, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = delta_rule(**inputs, mode=mode, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@every_fast_pair
def test_vmap(mode, backend):
    inputs = delta_rule_inputs(2, 9, 2, 3, 2)
    names = list(inputs)
    stacked = [torch.stack([inputs[name], inputs[name].flip(0)]) for name in names]

    def of(*tensors):
        return delta_rule(**dict(zip(names, tensors, strict=True)), mode=mode, backend=backend)

    expected = [of(*(tensor[i] for tensor in stacked)) for i in range(2)]
    for actual, pieces in zip(torch.func.vmap(of)(*stacked), zip(*expected, strict=True), strict=True):
        assert_agree(actual, torch.stack(pieces))


@pytest.mark.parametrize(
    ("device", "machine", "time", "changed", "expected"),
    [
        ("cpu", {}, 1, {}, ("recurrent", "torch")),
        ("cpu", {}, 4, {}, ("recurrent", "torch")),
        ("cpu", {"triton": True}, 5, {}, ("chunkwise", "torch")),
        ("cuda", {"numba": True}, 99, {}, ("chunkwise", "torch")),
        ("cpu", {"numba": True}, 1, {}, ("recurrent", "numba")),
        ("cpu", {"numba": True}, 99, {}, ("recurrent", "numba")),
        ("cpu", {"numba": True, "exporting": True}, 1, {}, ("recurrent", "torch")),
        ("cpu", {"numba": True, "exporting": True}, 2, {}, ("chunkwise", "torch")),
        ("cuda", {"triton": True, "exporting": True}, 99, {}, ("chunkwise", "torch")),
        ("cuda", {"triton": True}, 1, {"dk": 600}, ("recurrent", "triton")),
        ("cuda", {"triton": True}, 2, {}, ("chunkwise", "triton")),
        ("cuda", {"triton": True}, 99, {"dk": 600}, ("chunkwise", "torch")),
        ("cuda", {"triton": True}, 99, {"dtype": torch.float64}, ("chunkwise", "torch")),
    ],
)
def test_auto(machine_with, chosen, device, machine, time, changed, expected):
    machine_with(**machine)
    dk = changed.pop("dk", 3)
    given = DeltaRule(reset=None, **delta_rule_inputs(1, time, 2, dk, 2, **changed))
    assert chosen(OPERATOR, given, device) == expected


X, BETA = torch.zeros(2, 5, 3, 4), torch.ones(2, 5, 3)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"q": X[0]}, ValueError, r"`q` must have shape \(b, t, h, dk\); got \(5, 3, 4\)"),
        (
            {"k": X[..., :2]},
            ValueError,
            r"`k` must have shape .*, that of `q`, .*; got \(2, 5, 3, 2\)",
        ),
        ({"v": X[:, :4]}, ValueError, r"`v` must have .*\(2, 5, 3\) as `q` has; got \(2, 4, 3, 4\)"),
        ({"beta": X}, ValueError, r"`beta` must have shape \(b, t, h\) = \(2, 5, 3\); got \(2, 5, 3, 4\)"),
        ({"log_decay": X[..., 0, 0]}, ValueError, r"`log_decay` must have .*\(2, 5, 3, 4\); got \(2, 5\)"),
        ({"state": X}, ValueError, r"`state` must have shape .*\(2, 3, 4, 4\); got \(2, 5, 3, 4\)"),
        ({"reset": torch.zeros(2, 5)}, TypeError, r"`reset` must be bool; got float32"),
        ({"q": X.long()}, TypeError, r"`q` must be float16, .*; got int64"),
        ({"v": X.bfloat16()}, TypeError, r"`v` must have the real precision of `q`, float32; got bfloat16"),
        ({"beta": BETA.half()}, TypeError, r"`beta` must be float32; got float16"),
        ({"log_decay": X.double()}, TypeError, r"`log_decay` must be float32; got float64"),
        ({"k": X.to(torch.complex64)}, TypeError, r"`k` of `delta_rule` must be real; .* use `gate_loop`"),
        ({"state": X[:, 0, :, None].to(torch.complex64)}, TypeError, r"`state` of `delta_rule` must be real"),
        ({"beta": 3 * BETA}, ValueError, r"`beta` must be in \[0, 2\]; got values from 3 to 3\. Pass `sigm"),
        ({"beta": BETA - 1.25}, ValueError, r"`beta` must be in \[0, 2\]; got values from -0.25 to -0.25"),
        (
            {"mode": "chunk"},
            ValueError,
            r"no `mode` of `delta_rule` called 'chunk'; did you mean 'chunkwise'",
        ),
        (
            {"mode": "chunkwise", "backend": "reference"},
            ValueError,
            r"no .*; the pairs that exist are .*torch",
        ),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        delta_rule(**{"q": X, "k": X, "v": X, "beta": BETA} | changed)


@pytest.mark.parametrize("name", ["k", "v", "beta", "log_decay", "state"])
def test_another_device_is_refused(name):
    inputs = delta_rule_inputs(1, 2, 1, 1, 1)
    with pytest.raises(ValueError, match=rf"`{name}` must be on the device of `q`, 'cpu'; got 'meta'"):
        delta_rule(**inputs | {name: inputs[name].to("meta")})


def test_beta_is_not_looked_at_where_that_would_break_a_graph():
    def of(beta):
        return delta_rule(X, X, X, beta)[0]

    compiled = torch.compile(of, backend="eager", fullgraph=True)(3 * BETA)
    mapped = torch.func.vmap(of)(3 * BETA[None])
    assert_agree(compiled, mapped[0])
    # and what is not a number passes, so that who looks for it in a loss finds it there
    assert of(BETA * math.nan).isnan().any()
