import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of


def test_initial_values_are_those_of_the_released_code():
    torch.manual_seed(0)
    mixer = build("fast_grnn", 128)
    for weight in mixer.W.weights() + mixer.U.weights():
        assert float(weight.detach().std()) == pytest.approx(0.1, rel=0.05)
    assert torch.equal(mixer.b, torch.ones(128))
    assert torch.equal(mixer.b_z, torch.ones(128))
    assert (mixer.zeta.item(), mixer.nu.item()) == (1, -4)
    assert groups_of(mixer)["zeta"].name == "transition"


def test_a_gate_costs_a_bias_and_two_scalars():
    def count(**arguments):
        return sum(p.numel() for p in build("fast_grnn", 16, **arguments).parameters())

    assert count() == 2 * 16**2 + 2 * 16 + 2
    assert count(w_rank=3, u_rank=2) == 2 * 16 * 5 + 2 * 16 + 2
