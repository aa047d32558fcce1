import pytest
import torch

from linrec.mixers import build


def test_the_identity_start_is_that_of_le():
    torch.manual_seed(0)
    rnn = build("elman", 64, activation="relu", init="identity").rnn
    assert torch.equal(rnn.weight_hh_l0, torch.eye(64))
    assert not rnn.bias_ih_l0.any() and not rnn.bias_hh_l0.any()
    assert float(rnn.weight_ih_l0.detach().std()) == pytest.approx(0.001, rel=0.05)
