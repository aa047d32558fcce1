"""selective_scan against formulas written apart from it; test_laws.py has the laws."""

import math

import numpy as np
import pytest
import torch

from linrec.ops import gate_loop, selective_scan
from linrec.ops.kernels import launch
from linrec.ops.selective_scan import OPERATOR, numba
from linrec.ops.selective_scan import torch as torch_backend
from linrec.ops.selective_scan.torch import Group, Selective
from linrec.testing import assert_agree, check_operator, reset_mask, selective_scan_inputs
from tests.ops.opcheck import check_operators
from tests.tiers import thorough

ON_CPU = [pair for pair in OPERATOR.pairs if pair[1] != "triton"]
FAST = [pair for pair in ON_CPU if pair[1] != "reference"]
every_pair = pytest.mark.parametrize(("mode", "backend"), ON_CPU)
every_fast_pair = pytest.mark.parametrize(("mode", "backend"), FAST)


def agree(mode, backend, *shape, dtype=torch.float32, options=None, **arguments):
    inputs = selective_scan_inputs(*shape, dtype=dtype, seed=shape[1], **arguments)
    check_operator(selective_scan, inputs, mode=mode, backend=backend, dtype=dtype, options=options)


@every_pair
def test_the_papers_equation(mode, backend):
    inputs = selective_scan_inputs(1, 70, 4, 3, dtype=torch.float64)
    x, dt, B, C = (inputs[name][0].numpy() for name in ("x", "dt", "B", "C"))
    A, D, h = inputs["A"].numpy(), inputs["D"].numpy(), inputs["state"][0].numpy()
    expected = []
    for t in range(70):
        h = np.exp(dt[t][:, None] * A) * h + np.outer(dt[t] * x[t], B[t])
        expected.append(h @ C[t] + D * x[t])
    y, state = selective_scan(**inputs, mode=mode, backend=backend)
    np.testing.assert_allclose(y[0], expected, atol=1e-12)
    np.testing.assert_allclose(state[0], h, atol=1e-12)


@every_pair
def test_one_rate_for_all_states_is_gate_loop(mode, backend):
    # Mamba-2: with the same A_c for all n and a head of one channel, B is the key and C the query
    inputs = selective_scan_inputs(2, 40, 3, 4, skip=False, dtype=torch.float64)
    inputs["A"] = inputs["A"][:, :1].expand(-1, 4)
    q, k = (inputs[name][:, :, None].expand(-1, -1, 3, -1) for name in ("C", "B"))
    v, log_decay = (inputs["dt"] * inputs["x"])[..., None], inputs["dt"] * inputs["A"][:, 0]
    y, last = gate_loop(q, k, v, log_decay, state=inputs["state"][..., None])
    expected = y[..., 0], last[..., 0]
    assert_agree(selective_scan(**inputs, mode=mode, backend=backend), expected)


@every_fast_pair
@pytest.mark.parametrize("time", [1, 2, 31, 32, 33, 64, 130])
def test_lengths_around_chunks(mode, backend, time):
    reset = reset_mask(2, time, rate=0.1)
    reset[0, 0] = reset[1, -1] = True
    agree(mode, backend, 2, time, 3, 2, options={"reset": reset})


@every_fast_pair
@pytest.mark.parametrize(("channels", "d_state"), [(1, 1), (1, 5), (40, 1), (7, 16), (3, 300)])
def test_every_size_of_a_state(mode, backend, channels, d_state):
    agree(mode, backend, 2, 20, channels, d_state)
    agree(mode, backend, 1, 20, channels, d_state, skip=False)


