import pytest
import torch

from linrec.mixers import build


def test_initial_values_are_uniform_and_counted_as_in_the_paper():
    mixer = build("lem", 100)
    assert sum(p.numel() for p in mixer.parameters()) == 8 * 100**2 + 4 * 100
    for weight in mixer.parameters():
        assert 0.09 < weight.abs().max() <= 0.1
        assert weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.1)
    assert mixer.state_size == 200


def test_states_stay_within_one():
    torch.manual_seed(0)
    mixer = build("lem", 8)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.mul_(20)
    y, state = mixer(10 * torch.randn(2, 50, 8))
    assert 0.9 < y.abs().max() <= 1 and state.abs().max() <= 1


@pytest.mark.parametrize("dt", [0.0, 1.5, float("nan")])
def test_a_time_step_that_is_out_of_range_is_refused(dt):
    with pytest.raises(ValueError, match=r"`dt` must be .*; got"):
        build("lem", 4, dt=dt)
