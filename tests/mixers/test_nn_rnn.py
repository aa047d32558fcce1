"""nnRNN."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.nn_rnn import NNRNN
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator
from tests.mixers.orthogonality import trained

D = 8


def make(d_model: int = D, **arguments) -> NNRNN:
    torch.manual_seed(0)
    mixer = build("nn_rnn", d_model, **arguments).double()
    assert isinstance(mixer, NNRNN)
    return mixer


def moved(**arguments) -> NNRNN:
    """A mixer with random numbers in T and alpha, and without bias."""
    mixer = make(**arguments)
    with torch.no_grad():
        for parameter in (mixer.T, mixer.alpha, mixer.corners):
            if parameter is not None:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator(1)))
    torch.nn.init.zeros_(mixer.b)
    return mixer


def matrix(mixer: NNRNN) -> torch.Tensor:
    """The recurrent matrix V, by the response to unit states without input."""
    with torch.no_grad():
        return mixer(torch.zeros(D, 1, D).double(), torch.eye(D).double())[1]


def test_the_angles_and_radii_are_the_eigenvalues_for_any_t():
    mixer = moved()
    found = torch.linalg.eigvals(matrix(mixer))
    expected = torch.polar(mixer.alpha.abs(), mixer.theta + math.pi * (mixer.alpha < 0)).detach()
    for eigenvalue in torch.cat([expected, expected.conj()]):
        assert (found - eigenvalue).abs().min() < 1e-9


def test_t_is_above_the_blocks_entry_by_entry():
    mixer = moved(corners=True)
    P = mixer.P().detach()
    Theta = P.mT @ matrix(mixer) @ P
    entries = iter(mixer.T.detach())
    expected = torch.zeros(D, D).double()
    for i in range(0, D, 2):
        alpha, theta, corner = (p.detach()[i // 2] for p in (mixer.alpha, mixer.theta, mixer.corners))
        c, s = alpha * theta.cos(), alpha * theta.sin()
        expected[i : i + 2, i : i + 2] = torch.tensor([[c, corner - s], [s, c]])
        for j in range(i + 2, D, 2):
            expected[i : i + 2, j : j + 2] = next(entries)
    assert_agree(Theta, expected)


def test_the_matrix_starts_orthogonal_and_leaves_normality_in_training():
    mixer = make()
    torch.nn.init.zeros_(mixer.b)
    V = matrix(mixer)
    torch.testing.assert_close(V @ V.T, torch.eye(D).double(), rtol=0, atol=1e-12)
    after = trained(mixer.float()).double()
    torch.nn.init.zeros_(after.b)
    P, V = after.P().detach(), matrix(after)
    assert (P @ P.T - torch.eye(D)).abs().max() < 1e-6
    assert (V @ V.T - V.T @ V).abs().max() > 0.1


@pytest.mark.parametrize("training", [True, False])
def test_delta_pulls_radii_to_one_in_training(training):
    x = torch.randn(2, 5, D, generator=generator(0)).double()
    gradients = []
    for delta in (0.0, 0.3):
        mixer = moved(delta=delta).train(training)
        y, _ = mixer(x)
        gradients.append(torch.autograd.grad(y.square().sum(), mixer.alpha)[0])
    expected = 0.6 * (moved().alpha.detach() - 1) if training else torch.zeros(D // 2).double()
    assert_agree(gradients[1] - gradients[0], expected)


def test_initial_values_and_groups():
    mixer = make(200)
    assert mixer.U.weight.std().item() == pytest.approx((1 / 200) ** 0.5, rel=0.02)
    assert 0.0095 < mixer.b.abs().max() <= 0.01
    assert not mixer.T.any() and (mixer.alpha == 1).all()
    uniform = (torch.arange(100) + 0.5) / 100 * math.tau
    assert (mixer.theta.sort().values - uniform).abs().max() < 0.16 * math.tau
    # half of the matrix without its blocks, two numbers a block, A, U and b
    count = 200 * 198 // 2 + 200 + 200 * 199 // 2 + 200**2 + 200
    assert sum(parameter.numel() for parameter in mixer.parameters()) == count
    groups = groups_of(mixer)
    assert {n for n, group in groups.items() if group.name == "transition"} == {"P.A", "theta", "alpha"}
    assert groups["T"].weight_decay and not groups["alpha"].weight_decay


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match=r"`d_model` must be even, .*; got 7"):
        make(7)


def test_a_negative_weight_of_the_loss_is_refused():
    with pytest.raises(ValueError, match="`delta` must be at least 0; got -1"):
        make(delta=-1)
