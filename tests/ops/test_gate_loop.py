"""gate_loop and gate_loop_matrix against formulas written apart from them; test_laws.py has the laws."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch

from linrec.ops import gate_loop, gate_loop_matrix
from linrec.ops.gate_loop import OPERATOR
from linrec.ops.gate_loop.torch import GateLoop
from linrec.testing import (
    assert_agree,
    check_compile,
    check_operator,
    check_reset,
    check_split,
    gate_loop_inputs,
    generator,
    reset_mask,
)
from linrec.trees import differentiable, double
from tests.ops.entries import check_forgetting
from tests.tiers import thorough, tiered

GATES = [None, "h", "hk", "bth", "bthk"]
# Triton's kernels have files of their own
HERE = [pair for pair in OPERATOR.pairs if pair[1] != "triton"]
FAST = [pair for pair in HERE if pair[1] != "reference"]
every_pair = pytest.mark.parametrize(("mode", "backend"), HERE)
every_fast_pair = pytest.mark.parametrize(("mode", "backend"), FAST)


@thorough
@every_fast_pair
@pytest.mark.parametrize("complex_qk", [False, True])
def test_every_shape_of_the_gates(mode, backend, complex_qk):
    reset = reset_mask(2, 19, rate=0.1)
    for log_decay, phase in itertools.product(GATES, GATES):
        for sizes in ((3, 2), (1, 1)):
            inputs = gate_loop_inputs(
                2, 19, 2, *sizes, log_decay=log_decay, phase=phase, complex_qk=complex_qk
            )
            options = {"reset": reset}
            check_operator(
                gate_loop, inputs, mode=mode, backend=backend, dtype=torch.float32, options=options
            )


@every_pair
@pytest.mark.parametrize("axes", ["h", "bth"])
@pytest.mark.parametrize("dk", [1, 3])
def test_a_last_axis_of_one_broadcasts_over_the_channels(mode, backend, axes, dk):
    dv = 1 if dk == 1 else 2
    inputs = gate_loop_inputs(2, 19, 2, dk, dv, log_decay=axes, phase=axes)
    options = {"reset": reset_mask(2, 19, rate=0.1), "mode": mode, "backend": backend}
    outcomes = []
    for size in (1, dk):
        gates = {
            name: inputs[name][..., None].expand(*inputs[name].shape, size).clone().requires_grad_()
            for name in ("log_decay", "phase")
        }
        y, state = gate_loop(**{**inputs, **gates}, **options)
        gradients = torch.autograd.grad(y.square().sum() + state.abs().sum(), list(gates.values()))
        outcomes.append((y, state, *(x.sum(-1) for x in gradients)))
    assert_agree(*outcomes)
    for shape in ((2, 2), (2, 19, 2, 2)):
        with pytest.raises(ValueError, match="a last axis of 1 broadcasts over the channels"):
            gate_loop(inputs["q"], inputs["k"], inputs["v"], torch.zeros(shape))


@every_fast_pair
def test_every_size_of_a_head(mode, backend):
    for dk, dv in ((1, 5), (5, 1), (2, 7), (8, 3)):
        inputs = gate_loop_inputs(1, 70, 1, dk, dv)
        check_operator(gate_loop, inputs, mode=mode, backend=backend, dtype=torch.float32)


@every_fast_pair
def test_one_of_q_and_k_complex(mode, backend):
    for name, phase in itertools.product("qk", (None, "hk")):
        inputs = gate_loop_inputs(2, 19, 2, 3, 2, phase=phase, complex_qk=True)
        inputs[name] = inputs[name].real
        if name == "k" and phase is None:
            inputs["state"] = inputs["state"].real
        check_operator(gate_loop, inputs, mode=mode, backend=backend, dtype=torch.float32)


@every_pair
def test_by_hand(mode, backend):
    # a = i/2, k = 1, 2, 1 and v = 4, 1, 0 make S = 4, 2 + 2i, -1 + i, and q = 1, i, 2 - i reads them
    q = torch.tensor([1, 1j, 2 - 1j]).reshape(1, 3, 1, 1)
    k = torch.tensor([1.0, 2.0, 1.0]).reshape(1, 3, 1, 1)
    v = torch.tensor([4.0, 1.0, 0.0]).reshape(1, 3, 1, 1)
    gates = torch.tensor([0.5]).log(), torch.tensor([math.pi / 2])
    y, state = gate_loop(q, k, v, *gates, mode=mode, backend=backend)
    torch.testing.assert_close(y.flatten(), torch.tensor([4.0, -2.0, -1.0]))
    torch.testing.assert_close(state.flatten(), torch.tensor([-1 + 1j]))


@every_pair
def test_linear_attention(mode, backend):
    inputs = gate_loop_inputs(1, 12, 2, 3, 4, dtype=torch.float64, log_decay=None, phase=None)
    q, k, v = (inputs[name][0].transpose(0, 1).numpy() for name in "qkv")
    expected = np.tril(q @ k.transpose(0, 2, 1)) @ v
    y, state = gate_loop(*(inputs[name] for name in "qkv"), mode=mode, backend=backend)
    np.testing.assert_allclose(y[0].transpose(0, 1), expected, atol=1e-12)
    np.testing.assert_allclose(state[0], k.transpose(0, 2, 1) @ v, atol=1e-12)


@every_pair
def test_retnet(mode, backend):
    # its equations: (Q K^T * D) V with D_nm = gamma^(n-m), and rotations e^(i n theta) of Q and K
    inputs = gate_loop_inputs(1, 12, 2, 3, 4, dtype=torch.float64, phase=None)
    q, k, v = (inputs[name][0].transpose(0, 1).numpy() for name in "qkv")
    gamma = 1 - 2.0 ** (-5 - np.arange(2))
    theta = 10_000.0 ** -np.arange(0, 1, 1 / 3)
    n = np.arange(12)
    decay = np.where(n[:, None] >= n, gamma[:, None, None] ** (n[:, None] - n), 0)
    turned = q * np.exp(1j * n[:, None] * theta), k * np.exp(-1j * n[:, None] * theta)
    expected = ((turned[0] @ turned[1].transpose(0, 2, 1)).real * decay) @ v
    gates = torch.from_numpy(np.log(gamma)), torch.from_numpy(theta).expand(2, 3)
    y, _ = gate_loop(*(inputs[name] for name in "qkv"), *gates, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0].transpose(0, 1), expected, atol=1e-12)


@every_pair
def test_lru_is_a_convolution(mode, backend):
    # eq. 10: with constant gates and dk = dv = 1 each head filters v by Re(q k a^n)
    inputs = gate_loop_inputs(1, 12, 3, 1, 1, dtype=torch.float64, log_decay="h", phase="h")
    a = np.exp(inputs["log_decay"].numpy() + 1j * inputs["phase"].numpy())
    v = inputs["v"][0, :, :, 0].numpy()
    ones = torch.ones_like(inputs["v"])
    y, _ = gate_loop(
        ones, ones, inputs["v"], inputs["log_decay"], inputs["phase"], mode=mode, backend=backend
    )
    kernel = (a ** np.arange(12)[:, None]).real
    for head in range(3):
        expected = np.convolve(v[:, head], kernel[:, head])[:12]
        np.testing.assert_allclose(y[0, :, head, 0], expected, atol=1e-12)


def mixing_matrix(q, k, log_decay, phase, reset):
    """Eq. 9 as it stands: a product of transitions for each pair of steps."""
    t, dk = q.shape
    entries = np.zeros((t, t))
    for n, m in itertools.combinations_with_replacement(range(t), 2):
        n, m = m, n
        if reset[m + 1 : n + 1].any():
            continue
        product = np.ones(dk, dtype=complex)
        for j in range(m + 1, n + 1):
            product *= np.exp(log_decay[j] + 1j * phase[j])
        entries[n, m] = (q[n] * k[m] * product).sum().real
    return entries


@pytest.mark.parametrize("complex_qk", [False, True])
def test_matrix_by_its_definition(complex_qk):
    inputs = gate_loop_inputs(2, 11, 2, 3, 4, dtype=torch.float64, complex_qk=complex_qk)
    reset = reset_mask(2, 11, rate=0.2)
    q, k, log_decay, phase = (inputs[name] for name in ("q", "k", "log_decay", "phase"))
    matrix = gate_loop_matrix(q, k, log_decay, phase, reset=reset)
    for b, h in itertools.product(range(2), range(2)):
        one = (tensor[b, :, h].numpy() for tensor in (q, k, log_decay, phase))
        np.testing.assert_allclose(matrix[b, h], mixing_matrix(*one, reset[b].numpy()), atol=1e-12)


@pytest.mark.parametrize("time", [1, 7, 40])
def test_matrix_times_values_is_the_output(time):
    for log_decay, phase, complex_qk in itertools.product(GATES, GATES, (False, True)):
        inputs = gate_loop_inputs(2, time, 2, 3, 2, log_decay=log_decay, phase=phase, complex_qk=complex_qk)
        del inputs["state"]
        reset = reset_mask(2, time)
        y, _ = gate_loop(**inputs, reset=reset, mode="recurrent", backend="torch")
        v = inputs.pop("v")
        matrix = gate_loop_matrix(**inputs, reset=reset)
        assert_agree(torch.einsum("bhnm,bmhd->bnhd", matrix, v), y)
        assert torch.equal(matrix, matrix.tril())


def test_matrix_of_nothing_and_in_half_precision():
    none = torch.zeros(2, 0, 3, 4)
    assert gate_loop_matrix(none, none).shape == (2, 3, 0, 0)
    q, k, *gates = gate_loop_inputs(1, 20, 2, 3, 2, dtype=torch.bfloat16).values()
    del gates[0], gates[-1]
    matrix = gate_loop_matrix(q, k, *gates)
    assert matrix.dtype == torch.bfloat16
    assert_agree(matrix, gate_loop_matrix(q.double(), k.double(), *(gate.double() for gate in gates)))


def paper_sized(d_key: int, *, phase: str | None = "bthk") -> dict:
    """4,096 steps, magnitudes uniform in (0.001, 0.999), phases of several radians."""
    inputs = gate_loop_inputs(1, 4096, 1, d_key, 2, dtype=torch.float32, phase=phase)
    uniform = torch.rand(inputs["log_decay"].shape, generator=generator(5))
    inputs["log_decay"] = torch.log(0.001 + 0.998 * uniform)
    if phase is not None:
        inputs["phase"] = 3 * inputs["phase"]
    return inputs


@functools.cache
def outcome(d_key: int, constant: bool, mode: str, backend: str, dtype: torch.dtype) -> tuple:
    """y, the final state and all gradients for `paper_sized` inputs; `constant` gates are one number each."""
    inputs = paper_sized(d_key)
    if constant:
        inputs |= {"log_decay": torch.tensor([-0.05]), "phase": torch.tensor([3.0])}
    inputs = differentiable(double(inputs) if dtype == torch.float64 else inputs)
    y, state = gate_loop(**inputs, mode=mode, backend=backend)
    cotangent = torch.randn(y.shape, generator=generator(1)).to(dtype)
    return y, state, *torch.autograd.grad(y, list(inputs.values()), cotangent)


@thorough
@every_fast_pair
@pytest.mark.parametrize("d_key", tiered([1], [3]))
def test_4096_steps_of_any_magnitude(mode, backend, d_key):
    expected = outcome(d_key, False, "recurrent", "reference", torch.float64)
    assert_agree(outcome(d_key, False, mode, backend, torch.float32), expected, dtype=torch.float32)


@every_fast_pair
def test_large_phases_stay_exact_over_4096_steps(mode, backend):
    # nothing is forgotten, so that a lost digit of any phase shows
    inputs = paper_sized(2)
    inputs["log_decay"] = inputs["log_decay"] / 4096
    inputs["phase"] = (inputs["phase"] + 20).round(decimals=1)
    expected = gate_loop(**double(inputs), mode="recurrent", backend="torch")
    actual = gate_loop(**inputs, mode=mode, backend=backend)
    assert_agree(actual, expected, dtype=torch.float32)


@thorough
@every_fast_pair
def test_gradients_of_constant_gates_over_4096_steps(mode, backend):
    # the phase's loses three digits where what cancels is summed over the sequence, not over segments
    expected = outcome(2, True, "recurrent", "reference", torch.float64)
    assert_agree(outcome(2, True, mode, backend, torch.float32), expected, dtype=torch.float32)


@every_fast_pair
@pytest.mark.parametrize("strong", [-math.inf, -3.0e38, -1.0e4])
def test_a_forgetting_step_costs_later_steps_no_digits(mode, backend, strong):
    check_forgetting(gate_loop, gate_loop_inputs, (mode, backend), strong)


@every_pair
def test_a_magnitude_of_zero_everywhere_is_a_reset(mode, backend):
    inputs = gate_loop_inputs(2, 20, 2, 3, 2, log_decay="bth")
    reset = reset_mask(2, 20)
    expected = gate_loop(**inputs, reset=reset, mode=mode, backend=backend)
    inputs["log_decay"] = inputs["log_decay"].masked_fill(reset[..., None], -math.inf)
    assert_agree(gate_loop(**inputs, mode=mode, backend=backend), expected)


@every_pair
def test_constant_magnitude_of_zero_is_elementwise(mode, backend):
    inputs = gate_loop_inputs(1, 9, 2, 3, 2, log_decay=None)
    inputs["log_decay"] = torch.full((2,), -math.inf)
    y, _ = gate_loop(**inputs, mode=mode, backend=backend)
    assert_agree(y, (inputs["q"] * inputs["k"]).sum(-1, keepdim=True) * inputs["v"])


@every_pair
def test_gates_in_float32_beside_half_precision(mode, backend):
    for dtype in (torch.bfloat16, torch.float16):
        inputs = gate_loop_inputs(2, 20, 2, 3, 2, dtype=dtype)
        inputs |= {name: inputs[name].float() for name in ("log_decay", "phase")}
        check_operator(gate_loop, inputs, mode=mode, backend=backend, dtype=dtype)
        y, state = gate_loop(**inputs, mode=mode, backend=backend)
        assert y.dtype == dtype
        assert state.dtype == torch.complex64


@every_pair
def test_autocast_leaves_the_accumulation_alone(mode, backend):
    inputs = gate_loop_inputs(2, 20, 2, 3, 2)
    expected = gate_loop(**inputs, mode=mode, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gate_loop(**inputs, mode=mode, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_state_is_complex_exactly_where_it_must_be():
    for phase, complex_k in itertools.product((None, "h"), (False, True)):
        inputs = gate_loop_inputs(1, 3, 1, 2, 2, phase=phase, complex_qk=True)
        inputs = inputs | {"k": inputs["k"] if complex_k else inputs["k"].real, "state": None}
        for mode, backend in HERE:
            _, state = gate_loop(**inputs, mode=mode, backend=backend)
            assert state.is_complex() == (phase is not None or complex_k)


@every_pair
def test_a_state_of_another_precision_is_cast(mode, backend):
    inputs = gate_loop_inputs(1, 5, 1, 2, 2)
    real = inputs["state"].real
    expected = gate_loop(**inputs | {"state": real.to(torch.complex64)}, mode=mode, backend=backend)
    assert_agree(gate_loop(**inputs | {"state": real.double()}, mode=mode, backend=backend), expected)


@every_fast_pair
def test_vmap(mode, backend):
    inputs = gate_loop_inputs(2, 9, 2, 3, 2)
    names = list(inputs)
    stacked = [torch.stack([inputs[name], inputs[name].flip(0)]) for name in names]

    def of(*tensors):
        return gate_loop(**dict(zip(names, tensors, strict=True)), mode=mode, backend=backend)

    expected = [of(*(tensor[i] for tensor in stacked)) for i in range(2)]
    for actual, pieces in zip(torch.func.vmap(of)(*stacked), zip(*expected, strict=True), strict=True):
        assert_agree(actual, torch.stack(pieces))


def max_headed(x, state=None, *, reset=None):
    return gate_loop(**x, state=state, reset=reset)


@thorough
def test_the_max_headed_operator_obeys_the_laws():
    inputs = gate_loop_inputs(3, 20, 4, 1, 1)
    del inputs["state"]
    check_split(max_headed, inputs)
    check_reset(max_headed, inputs)
    check_compile(max_headed, inputs, compiler="aot_eager")


CPU, CUDA = ("cpu", {"numba": True}), ("cuda", {"triton": True})
NEITHER = {"numba": False, "triton": False}
PLAIN, EXPORTED = {"phase": None}, {"exporting": True}


@pytest.mark.parametrize(
    ("machine", "sizes", "gates", "expected"),
    [
        (CUDA, (1, 64, 64), PLAIN, ("recurrent", "triton")),
        (CUDA, (1, 64, 64), {}, ("recurrent", "triton")),
        (CUDA, (1, 64, 64), PLAIN | {"complex_qk": True}, ("recurrent", "triton")),
        (CUDA, (1, 64, 64), {"dtype": torch.float64}, ("recurrent", "torch")),
        (CUDA, (1, 64, 64), {"bonus": True}, ("recurrent", "torch")),
        (CUDA, (1, 1, 1), PLAIN, ("recurrent", "torch")),
        (CUDA, (2, 1, 2), {}, ("chunkwise", "triton")),
        (CUDA, (99, 1, 1), {}, ("scan", "triton")),
        (CUDA, (1, 64, 64), PLAIN | {"dtype": torch.float64}, ("recurrent", "torch")),
        (CUDA, (99, 64, 64), {"dtype": torch.float64}, ("chunkwise", "torch")),
        (("cuda", {"triton": True} | EXPORTED), (1, 64, 64), PLAIN, ("recurrent", "torch")),
        (("cuda", {"triton": True} | EXPORTED), (99, 64, 64), {}, ("chunkwise", "torch")),
        (CPU, (99, 1, 1), {}, ("recurrent", "numba")),
        (CPU, (99, 1, 2), {}, ("recurrent", "numba")),
        (CPU, (1, 1, 2), PLAIN, ("recurrent", "numba")),
        (CPU, (1, 1, 2), {}, ("recurrent", "torch")),
        (CPU, (1, 1, 1), PLAIN, ("recurrent", "torch")),
        (("cpu", {"numba": True} | EXPORTED), (1, 1, 2), PLAIN, ("recurrent", "torch")),
        (("cpu", {"numba": True} | EXPORTED), (99, 1, 2), {}, ("chunkwise", "torch")),
        (("cpu", NEITHER), (99, 1, 2), {}, ("chunkwise", "torch")),
        (("mps", NEITHER), (99, 1, 1), {}, ("scan", "torch")),
        (("mps", NEITHER), (9, 1, 1), {}, ("recurrent", "torch")),
    ],
)
def test_auto(machine_with, chosen, machine, sizes, gates, expected):
    device, parts = machine
    machine_with(**parts)
    time, dk, dv = sizes
    given = GateLoop(**{"bonus": None, "reset": None} | gate_loop_inputs(2, time, 3, dk, dv, **gates))
    assert chosen(OPERATOR, given, device) == expected


def test_a_step_with_gradients_runs_in_torch(machine_with, chosen):
    # the kernel of single steps has no gradients
    machine_with(triton=True)
    inputs = gate_loop_inputs(2, 1, 3, 64, 64, phase=None)
    given = GateLoop(bonus=None, reset=None, **inputs | {"v": inputs["v"].requires_grad_()})
    assert chosen(OPERATOR, given, "cuda") == ("recurrent", "torch")
    with pytest.raises(ValueError, match=r"\('recurrent', 'triton'\) of `gate_loop` has no gradients"):
        chosen(OPERATOR, given, "cuda", "recurrent", "triton")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"mode": "chunk"}, r"no `mode` of `gate_loop` called 'chunk'; did you mean 'chunkwise'"),
        ({"backend": "tritno"}, r"no `backend` of `gate_loop` called 'tritno'; did you mean 'triton'"),
        ({"mode": "attention", "backend": "numba"}, r"\('chunkwise', 'torch'\)"),
        ({"mode": "convolution"}, r"no `mode` of `gate_loop` called 'convolution'"),
    ],
)
def test_pairs_that_do_not_exist(chosen, words):
    x = torch.zeros(1, 2, 1, 1)
    with pytest.raises(ValueError, match=words):
        gate_loop(x, x, x, **chosen)


X = torch.zeros(2, 5, 3, 4)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"q": X[0]}, ValueError, r"`q` must have shape \(b, t, h, dk\); got \(5, 3, 4\)"),
        (
            {"k": X[..., :2]},
            ValueError,
            r"`k` must have shape \(b, t, h, dk\), that of `q`, = \(2, 5, 3, 4\); got \(2, 5, 3, 2\)",
        ),
        ({"v": X[:, :4]}, ValueError, r"`v` must have .*\(2, 5, 3\) as `q` has; got \(2, 4, 3, 4\)"),
        ({"log_decay": X[..., 0, 0]}, ValueError, r"`log_decay` must have .*\(2, 5, 3, 4\); got \(2, 5\)"),
        ({"phase": X[:1]}, ValueError, r"`phase` must have shape .* one value per head or per key channel"),
        ({"state": X}, ValueError, r"`state` must have shape .*\(2, 3, 4, 4\); got \(2, 5, 3, 4\)"),
        ({"reset": torch.zeros(5).bool()}, ValueError, r"`reset` must have shape \(b, t\) = \(2, 5\)"),
        ({"reset": torch.zeros(2, 5)}, TypeError, r"`reset` must be bool; got float32"),
        ({"q": X.long()}, TypeError, r"`q` must be float16, .*; got int64"),
        ({"q": X.to(torch.float8_e4m3fn)}, TypeError, r"`q` must be float16, .*; got float8_e4m3fn"),
        ({"k": X.double()}, TypeError, r"`k` must have the real precision of `q`, float32; got float64"),
        ({"k": X.to(torch.complex128)}, TypeError, r"`k` must have the real precision .*; got complex128"),
        ({"v": X.bfloat16()}, TypeError, r"`v` must have the real precision of `q`, float32; got bfloat16"),
        ({"v": X.to(torch.complex64)}, TypeError, r"`v` must be real; got complex64"),
        ({"log_decay": X.double()}, TypeError, r"`log_decay` must be float32; got float64"),
        ({"phase": X.bfloat16()}, TypeError, r"`phase` must be float32; got bfloat16"),
        ({"phase": X.to(torch.complex64)}, TypeError, r"`phase` must be float32; got complex64"),
        ({"state": torch.zeros(2, 3, 4, 4).long()}, TypeError, r"`state` must be float32; got int64"),
        (
            {"state": torch.zeros(2, 3, 4, 4).to(torch.complex64)},
            TypeError,
            r"`state` must be real \(float32\) for a real recurrence; got complex64",
        ),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        gate_loop(**{"q": X, "k": X, "v": X} | changed)


@pytest.mark.parametrize("name", ["k", "v", "log_decay", "phase", "state", "reset"])
def test_another_device_is_refused(name):
    inputs = gate_loop_inputs(1, 2, 1, 1, 1) | {"reset": torch.zeros(1, 2).bool()}
    with pytest.raises(ValueError, match=rf"`{name}` must be on the device of `q`, 'cpu'; got 'meta'"):
        gate_loop(**inputs | {name: inputs[name].to("meta")})


def test_complex_half_is_refused():
    half = torch.view_as_complex(torch.zeros(2, 5, 3, 4, 2, dtype=torch.float16))
    with pytest.raises(TypeError, match="got complex32"):
        gate_loop(half, half, X.half())


def test_gates_of_half_precision_inputs_may_be_of_two_dtypes():
    with pytest.raises(TypeError, match=r"`phase` must be bfloat16 \(as `q`\) or float32; got float16"):
        gate_loop(*[X.bfloat16()] * 3, phase=X.half())


@pytest.mark.parametrize("bonus", [False, True])
def test_rows_of_the_matrix_have_nan_of_their_own_document_alone(bonus):
    inputs = gate_loop_inputs(1, 9, 2, 3, 2, bonus=bonus)
    del inputs["v"], inputs["state"]
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, [3, 6]] = True
    expected = gate_loop_matrix(**inputs, reset=reset)
    for name in ("q", "k", "log_decay", "phase"):
        spoilt = inputs[name].clone()
        spoilt[:, 4] = torch.nan
        matrix = gate_loop_matrix(**inputs | {name: spoilt}, reset=reset)
        assert matrix[..., 4, :].isnan().any()
        others = [*range(4), *range(6, 9)]
        assert_agree(matrix[..., others, :], expected[..., others, :], name)
