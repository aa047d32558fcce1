"""Activations, and complex numbers as pairs."""

import pytest
import torch

from linrec.nn.activations import complex_modrelu, modrelu, to_complex, to_pairs
from linrec.testing import assert_agree, generator


def test_real_and_imaginary_parts_alternate():
    z = torch.randn(2, 3, generator=generator(), dtype=torch.complex64)
    pairs = to_pairs(z)
    assert torch.equal(pairs[:, ::2], z.real) and torch.equal(pairs[:, 1::2], z.imag)
    assert torch.equal(to_complex(pairs), z)


def test_modrelu_moves_magnitudes():
    u = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0])
    b = torch.tensor([-1.0, -1.0, 2.0, 0.5, 0.0])
    assert_agree(modrelu(u, b), torch.tensor([-1.0, 0.0, 0.0, 0.75, 3.0]))


def test_complex_modrelu_moves_magnitudes_and_keeps_phases():
    z = torch.polar(*torch.tensor([[2.0, 0.5, 0.25, 3.0], [0.1, 2.0, -3.0, 1.5]]).double())
    b = torch.tensor([-1.0, -1.0, 0.5, 0.0]).double()
    found = complex_modrelu(z, b, eps=0.5)
    expected = torch.tensor([1.0, 0.0, 0.75, 3.0]).double() * z.abs() / (z.abs() + 0.5)
    assert_agree(found.abs(), expected)
    assert_agree(found * z.abs(), expected * z)


@pytest.mark.parametrize(("b", "slope"), [(0.5, 50.0), (-0.5, 0.0)])
def test_the_derivative_of_complex_modrelu_at_zero(b, slope):
    z = torch.zeros(1, dtype=torch.complex128, requires_grad=True)
    b = torch.tensor([b]).double()
    (gradient,) = torch.autograd.grad(complex_modrelu(z, b, eps=0.01).real.sum(), z, create_graph=True)
    assert_agree(gradient.detach(), torch.tensor([slope + 0j], dtype=torch.complex128))
    (second,) = torch.autograd.grad(gradient.real.sum(), z)
    assert second.isfinite().all()


def test_derivatives_of_complex_modrelu():
    z = torch.randn(2, 4, generator=generator(0), dtype=torch.complex128, requires_grad=True)
    b = torch.tensor([-0.3, 0.2, 0.0, -5.0]).double().requires_grad_()
    assert torch.autograd.gradcheck(complex_modrelu, (z, b))
    assert torch.autograd.gradgradcheck(complex_modrelu, (z, b))
