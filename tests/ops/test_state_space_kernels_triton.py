"""The Triton kernels of kernel generators: on a GPU where there is one, else interpreted on small shapes."""

import pytest
import torch

from linrec.ops import cauchy_kernel, vandermonde_kernel
from linrec.ops.core import backends
from linrec.ops.long_conv import cauchy, powers
from linrec.testing import assert_agree, generator
from tests.tiers import thorough

from .opcheck import check_operators
from .triton_process import DEVICE, INTERPRETED, on_a_gpu, on_either, quiet

pytest.importorskip("triton")
pytestmark = quiet


def draw(*shape, seed):
    return torch.randn(shape, generator=generator(seed), dtype=torch.complex128)


def inputs(models, rows, entries, frequencies):
    Lambda = torch.complex(-draw(models, entries, seed=0).abs() - 0.1, 3 * draw(models, entries, seed=1).real)
    rest = 1 - torch.exp(-2j * torch.pi * torch.arange(frequencies) / 50)
    around = (0.2 + 0.1 * draw(models, frequencies, seed=2)) * (2 - rest)
    return draw(models, rows, entries, seed=3), Lambda, around, rest


@on_either
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 1), torch.complex64),
        ((2, 4, 5, 9), torch.complex128),
        ((3, 9, 17, 70), torch.complex64),
    ],
)
def test_sums_and_gradients_are_those_of_the_matrix(shape, dtype):
    given = [x.requires_grad_() for x in inputs(*shape)]
    expected = cauchy.sums_by_torch(cauchy.Cauchy(*given)).sums
    dsums = draw(*expected.shape, seed=4)
    gradients = torch.autograd.grad(expected, given[:3], dsums)
    narrow = [x.detach().to(DEVICE, dtype).requires_grad_() for x in given[:3]]
    # weights as an axis of another layout, and conjugates that were not formed
    strided = narrow[0].mT.contiguous().mT.conj().conj()
    rest = given[3].detach().to(DEVICE, dtype)
    sums = cauchy.sums_by_triton(cauchy.Cauchy(strided, *narrow[1:], rest)).sums
    assert_agree(sums.cpu(), expected)
    mine = torch.autograd.grad(sums, narrow, dsums.to(DEVICE, dtype))
    for one, other in zip(mine, gradients, strict=True):
        scale = max(1.0, float(other.abs().max()))
        assert_agree(one.cpu() / scale, other / scale)


@on_either
def test_the_kernel_by_triton_is_the_kernel_by_torch(monkeypatch):
    Lambda, P, B, C = (draw(2, 3, *more, seed=seed) for seed, more in enumerate(((), (2,), (), ())))
    Lambda = torch.complex(-Lambda.real.exp(), Lambda.imag)
    dt = torch.tensor([0.3, 0.1], dtype=torch.float64)
    expected = cauchy_kernel(Lambda, P, B, C, dt, 33)
    narrow = [x.to(DEVICE, torch.complex64) for x in (Lambda, P, B, C)] + [dt.to(DEVICE, torch.float32)]
    monkeypatch.setattr(backends, "usable", lambda backend, device: True)
    # what one backend runs is missing for the other
    for names, missing in ((("auto", "triton"), "sums_by_torch"), (("torch",), "sums_by_triton")):
        with monkeypatch.context() as patch:
            patch.setattr(cauchy, missing, None)
            for backend in names:
                assert_agree(cauchy_kernel(*narrow, 33, backend=backend).cpu(), expected)


@on_either
def test_kernels_keep_what_their_declarations_promise():
    check_operators(cauchy.sums_by_triton, cauchy.Cauchy(*(x.to(DEVICE) for x in inputs(2, 4, 3, 5))))
    tables = powers.powers(0.5 * draw(2, 3, seed=0).to(DEVICE), 7)
    check_operators(powers.sums_by_triton, powers.Weighted(draw(1, 2, 3, seed=1).to(DEVICE), *tables))


@on_either
def test_sums_map():
    weights, Lambda, around, rest = (x.to(DEVICE) for x in inputs(2, 4, 3, 5))
    scale = torch.tensor([1.0, 2.0], dtype=torch.float64, device=DEVICE)

    def sums(scale):
        return cauchy.sums_by_triton(cauchy.Cauchy(scale * weights, Lambda, around, rest)).sums

    # the kernel is an operation that autograd has to see
    weights.requires_grad_()
    assert_agree(torch.func.vmap(sums)(scale), torch.stack([sums(each) for each in scale]))


@thorough
@on_either
def test_gradients_are_differentiable_again():
    *wanted, rest = (x.to(DEVICE, torch.complex64) for x in inputs(1, 1, 2, 3))
    wanted = [x.requires_grad_() for x in wanted]

    def second(sums_of):
        sums = sums_of(cauchy.Cauchy(*wanted, rest)).sums
        first = torch.autograd.grad(sums.abs().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(x.abs().sum() for x in first), wanted)

    assert_agree(second(cauchy.sums_by_triton), second(cauchy.sums_by_torch))


