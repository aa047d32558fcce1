"""The fused Numba kernels of the max-headed GateLoop, and their exponential, sine and cosine."""

import numpy as np
import pytest
import torch

from linrec.ops import gate_loop
from linrec.ops.gate_loop import max_headed
from linrec.ops.gate_loop.max_headed import MaxHeaded, chunk_size
from linrec.ops.kernels import launch
from linrec.testing import assert_agree, check_operator, gate_loop_inputs, reset_mask
from tests.ops.opcheck import check_operators
from tests.tiers import thorough

numba = pytest.importorskip("numba")
PAIR = {"mode": "recurrent", "backend": "numba"}
GATES = [None, "h", "bth"]


def agree(batch, time, heads, *, dtype=torch.float32, options=None, **gates):
    inputs = gate_loop_inputs(batch, time, heads, 1, 1, dtype=dtype, seed=time, **gates)
    check_operator(gate_loop, inputs, **PAIR, dtype=dtype, options=options)


@pytest.mark.parametrize("time", [1, 2, 15, 16, 17, 64, 130])
def test_lengths_around_chunks(time, monkeypatch):
    agree(2, time, 3)
    monkeypatch.setattr(max_headed, "chunk_size", lambda channels: 16)
    agree(2, time, 3)
    for gates in ("h", "bth"):
        reset = reset_mask(1, time, rate=0.2)
        agree(1, time, 20, log_decay=gates, phase=None, options={"reset": reset})
        agree(1, time, 20, phase=gates, options={"reset": reset})


@pytest.mark.parametrize("log_decay", GATES)
@pytest.mark.parametrize("phase", GATES)
def test_every_shape_of_the_gates(log_decay, phase):
    for batch, time in ((3, 40), (3, 1), (1, 5)):
        reset = reset_mask(batch, time, rate=0.1)
        reset[0, 0] = reset[-1, -1] = True
        agree(batch, time, 2, log_decay=log_decay, phase=phase, options={"reset": reset})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("phase", [None, "bthk"])
def test_dtypes(dtype, phase):
    agree(2, 20, 3, dtype=dtype, phase=phase)


@pytest.mark.parametrize(("batch", "heads"), [(1, 300), (3, 400), (2, 7), (9, 33)])
def test_lanes_on_threads(batch, heads, monkeypatch):
    # as if the machine had four threads: rows are cut into blocks, of which the last one is narrower
    monkeypatch.setattr(launch, "SERIAL", 0)
    width = launch.width_of
    monkeypatch.setattr(launch, "width_of", lambda rows, n, _, narrowest: width(rows, n, 4, narrowest))
    for gates in ("h", "bth"):
        agree(batch, 20, heads, log_decay=gates, phase=gates, dtype=torch.float64)


def test_layout_in_memory_does_not_matter():
    inputs = gate_loop_inputs(2, 20, 6, 1, 1)
    expected = gate_loop(**inputs, **PAIR)
    strided = {
        name: tensor.repeat_interleave(2, dim=-2)[..., ::2, :] if name != "state" else tensor.conj().conj()
        for name, tensor in inputs.items()
    }
    assert not strided["q"].is_contiguous()
    assert_agree(gate_loop(**strided, **PAIR), expected)
    y, _ = gate_loop(**{**inputs, "v": inputs["v"].requires_grad_()}, **PAIR)
    # the gradient of a sum is an expanded number
    torch.autograd.grad(y.sum(), inputs["v"])


def test_nothing_comes_over_a_cut_link():
    inputs = {name: t.requires_grad_() for name, t in gate_loop_inputs(1, 6, 3, 1, 1).items()}
    reset = torch.tensor([[False, False, False, True, False, False]])
    y, _ = gate_loop(**inputs, reset=reset, **PAIR)
    cotangent = torch.ones_like(y)
    cotangent[:, 4] = torch.inf
    for gradient in torch.autograd.grad(y, [inputs[name] for name in ("k", "log_decay", "phase")], cotangent):
        assert gradient[:, :3].isfinite().all()


def test_a_magnitude_of_zero_stops_values_and_gives_no_nan():
    inputs = gate_loop_inputs(2, 20, 3, 1, 1)
    inputs["log_decay"][:, 7] = -torch.inf
    check_operator(gate_loop, inputs, **PAIR, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0)])
def test_empty_axes(shape):
    inputs = {name: tensor.requires_grad_() for name, tensor in gate_loop_inputs(*shape, 1, 1).items()}
    y, state = gate_loop(**inputs, **PAIR)
    assert y.shape == (*shape, 1) and state.shape == (shape[0], shape[2], 1, 1)
    torch.autograd.grad(y.sum(), tuple(inputs.values()))


