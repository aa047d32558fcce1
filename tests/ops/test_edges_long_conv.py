"""Empty axes, arguments that are no dense tensors, and meta tensors: long_conv and the kernels of models."""

import pytest
import torch

from linrec.ops import cauchy_kernel, long_conv, vandermonde_kernel
from linrec.testing import assert_agree, generator, long_conv_inputs, reset_mask
from tests.tiers import thorough

from .triton_process import INTERPRETED, quiet

# Triton's kernels run in its interpreter
pytestmark = [quiet, thorough] if INTERPRETED else quiet
BACKENDS = ["triton"] if INTERPRETED else ["torch"]
every_pair = pytest.mark.parametrize(
    ("mode", "backend"), [pair for pair in long_conv.operator.pairs if (pair[1] == "triton") == INTERPRETED]
)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
in_torch = pytest.mark.skipif(INTERPRETED, reason="needs no kernel")


def draw(*shape, dtype=torch.complex128, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


@every_pair
@pytest.mark.parametrize(
    ("batch", "time", "channels", "past", "taps"),
    [(0, 20, 3, 2, 5), (2, 0, 3, 0, 0), (2, 0, 3, 4, 3), (2, 20, 0, 2, 5), (2, 20, 3, 0, 0), (0, 0, 0, 0, 0)],
)
@pytest.mark.parametrize("resets", [False, True])
def test_empty_axes(mode, backend, batch, time, channels, past, taps, resets):
    given = long_conv_inputs(batch, time, channels, taps, past=past) | {
        "state": draw(batch, past, channels).real
    }
    given = {name: x.requires_grad_() for name, x in given.items()}
    reset = torch.zeros(batch, time, dtype=torch.bool) if resets and backend != "triton" else None
    y, state = long_conv(**given, reset=reset, mode=mode, backend=backend)
    assert y.shape == (batch, time, channels) and not y.any() and y.dtype == given["u"].dtype
    assert torch.equal(state, torch.cat([given["state"].to(y.dtype), given["u"]], 1))
    gradients = torch.autograd.grad(
        (y.sum(), state.sum()), list(given.values()), allow_unused=True, materialize_grads=True
    )
    assert [x.shape for x in gradients] == [x.shape for x in given.values()]
    # only the state depends on them
    ones = [torch.zeros_like(x) if name == "kernel" else torch.ones_like(x) for name, x in given.items()]
    assert_agree(gradients, ones)


@thorough
@every_pair
@pytest.mark.parametrize("resets", [False, True])
def test_meta_tensors(mode, backend, resets):
    if backend == "triton":
        pytest.skip("a kernel has no meta tensors")
    given = {name: x.to("meta").requires_grad_() for name, x in long_conv_inputs(2, 20, 3, past=2).items()}
    reset = reset_mask(2, 20).to("meta") if resets else None
    y, state = long_conv(**given, reset=reset, mode=mode, backend=backend)
    assert (y.device.type, y.shape, state.shape) == ("meta", (2, 20, 3), (2, 22, 3))
    for x in torch.autograd.grad((y.sum(), state.sum()), list(given.values())):
        assert x.device.type == "meta"


@in_torch
def test_arguments_that_are_no_dense_tensors():
    given = long_conv_inputs(2, 5, 3)
    for name in given:
        with pytest.raises(TypeError, match=rf"`{name}` must be a tensor.*; got list"):
            long_conv(**given | {name: given[name].tolist()})
        with pytest.raises(TypeError, match=rf"`{name}` must be a dense tensor; got torch.sparse_coo"):
            long_conv(**given | {name: given[name].to_sparse()})
    with pytest.raises(TypeError, match=r"`kernel` must be a tensor; got None"):
        long_conv(given["u"], None)
    with pytest.raises(ValueError, match=r"`kernel` must be on the device of `u`, 'cpu'; got 'meta'"):
        long_conv(given["u"], given["kernel"].to("meta"))
    with pytest.raises(TypeError, match=r"`state` must be float16, .* got int64"):
        long_conv(**given | {"state": given["state"].long()})
    with pytest.raises(TypeError, match=r"`reset` must be bool; got int64"):
        long_conv(**given, reset=torch.zeros(2, 5, dtype=torch.long))


@in_torch
@pytest.mark.parametrize("resets", [False, True])
def test_transforms_of_gradients(resets):
    u, kernel = draw(3, 2, 20, 3).real, draw(3, 3, 20, seed=1).real
    dy, reset = draw(3, 2, 20, 3, seed=2).real, reset_mask(2, 20, rate=0.1) if resets else None

    def loss(u, kernel, dy):
        y, _ = long_conv(u, kernel, reset=reset, mode="convolution")
        return (y * dy).sum()

    def gradients(u, kernel, dy):
        u, kernel = u.detach().requires_grad_(), kernel.detach().requires_grad_()
        return torch.autograd.grad(loss(u, kernel, dy), (u, kernel))

    rows = [gradients(*row) for row in zip(u, kernel, dy, strict=True)]
    expected = [torch.stack(x) for x in zip(*rows, strict=True)]
    of_each = torch.func.grad(loss, argnums=(0, 1))
    assert_agree(torch.func.vmap(of_each)(u, kernel, dy), expected)
    of_sum = torch.func.grad(lambda *x: torch.func.vmap(loss)(*x).sum(), argnums=(0, 1))
    assert_agree(of_sum(u, kernel, dy), expected)
    # several gradients of one call
    one, taps = u[0].requires_grad_(), kernel[0].requires_grad_()
    y, _ = long_conv(one, taps, reset=reset, mode="convolution")
    found = torch.func.vmap(lambda dy: torch.autograd.grad(y, (one, taps), dy, retain_graph=True))(dy)
    rows = [gradients(one, taps, each) for each in dy]
    assert_agree(found, [torch.stack(x) for x in zip(*rows, strict=True)])


@every_backend
@pytest.mark.parametrize(("d", "n", "more"), [(0, 3, (2,)), (2, 0, (2,)), (2, 3, (0,)), (0, 0, ())])
def test_empty_sums_over_powers(backend, d, n, more):
    a, w = 0.5 * draw(d, n).requires_grad_(), draw(*more, d, n).requires_grad_()
    kernel = vandermonde_kernel(a, w, 5, backend=backend)
    assert kernel.shape == (*more, d, 5) and not kernel.any() and kernel.dtype == torch.float64
    assert not any(x.any() for x in torch.autograd.grad(kernel.sum(), (a, w)))


@every_backend
@pytest.mark.parametrize(("d", "n", "rank"), [(0, 3, 1), (2, 0, 1), (2, 3, 0), (0, 0, 0)])
def test_empty_models_of_low_rank(backend, d, n, rank):
    Lambda, P, B, C = (draw(d, n, *more) for more in ((), (rank,), (), ()))
    Lambda = torch.complex(-Lambda.real.abs(), Lambda.imag)
    given = [x.requires_grad_() for x in (Lambda, P, B, C, torch.ones(d, dtype=torch.float64))]
    kernel = cauchy_kernel(*given, 5, backend=backend)
    assert kernel.shape == (d, 5) and kernel.dtype == torch.float64 and bool(kernel.any()) == bool(d * n)
    gradients = torch.autograd.grad(kernel.sum(), given, allow_unused=True, materialize_grads=True)
    assert [x.shape for x in gradients] == [x.shape for x in given]


@in_torch
def test_kernels_of_models_on_the_meta_device():
    one = torch.ones(2, 3, dtype=torch.complex64, device="meta", requires_grad=True)
    kernels = (
        vandermonde_kernel(one, one, 7),
        cauchy_kernel(one, one[..., None], one, one, torch.ones(2, device="meta"), 7),
    )
    for kernel in kernels:
        assert (kernel.device.type, kernel.shape, kernel.dtype) == ("meta", (2, 7), torch.float32)
        assert torch.autograd.grad(kernel.sum(), one)[0].shape == (2, 3)


@in_torch
def test_arguments_of_kernels_that_are_no_dense_tensors():
    one = -torch.ones(1, 2, dtype=torch.complex64)
    low_rank = {"Lambda": one, "P": one[..., None], "B": one, "C": one, "dt": torch.ones(1)}
    for generate, given in ((vandermonde_kernel, {"a": one, "w": one}), (cauchy_kernel, low_rank)):
        for name, x in given.items():
            with pytest.raises(TypeError, match=f"`{name}` must be a tensor; got list"):
                generate(**given | {name: x.tolist()}, length=3)
            with pytest.raises(TypeError, match=f"`{name}` must be a dense tensor; got torch.sparse_coo"):
                generate(**given | {name: x.to_sparse()}, length=3)
        with pytest.raises(ValueError, match=f"`{name}` must be on the device of"):
            generate(**given | {name: x.to("meta")}, length=3)
