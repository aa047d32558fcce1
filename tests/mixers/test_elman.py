import pytest
import torch

from linrec.mixers import build


def test_the_identity_start_is_that_of_le():
    torch.manual_seed(0)
    rnn = build("elman", 64, activation="relu", init="identity").rnn
    assert torch.equal(rnn.weight_hh_l0, torch.eye(64))
    assert not rnn.bias_ih_l0.any() and not rnn.bias_hh_l0.any()
    assert float(rnn.weight_ih_l0.detach().std()) == pytest.approx(0.001, rel=0.05)


def test_the_orthogonal_start_keeps_the_norm_of_the_state():
    torch.manual_seed(0)
    U = build("elman", 32, init="orthogonal").rnn.weight_hh_l0.detach()
    assert torch.allclose(U @ U.T, torch.eye(32), atol=1e-5)