# on one worker: Numba takes ten seconds for kernels of several threads, once
@thorough
@pytest.mark.xdist_group("selective scan on threads")
@pytest.mark.parametrize(("batch", "channels"), [(1, 300), (3, 40), (9, 33)])
def test_lanes_on_threads(batch, channels, monkeypatch):
    # as if the machine had four threads: rows are cut into blocks, of which the last one is narrower
    monkeypatch.setattr(launch, "SERIAL", 0)
    monkeypatch.setattr(numba, "width_of", lambda x, n, threads, of=numba.width_of: of(x, n, 4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    agree("recurrent", "numba", batch, 20, channels, 3)


@every_fast_pair
def test_gates_in_float32_beside_half_precision(mode, backend):
    for dtype in (torch.bfloat16, torch.float16):
        inputs = selective_scan_inputs(2, 20, 3, 2, dtype=dtype)
        inputs |= {name: inputs[name].float() for name in ("dt", "A", "D")}
        check_operator(selective_scan, inputs, mode=mode, backend=backend, dtype=dtype)
        y, state = selective_scan(**inputs, mode=mode, backend=backend)
        assert (y.dtype, state.dtype) == (dtype, torch.float32)


@every_pair
def test_autocast_leaves_the_accumulation_alone(mode, backend):
    inputs = selective_scan_inputs(2, 20, 3, 2)
    expected = selective_scan(**inputs, mode=mode, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = selective_scan(**inputs, mode=mode, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@every_fast_pair
def test_steps_that_forget_everything_and_steps_of_no_length(mode, backend):
    # exp(dt A) from exactly one over underflow to exactly zero
    inputs = selective_scan_inputs(2, 70, 3, 4)
    inputs["dt"] = torch.tensor([0.0, 1e-8, 1e-3, 1.0, 30.0, 1e4, 1e30])[
        torch.randint(7, (2, 70, 3), generator=torch.Generator().manual_seed(0))
    ]
    inputs["x"] = inputs["x"] / inputs["dt"].clamp(min=1)
    check_operator(
        selective_scan,
        inputs | {"dt": inputs["dt"].clamp(max=1e4)},
        mode=mode,
        backend=backend,
        dtype=torch.float32,
    )
    given = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    y, state = selective_scan(**given, mode=mode, backend=backend)
    for tensor in (y, state, *torch.autograd.grad(y.sum() + state.sum(), [given["x"], given["A"]])):
        assert tensor.isfinite().all()


def test_nothing_comes_over_a_cut_link():
    inputs = {name: x.requires_grad_() for name, x in selective_scan_inputs(1, 6, 2, 3).items()}
    reset = torch.tensor([[False, False, False, True, False, False]])
    y, _ = selective_scan(**inputs, reset=reset, mode="recurrent", backend="numba")
    cotangent = torch.ones_like(y)
    cotangent[:, 4] = math.inf
    for gradient in torch.autograd.grad(y, [inputs[name] for name in ("x", "dt", "B", "C")], cotangent):
        assert gradient[:, :3].isfinite().all()


@every_fast_pair
def test_layout_in_memory_does_not_matter(mode, backend):
    inputs = selective_scan_inputs(2, 20, 6, 4)
    expected = selective_scan(**inputs, mode=mode, backend=backend)
    strided = {
        name: x.repeat_interleave(2, dim=-1)[..., ::2] if x.ndim > 1 else x for name, x in inputs.items()
    }
    x = strided["x"] = strided["x"].requires_grad_()
    y, state = selective_scan(**strided, mode=mode, backend=backend)
    assert_agree((y, state), expected)
    # the gradient of a sum is an expanded number
    (gradient,) = torch.autograd.grad(y.sum(), x)
    y, _ = selective_scan(**inputs | {"x": inputs["x"].requires_grad_()}, mode=mode, backend=backend)
    assert_agree(gradient, torch.autograd.grad(y, inputs["x"], torch.ones_like(y))[0])


@every_fast_pair
@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (2, 5, 0, 2)])
def test_empty_axes(mode, backend, shape):
    inputs = {name: x.requires_grad_() for name, x in selective_scan_inputs(*shape).items()}
    y, state = selective_scan(**inputs, mode=mode, backend=backend)
    gradients = torch.autograd.grad(y.sum() + state.sum(), tuple(inputs.values()))
    assert y.shape == shape[:3] and state.shape == (shape[0], *shape[2:])
    assert all(not gradient.any() for gradient in gradients)


@every_fast_pair
def test_gradients_of_gradients(mode, backend):
    inputs = selective_scan_inputs(1, 4, 2, 2, dtype=torch.float64)
    given = {name: x.requires_grad_() for name, x in inputs.items()}

    def of(*tensors):
        return selective_scan(**dict(zip(given, tensors, strict=True)), mode=mode, backend=backend)

    assert torch.autograd.gradgradcheck(of, tuple(given.values()), fast_mode=True)


@every_fast_pair
@pytest.mark.parametrize("shared", [(), ("A", "D"), ("x", "B", "state")])
def test_maps_with_gradients(mode, backend, shared):
    inputs = selective_scan_inputs(2, 9, 3, 2)
    axes = {name: None if name in shared else 0 for name in inputs}
    inputs = {
        name: (x if name in shared else torch.stack([x, x.flip(0)])).requires_grad_()
        for name, x in inputs.items()
    }

    def one(inputs):
        return selective_scan(**inputs, mode=mode, backend=backend)

    apart = [one({name: x if name in shared else x[i] for name, x in inputs.items()}) for i in range(2)]
    expected = tuple(torch.stack(pieces) for pieces in zip(*apart, strict=True))
    actual = torch.func.vmap(one, in_dims=(axes,))(inputs)
    assert_agree(actual, expected)
    losses = (y.square().sum() + last.square().sum() for y, last in (actual, expected))
    assert_agree(*(torch.autograd.grad(loss, tuple(inputs.values())) for loss in losses))


def kernel_inputs(batch, time, channels, d_state):
    """What backends take: states with neighbouring channels next to each other."""
    inputs = selective_scan_inputs(batch, time, channels, d_state)
    A, D, state = inputs["A"].mT[None], inputs["D"][None], inputs["state"].mT
    return Group(inputs["x"], inputs["dt"], A, inputs["B"], inputs["C"], D, state, reset_mask(batch, time))


def test_custom_operators_keep_their_promises():
    check_operators(numba.recurrent, kernel_inputs(2, 70, 3, 4))
    check_operators(numba.recurrent, kernel_inputs(1, 7, 3, 4)._replace(reset=None))


def test_the_states_kept_for_the_adjoint_are_few_and_without_one_none():
    given = kernel_inputs(2, 320, 3, 4)
    for kernel, chunks in ((numba.recurrent, 10), (torch_backend.chunkwise, 5)):
        assert kernel.forward(given, True).starts.shape == (2, chunks, 4, 3)
        assert kernel.forward(given, False).starts.numel() == 0


@every_pair
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_channels_of_a_group_share_their_weights(mode, backend, groups):
    inputs = selective_scan_inputs(2, 9, 6, 4, groups=groups, dtype=torch.float64)
    options = {"reset": reset_mask(2, 9), "mode": mode, "backend": backend}
    size = 6 // groups
    ys, states = zip(
        *(
            selective_scan(
                **{name: inputs[name][..., i * size : (i + 1) * size] for name in ("x", "dt", "D")},
                A=inputs["A"][i * size : (i + 1) * size],
                B=inputs["B"][:, :, i],
                C=inputs["C"][:, :, i],
                state=inputs["state"][:, i * size : (i + 1) * size],
                **options,
            )
            for i in range(groups)
        ),
        strict=True,
    )
    y, state = selective_scan(**inputs, **options)
    assert torch.equal(y, torch.cat(ys, 2)) and torch.equal(state, torch.cat(states, 1))


@pytest.mark.parametrize(
    ("time", "device", "machine", "expected"),
    [
        (4096, "cpu", {}, ("chunkwise", "torch")),
        (4096, "cpu", {"numba": True, "exporting": True}, ("chunkwise", "torch")),
        (1, "cpu", {"numba": True}, ("chunkwise", "torch")),
        (2, "cpu", {"numba": True}, ("recurrent", "numba")),
        (1, "cuda", {"triton": True}, ("chunkwise", "torch")),
        (2, "cuda", {"triton": True}, ("recurrent", "triton")),
        (2, "cuda", {"triton": True, "exporting": True}, ("chunkwise", "torch")),
        (2, "cuda", {"numba": True}, ("chunkwise", "torch")),
    ],
)
def test_auto(machine_with, chosen, time, device, machine, expected):
    machine_with(**machine)
    given = Selective(*(torch.zeros(2, time, 3) for _ in range(5)), None, None, None)
    assert chosen(OPERATOR, given, device) == expected


X, N = torch.zeros(2, 5, 6), torch.zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"x": X[0]}, ValueError, r"`x` must have shape \(b, t, c\); got \(5, 6\)"),
        ({"dt": X[..., :1]}, ValueError, r"`dt` must have shape \(b, t, c\) = \(2, 5, 6\); got \(2, 5, 1\)"),
        ({"A": X[0, :3]}, ValueError, r"`A` must have shape \(c, n\) = \(6, n\), .*; got \(3, 6\)"),
        ({"B": X}, ValueError, r"`B` must have shape .* \(2, 5, 3\); got \(2, 5, 6\)"),
        ({"C": N[:, :4]}, ValueError, r"`C` must have shape .* \(2, 5, 3\); got \(2, 4, 3\)"),
        (
            {name: N[:, :, None].expand(2, 5, 4, 3) for name in "BC"},
            ValueError,
            r"`B` and `C` .* which divides the 6 channels; got 4 and 4",
        ),
        ({name: N[:, :, None][:, :, :0] for name in "BC"}, ValueError, r"divides .*; got 0 and 0 groups"),
        ({"B": N[:, :, None].expand(2, 5, 2, 3)}, ValueError, r"same number of groups.*; got 2 and 1"),
        (
            {"A": X[0, 0, :, None][:, :0], "B": N[..., :0], "C": N[..., :0]},
            ValueError,
            r"`A` must have shape \(c, n\) = \(6, n\), n at least 1; got \(6, 0\)",
        ),
        ({"D": X[0, 0, :5]}, ValueError, r"`D` must have shape \(c,\) = \(6,\); got \(5,\)"),
        ({"state": X}, ValueError, r"`state` must have shape \(b, c, n\) = \(2, 6, 3\); got \(2, 5, 6\)"),
        ({"reset": torch.zeros(2, 4).bool()}, ValueError, r"`reset` must have shape \(b, t\) = \(2, 5\)"),
        ({"reset": torch.zeros(2, 5)}, TypeError, r"`reset` must be bool; got float32"),
        ({"x": X.long()}, TypeError, r"`x` must be float16, .*; got int64"),
        (
            {"A": X[0, 0, :, None].expand(6, 3).to(torch.complex64)},
            TypeError,
            r"`A` must be float32; got c",
        ),
        ({"B": N.bfloat16()}, TypeError, r"`B` must be float32; got bfloat16"),
        ({"state": X[:, :3].mT.long()}, TypeError, r"`state` must be float32; got int64"),
        (
            {"A": torch.full((6, 3), 0.5)},
            ValueError,
            r"`A` must be at most 0, .*; got values up to 0.5",
        ),
        ({"dt": X - 1}, ValueError, r"`dt` must be at least 0; got values down to -1\. Pass `softplus"),
        ({"mode": "scan"}, ValueError, r"no `mode` of `selective_scan` called 'scan'"),
        ({"mode": "chunkwise", "backend": "numba"}, ValueError, r"no .*; the pairs that exist are .*torch"),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        selective_scan(**{"x": X, "dt": X, "A": -X[0, :3].T, "B": N, "C": N} | changed)


@pytest.mark.parametrize("name", ["dt", "A", "B", "C", "D", "state"])
def test_another_device_is_refused(name):
    inputs = selective_scan_inputs(1, 2, 1, 1)
    with pytest.raises(ValueError, match=rf"`{name}` must be on the device of `x`, 'cpu'; got 'meta'"):
        selective_scan(**inputs | {name: inputs[name].to("meta")})
