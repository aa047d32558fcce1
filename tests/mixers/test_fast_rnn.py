import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of


def test_initial_values_are_those_of_the_released_code():
    torch.manual_seed(0)
    mixer = build("fast_rnn", 128, u_rank=8)
    weights = mixer.W.weights() + mixer.U.weights()
    assert [tuple(weight.shape) for weight in weights] == [(128, 128), (8, 128), (128, 8)]
    for weight in weights:
        assert float(weight.detach().std()) == pytest.approx(0.1, rel=0.1)
    assert torch.equal(mixer.b, torch.ones(128))
    assert (mixer.alpha.item(), mixer.beta.item()) == (-3, 3)
    assert groups_of(mixer)["alpha"].name == "transition"


def test_a_rank_below_one_is_refused():
    with pytest.raises(ValueError, match="`w_rank` must be at least 1"):
        build("fast_rnn", 8, w_rank=0)