@on_either
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 1), torch.complex128),
        ((2, 3, 5, 10), torch.complex64),
        ((1, 2, 40, 70), torch.complex128),
        ((9, 1, 33, 100), torch.complex64),
    ],
)
def test_sums_over_powers_and_gradients_are_those_of_products(shape, dtype):
    rows, models, entries, length = shape
    a = draw(models, entries, seed=0)
    a = 0.99 * a / (1 + a.abs())
    # rows in two axes, and another layout
    w = draw(entries, rows, 1, models, seed=1).movedim(0, -1)
    dk = torch.randn(rows, 1, models, length, generator=generator(2), dtype=torch.float64)
    outcomes = []
    for backend, some, device in (("torch", torch.complex128, "cpu"), ("triton", dtype, DEVICE)):
        given = [x.to(device, some).requires_grad_() for x in (a, w)]
        kernel = vandermonde_kernel(*given, length, backend=backend)
        gradients = torch.autograd.grad(kernel, given, dk.to(kernel))
        outcomes.append([x.detach().cpu() for x in (kernel, *gradients)])
    assert_agree(outcomes[1], outcomes[0])


@on_either
def test_sums_over_powers_are_differentiable_again_and_map():
    tables = powers.powers(0.5 * draw(2, 3, seed=0).to(DEVICE), 7)
    given = [x.requires_grad_() for x in (draw(1, 2, 3, seed=1).to(DEVICE), tables.near, tables.far)]

    def sums(*given):
        return powers.sums_by_triton(powers.Weighted(*given, 7)).sums

    assert torch.autograd.gradgradcheck(sums, given, fast_mode=True)
    scale = torch.tensor([1.0, 2.0], dtype=torch.float64, device=DEVICE)
    mapped = torch.func.vmap(lambda scale: sums(scale * given[0], *given[1:]))(scale)
    assert_agree(mapped, torch.stack([sums(each * given[0], *given[1:]) for each in scale]))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors of the CPU")
@pytest.mark.parametrize("generate", [vandermonde_kernel, cauchy_kernel])
def test_a_backend_that_cannot_run_is_refused(generate):
    one = -torch.ones(1, 1, dtype=torch.complex64)
    given = (one, one) if generate is vandermonde_kernel else (one, one[..., None], one, one, torch.ones(1))
    name = generate.__name__
    with pytest.raises(
        ValueError, match=f"backend='triton' of `{name}` runs on 'cuda'; got tensors on 'cpu'"
    ):
        generate(*given, 3, backend="triton")
    with pytest.raises(
        ValueError, match=rf"no `backend` of `{name}` called 'numba'; .* from: 'auto', .*'triton'"
    ):
        generate(*given, 3, backend="numba")


@on_either
def test_sums_over_powers_by_triton_are_asked_for(monkeypatch):
    a, w = (0.5 * draw(2, 3, seed=seed).to(DEVICE, torch.complex64) for seed in (0, 1))
    monkeypatch.setattr(backends, "usable", lambda backend, device: True)
    expected = vandermonde_kernel(a, w, 7, backend="triton")
    none = vandermonde_kernel(a[:, :0], w[None, :, :0], 7, backend="triton")
    assert none.shape == (1, 2, 7) and not none.any()
    with pytest.raises(ValueError, match=r"'triton'\) of `vandermonde_kernel` takes a complex `a`"):
        vandermonde_kernel(a.real, w.real, 7, backend="triton")
    monkeypatch.setattr(powers, "sums_by_triton", None)
    for backend in ("auto", "torch"):
        assert_agree(vandermonde_kernel(a, w, 7, backend=backend), expected)
    with pytest.raises(TypeError):
        vandermonde_kernel(a, w, 7, backend="triton")


@on_a_gpu
def test_long_sums_over_powers_on_a_gpu():
    a = torch.polar(torch.full((16, 32), 0.999), torch.rand(16, 32, generator=generator()))
    given = [x.cuda().requires_grad_() for x in (a, draw(4, 16, 32, seed=1).to(torch.complex64))]
    dk = torch.randn(4, 16, 5000, generator=generator(2)).cuda()
    outcomes = []
    for backend in ("triton", "torch"):
        kernel = vandermonde_kernel(*given, 5000, backend=backend)
        outcomes.append((kernel.detach(), *torch.autograd.grad(kernel, given, dk)))
    for one, other in zip(*outcomes, strict=True):
        scale = float(other.abs().max())
        assert_agree(one / scale, other / scale)


@on_a_gpu
def test_long_kernels_on_a_gpu():
    Lambda, P, B, C = (draw(8, 32, *more, seed=seed) for seed, more in enumerate(((), (1,), (), ())))
    given = [torch.complex(-Lambda.real.exp(), 30 * Lambda.imag), P, B, C, torch.full((8,), 0.01).double()]
    # where torch makes the sums
    wide = [x.requires_grad_() for x in given]
    narrow = [
        x.detach().to("cuda", torch.complex64 if x.is_complex() else torch.float32).requires_grad_()
        for x in wide
    ]
    kernels = [cauchy_kernel(*some, 4096) for some in (narrow, wide)]
    assert_agree(kernels[0].cpu(), kernels[1])
    dk = torch.randn(8, 4096, generator=generator(9))
    found = [torch.autograd.grad(k, some, dk.to(k)) for k, some in zip(kernels, (narrow, wide), strict=True)]
    for one, other in zip(*found, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.cpu() / scale, (other / scale).to(one.dtype), rtol=1e-3, atol=1e-3)
