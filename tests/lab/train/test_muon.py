import pytest
import torch
from torch import nn

from linrec.lab.train.optim import COEFFICIENTS, STEPS, Muon, orthogonalized
from linrec.testing import assert_agree, generator

SHAPES = [(6, 3), (3, 6), (3, 6), (4, 4)]


def test_orthogonalisation_is_the_polynomial_of_every_singular_value() -> None:
    a, b, c = COEFFICIENTS
    for shape in SHAPES:
        matrices = torch.randn(2, *shape, generator=generator(), dtype=torch.float64)
        u, s, v = torch.linalg.svd(matrices, full_matrices=False)
        s = s / s.norm(dim=-1, keepdim=True)
        for _ in range(STEPS):
            s = a * s + b * s**3 + c * s**5
        assert_agree(orthogonalized(matrices), u @ (s[..., None] * v))


def test_singular_values_end_near_one() -> None:
    for smallest in (0.002, 0.1, 1.0):
        values = torch.tensor([1.0, smallest], dtype=torch.float64)
        ends = orthogonalized(torch.diag(values)).diagonal()
        assert ends.min() > 0.67 and ends.max() < 1.22


def test_zero_gradients_give_zero_and_no_nan() -> None:
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_steps_agree_with_torchs_own() -> None:
    ours, theirs = (
        [nn.Parameter(torch.randn(*shape, generator=generator(n))) for n, shape in enumerate(SHAPES)]
        for _ in range(2)
    )
    # a learning rate on the device, as training has it
    muon = Muon(ours, lr=torch.tensor(0.02), momentum=0.9, weight_decay=0.3)
    reference = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.3)
    before = [parameter.detach().clone() for parameter in ours]
    random = generator(9)
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=random)
            other.grad = one.grad.clone()
        muon.step()
        reference.step()
    for start, one, other in zip(before, ours, theirs, strict=True):
        # torch iterates in bfloat16, so their updates agree to its rounding, grown by five steps
        difference = (one - other).norm() / (other - start).norm()
        assert difference < 0.02, difference


def test_parameters_without_gradient_stay() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    parameters[0].grad = torch.eye(2)
    Muon(parameters, lr=0.1, weight_decay=0.5).step()
    assert not torch.equal(parameters[0], torch.ones(2, 2))
    assert torch.equal(parameters[1], torch.ones(2, 2))


def test_only_matrices_are_taken() -> None:
    with pytest.raises(
        ValueError, match=r"`params` must be real matrices; got torch.float32 of shape \(3,\)"
    ):
        Muon([nn.Parameter(torch.zeros(3))])