@pytest.mark.parametrize(("log_decay", "phase"), [("bth", "bth"), ("h", "h"), ("bth", None), (None, None)])
def test_gradients_are_finite_differences(log_decay, phase):
    inputs = gate_loop_inputs(1, 4, 2, 1, 1, dtype=torch.float64, log_decay=log_decay, phase=phase)
    inputs = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    names, values = list(inputs), [tensor.requires_grad_() for tensor in inputs.values()]

    def run(*tensors):
        return gate_loop(**dict(zip(names, tensors, strict=True)), **PAIR)

    assert torch.autograd.gradcheck(run, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


@thorough
def test_compiles_into_one_graph():
    inputs = {name: t.requires_grad_() for name, t in gate_loop_inputs(2, 20, 3, 1, 1).items()}

    def outcome(function):
        y, last = function(**inputs, **PAIR)
        loss = y.square().sum() + torch.view_as_real(last).sum()
        return y, last, torch.autograd.grad(loss, tuple(inputs.values()))

    compiled = torch.compile(gate_loop, fullgraph=True, backend="aot_eager")
    assert_agree(outcome(compiled), outcome(gate_loop))
    with torch.no_grad():
        assert_agree(compiled(**inputs, **PAIR), gate_loop(**inputs, **PAIR))


@pytest.mark.parametrize("gates", ["h", "bth"])
@pytest.mark.parametrize("shared", [(), ("log_decay",), ("phase",), ("k", "log_decay", "phase", "state")])
def test_maps_with_gradients(gates, shared):
    inputs = gate_loop_inputs(2, 20, 3, 1, 1, log_decay=gates, phase=gates)
    axes = {name: None if name in shared else 0 for name in inputs}
    inputs = {
        name: (x if name in shared else torch.stack([x, x.flip(0)])).requires_grad_()
        for name, x in inputs.items()
    }

    def one(inputs):
        return gate_loop(**inputs, **PAIR)

    def outcome(outputs):
        y, last = outputs
        loss = y.square().sum() + torch.view_as_real(last).square().sum()
        return y, last, *torch.autograd.grad(loss, tuple(inputs.values()))

    apart = [one({name: x if name in shared else x[i] for name, x in inputs.items()}) for i in range(2)]
    expected = outcome([torch.stack(pieces) for pieces in zip(*apart, strict=True)])
    assert_agree(outcome(torch.func.vmap(one, in_dims=(axes,))(inputs)), expected)


def test_custom_operators_keep_their_promises():
    q, k, v = torch.rand(3, 2, 20, 3)
    for gate, dtype in ((None, torch.float32), (torch.rand(1, 1, 3), torch.complex64)):
        state = torch.rand(2, 3, dtype=dtype)
        given = MaxHeaded(q, k, v, torch.rand(2, 20, 3), gate, state, reset_mask(2, 20))
        check_operators(max_headed.NUMBA_OP, given)


def test_the_states_kept_for_the_adjoint_are_few():
    inputs = gate_loop_inputs(2, 160, 1024, 1, 1)
    assert chunk_size(1024) == 16
    flat = (inputs[name].squeeze(-1) for name in ("q", "k", "v", "log_decay", "phase"))
    given = MaxHeaded(*flat, inputs["state"].flatten(1), None)
    _, _, starts = max_headed.NUMBA_OP.forward(given, True)
    assert starts.numel() == 2 * 2 * 10 * 1024


@pytest.fixture(scope="module")
def functions():
    """The kernels' e^x, sin x and cos x of an array, compiled as in the kernels."""
    from linrec.ops.kernels.elementwise import numba as kernels

    @numba.njit(fastmath={"contract"})
    def fill(x, exponentials, sines, cosines):
        for i in range(x.size):
            exponentials[i] = kernels.exponential(x[i])
            sines[i], cosines[i] = kernels.sine_cosine(x[i])

    def of(x):
        outputs = np.empty_like(x), np.empty_like(x), np.empty_like(x)
        fill(x, *outputs)
        return outputs

    return of


def sample(low, high):
    return np.random.default_rng(0).uniform(low, high, 200_000).astype(np.float32)


def units(actual, expected):
    """The largest error, in units of the last place of a float32."""
    return np.max(
        np.abs(actual.astype(np.float64) - expected) / np.spacing(np.abs(expected.astype(np.float32)))
    )


@thorough
@pytest.mark.parametrize("size", [1e-3, 1.0, 3.2, 100.0, 1e4, 1e5])
def test_sine_and_cosine_of_float32(functions, size):
    x = sample(-size, size)
    _, sine, cosine = functions(x)
    assert units(sine, np.sin(x.astype(np.float64))) < 2.5
    assert units(cosine, np.cos(x.astype(np.float64))) < 2.5


def test_exponential_of_float32(functions):
    x = sample(-87.0, 88.7)
    assert units(functions(x)[0], np.exp(x.astype(np.float64))) < 1.5
    x = sample(-1e-3, 0.0)
    assert units(functions(x)[0], np.exp(x.astype(np.float64))) < 1.0


def test_functions_where_float32_ends(functions):
    x = np.array([0.0, -np.inf, -1e30, -104.0, -103.0, 88.72, 88.73, np.inf, np.nan], dtype=np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(functions(x)[0], np.exp(x), rtol=1e-6)
    x = np.array([0.0, np.nan, np.inf], dtype=np.float32)
    _, sine, cosine = functions(x)
    np.testing.assert_array_equal(sine, [0.0, np.nan, np.nan])
    np.testing.assert_array_equal(cosine, [1.0, np.nan, np.nan])


def test_an_angle_without_meaning_is_still_an_angle(functions):
    x = np.logspace(6, 38, 1000, dtype=np.float32)
    _, sine, cosine = functions(np.concatenate([x, -x]))
    np.testing.assert_allclose(np.hypot(sine, cosine), 1, atol=1e-6)


def test_functions_of_float64_are_the_library_s(functions):
    x = sample(-700.0, 700.0).astype(np.float64)
    for actual, expected in zip(functions(x), (np.exp(x), np.sin(x), np.cos(x)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-14, atol=1e-15)


def test_large_phases_lose_no_digits():
    inputs = gate_loop_inputs(2, 40, 3, 1, 1)
    inputs["phase"] = (1e4 * inputs["phase"]).round()
    check_operator(gate_loop, inputs, **PAIR, dtype=torch.float32)
