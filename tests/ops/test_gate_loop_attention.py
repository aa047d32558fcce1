"""gate_loop_attention against formulas written apart from it; test_laws.py has the laws."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from linrec.ops import AttentionCache, gate_loop_attention, gate_loop_matrix
from linrec.testing import assert_agree, check_operator, check_stability, gate_loop_inputs, reset_mask
from linrec.trees import double, leaves
from tests.tiers import thorough

GATES = [None, "h", "hk", "bth", "bthk"]
every_pair = pytest.mark.parametrize(("mode", "backend"), gate_loop_attention.operator.pairs)


def make(batch, time, heads, d_key, d_value, **arguments):
    inputs = gate_loop_inputs(batch, time, heads, d_key, d_value, **arguments)
    del inputs["state"]
    return inputs


@thorough
@pytest.mark.parametrize("complex_qk", [False, True])
def test_every_shape_of_the_gates(complex_qk):
    reset = reset_mask(2, 11, rate=0.1)
    for log_decay, phase in itertools.product(GATES, GATES):
        inputs = make(2, 11, 2, 3, 4, log_decay=log_decay, phase=phase, complex_qk=complex_qk)
        _, state = gate_loop_attention(**make(2, 5, 2, 3, 4, log_decay=log_decay, phase=phase, seed=1))
        for start in (None, state):
            check_operator(
                gate_loop_attention,
                inputs | {"state": start},
                mode="attention",
                backend="torch",
                dtype=torch.float32,
                options={"reset": reset, "scale": 0.7},
            )


@every_pair
def test_by_hand(mode, backend):
    # a = i/2: step 3 sees k of step 1 as -k/4 and of step 2 as i k/2, so the scores of q = 1 are -1, 0, 1
    q = torch.ones(1, 3, 1, 1)
    k = torch.tensor([4.0, 2.0, 1.0]).reshape(1, 3, 1, 1)
    v = torch.tensor([0.0, 1.0, 2.0]).reshape(1, 3, 1, 1)
    gates = torch.tensor([0.5]).log(), torch.tensor([math.pi / 2])
    y, cache = gate_loop_attention(q, k, v, *gates, mode=mode, backend=backend)
    e = math.e
    # step 2 sees step 1 as 4i/2, so its scores are 0 and 2
    expected = torch.tensor([0.0, e**2 / (1 + e**2), (1 + 2 * e) / (1 / e + 1 + e)])
    torch.testing.assert_close(y.flatten(), expected)
    torch.testing.assert_close(cache.log_decay.flatten(), torch.tensor([0.25, 0.5, 1.0]).log())
    torch.testing.assert_close(cache.phase.flatten(), torch.tensor([math.pi, math.pi / 2, 0.0]))


@every_pair
def test_without_gates_it_is_causal_softmax_attention(mode, backend):
    inputs = make(2, 9, 3, 4, 5, log_decay=None, phase=None)
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    y, cache = gate_loop_attention(**inputs, scale=0.5, mode=mode, backend=backend)
    assert_agree(y, expected)
    assert cache.log_decay is None
    assert cache.phase is None


@every_pair
def test_constant_phases_are_rotary_embeddings(mode, backend):
    inputs = make(1, 9, 1, 3, 2, dtype=torch.float64, log_decay=None, phase=None, complex_qk=True)
    theta = np.array([0.3, 1.0, 2.5])
    turns = np.exp(1j * np.arange(9)[:, None] * theta)
    q, k = (inputs[name][0, :, 0].numpy() for name in "qk")
    scores = np.where(np.tri(9), ((q * turns) @ (k * turns.conj()).T).real, -np.inf)
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    inputs["phase"] = torch.from_numpy(theta)[None]
    y, _ = gate_loop_attention(**inputs, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0, :, 0], shares @ inputs["v"][0, :, 0].numpy(), atol=1e-12)


@every_pair
def test_it_is_the_softmax_of_the_token_mixing_matrix(mode, backend):
    inputs = make(2, 20, 2, 3, 4)
    y, _ = gate_loop_attention(**inputs, mode=mode, backend=backend)
    v = inputs.pop("v")
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    shares = gate_loop_matrix(**inputs).masked_fill(hidden, -math.inf).softmax(-1)
    assert_agree(y, torch.einsum("bhnm,bmhd->bnhd", shares, v))


@every_pair
def test_a_magnitude_of_zero_makes_scores_zero_and_a_reset_hides_steps(mode, backend):
    inputs = make(1, 2, 1, 1, 1, phase=None)
    inputs["log_decay"] = torch.full((1,), -math.inf)
    y, cache = gate_loop_attention(**inputs, mode=mode, backend=backend)
    share = torch.sigmoid(-inputs["q"][:, 1] * inputs["k"][:, 1])
    assert_agree(y[:, 1], share * inputs["v"][:, 0] + (1 - share) * inputs["v"][:, 1])
    assert all(torch.isfinite(tensor).all() for tensor in leaves(cache))
    hidden = torch.tensor([[False, True]])
    y, cache = gate_loop_attention(**inputs, reset=hidden, mode=mode, backend=backend)
    assert_agree(y[:, 1], inputs["v"][:, 1])
    assert cache.alive.tolist() == [[False, True]]


@thorough
def test_4096_steps_of_any_magnitude():
    inputs = make(1, 4096, 1, 2, 2)
    uniform = torch.rand(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(5))
    inputs["log_decay"] = torch.log(0.001 + 0.998 * uniform)
    inputs["phase"] = 3 * inputs["phase"]
    y, cache = gate_loop_attention(**inputs)
    # the last steps by the oracle, from a cache of all before
    names = ("q", "k", "v", "log_decay", "phase")
    before, last = (
        {name: double(inputs[name][:, part]) for name in names} for part in (slice(4090), slice(4090, None))
    )
    _, state = gate_loop_attention(**before)
    expected, end = gate_loop_attention(**last, state=state, mode="recurrent", backend="reference")
    assert_agree(y[:, 4090:], expected, dtype=torch.float32)
    assert_agree(cache.log_decay, end.log_decay, dtype=torch.float32)
    check_stability(lambda x, state=None: gate_loop_attention(**x, state=state), inputs)


def test_a_cache_goes_on_with_gates_of_other_shapes():
    first, second = make(2, 5, 2, 3, 4), make(2, 6, 2, 3, 4, seed=1)
    for axes, later in itertools.product((None, "bth", "bthk"), repeat=2):
        start, end = dict(first), dict(second)
        for inputs, name, time in ((start, axes, 5), (end, later, 6)):
            gates = make(2, time, 2, 3, 4, log_decay=name, phase=name, seed=2)
            inputs |= {gate: gates[gate] for gate in ("log_decay", "phase")}
        _, state = gate_loop_attention(**start)
        y, cache = gate_loop_attention(**end, state=state)
        whole = {}
        for gate in ("q", "k", "v", "log_decay", "phase"):
            pieces = [
                torch.zeros(2, n, 2, 1) if x is None else x for x, n in ((start[gate], 5), (end[gate], 6))
            ]
            pieces = [piece[..., None] if piece.dim() == 3 else piece for piece in pieces]
            whole[gate] = torch.cat(
                [piece.expand(-1, -1, -1, 4 if gate == "v" else 3) for piece in pieces], 1
            )
        expected, last = gate_loop_attention(**whole)
        assert_agree(y, expected[:, 5:])
        assert_agree(cache.k, last.k)
        assert cache.alive.shape == (2, 11)


def test_dtypes_of_output_and_cache():
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64,) * 2,
    ):
        inputs = make(1, 9, 2, 3, 4, dtype=dtype)
        if dtype != torch.float64:
            inputs |= {name: inputs[name].float() for name in ("log_decay", "phase")}
        y, cache = gate_loop_attention(**inputs)
        assert y.dtype == dtype
        assert {tensor.dtype for tensor in cache[:4]} == {wide}
        expected, _ = gate_loop_attention(**double(inputs), mode="recurrent", backend="reference")
        assert_agree(y, expected)


def test_autocast_leaves_the_accumulation_alone():
    inputs = make(2, 9, 2, 3, 4)
    expected = gate_loop_attention(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gate_loop_attention(**inputs)
    for mine, other in zip(leaves(actual), leaves(expected), strict=True):
        assert torch.equal(mine, other)


X = torch.zeros(2, 5, 3, 4)
CACHE = AttentionCache(X[:, :1], X[:, :1], None, None, torch.ones(2, 1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"mode": "attn"},
            ValueError,
            r"no `mode` of `gate_loop_attention` called 'attn'; did you mean 'attention'",
        ),
        ({"v": X.double()}, TypeError, r"`v` must have the real precision of `q`, float32; got float64"),
        ({"log_decay": X[..., :2]}, ValueError, r"`log_decay` must have shape"),
        ({"state": X}, TypeError, r"`state` must be an AttentionCache or None; got Tensor"),
        (
            {"state": CACHE._replace(k=X[:1])},
            ValueError,
            r"`state.k` must have shape \(2, 5, 3, 4\) .* got \(1, ",
        ),
        ({"state": CACHE._replace(v=X)}, ValueError, r"`state.v` must have shape \(2, 1, 3, 4\)"),
        (
            {"state": CACHE._replace(phase=X)},
            ValueError,
            r"`state.phase` must have .*\(2, 1, 3, 1\) or \(2, 1, 3, 4\)",
        ),
        ({"state": CACHE._replace(alive=X[0])}, ValueError, r"`state.alive` must have shape \(2, 1\)"),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        gate_loop_attention(**{"q": X, "k": X, "v": X} | changed)
