"""expRNN and dtriv."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.exp_rnn import ExpRNN
from linrec.nn import groups_of
from linrec.testing import generator
from tests.mixers.orthogonality import trained

D = 8


def make(d_model: int = D, **arguments) -> ExpRNN:
    torch.manual_seed(0)
    mixer = build("exp_rnn", d_model, **arguments)
    assert isinstance(mixer, ExpRNN)
    return mixer


@pytest.mark.parametrize("arguments", [{}, {"matrix_map": "cayley"}, {"init": "henaff", "base": "start"}])
def test_the_matrix_moves_and_stays_orthogonal_in_training(arguments):
    mixer = make(**arguments)
    before = mixer.B().detach()
    after = trained(mixer).B().detach()
    assert (after - before).abs().max() > 0.1
    assert (after @ after.T - torch.eye(D)).abs().max() < 1e-6


def test_without_input_the_norm_of_the_state_is_kept():
    mixer = make().double()
    torch.nn.init.zeros_(mixer.b)
    start = torch.randn(2, D, generator=generator(), dtype=torch.float64)
    y, _ = mixer(torch.zeros(2, 500, D, dtype=torch.float64), start)
    torch.testing.assert_close(y.norm(dim=-1), start.norm(dim=-1)[:, None].expand(2, 500))


def test_initial_values_and_groups():
    mixer = make(200)
    assert mixer.V.weight.std().item() == pytest.approx(math.sqrt(2 / 200), rel=0.02)
    assert 0.0095 < mixer.b.abs().max() <= 0.01 and mixer.b.mean().abs() < 0.002
    assert sum(parameter.numel() for parameter in mixer.parameters()) == 200**2 + 200 * 199 // 2 + 200
    groups = groups_of(mixer)
    assert {name for name, group in groups.items() if group.name == "transition"} == {"B.A"}
    assert not groups["B.A"].weight_decay
