"""scoRNN."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.scornn import ScoRNN
from linrec.nn import groups_of
from tests.mixers.orthogonality import trained

D = 8


def make(d_model: int = D, **arguments) -> ScoRNN:
    torch.manual_seed(0)
    mixer = build("scornn", d_model, **arguments)
    assert isinstance(mixer, ScoRNN)
    return mixer


def matrix(mixer: ScoRNN) -> torch.Tensor:
    """The recurrent matrix, by the response to unit states without input."""
    with torch.no_grad():
        return mixer(torch.zeros(D, 1, D), torch.eye(D))[1]


@pytest.mark.parametrize("rho", [0, 3, D])
def test_the_matrix_stays_orthogonal_in_training_and_keeps_its_determinant(rho):
    mixer = make(rho=rho)
    before = matrix(mixer)
    after = trained(mixer)
    torch.nn.init.zeros_(after.b)
    for found in (before, matrix(after)):
        torch.testing.assert_close(found @ found.T, torch.eye(D), rtol=0, atol=1e-6)
        assert torch.linalg.det(found).item() == pytest.approx((-1) ** rho, rel=1e-5)
    assert (matrix(after) - before).abs().max() > 0.1


def test_entries_of_minus_one_turn_the_last_columns():
    mixer = make(rho=3)
    Z = mixer.Z().detach()
    torch.testing.assert_close(matrix(mixer)[:, : D - 3], Z[:, : D - 3])
    torch.testing.assert_close(matrix(mixer)[:, D - 3 :], -Z[:, D - 3 :])


@pytest.mark.parametrize(("d_model", "negative"), [(8, 4), (7, 3), (1, 0)])
def test_half_of_the_channels_change_sign_by_default(d_model, negative):
    assert (make(d_model).D == -1).sum() == negative


def test_initial_values_and_groups():
    mixer = make(200)
    assert 0.0099 < mixer.U.weight.abs().max() <= 0.01 and mixer.U.weight.mean().abs() < 1e-4
    assert not mixer.b.any()
    angles = torch.linalg.eigvals(mixer.Z().detach()).angle().abs().sort().values[::2]
    uniform = (torch.arange(100) + 0.5) / 100 * math.pi / 2
    assert (angles - uniform).abs().max() < 0.16 * math.pi / 2
    assert sum(parameter.numel() for parameter in mixer.parameters()) == 200**2 + 200 * 199 // 2 + 200
    groups = groups_of(mixer)
    assert {name for name, group in groups.items() if group.name == "transition"} == {"Z.A"}
    assert not groups["Z.A"].weight_decay


@pytest.mark.parametrize("rho", [-1, 9])
def test_numbers_of_entries_out_of_range_are_refused(rho):
    with pytest.raises(ValueError, match=rf"`rho` must be a number of channels in \[0, .* = 8\]; got {rho}"):
        make(rho=rho)
