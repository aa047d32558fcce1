import pytest
import torch

from linrec.mixers import build


def test_forget_gates_start_at_the_bias_given():
    torch.manual_seed(0)
    b = sum(bias for name, bias in build("lstm", 8, forget_bias=1.0).rnn.named_parameters() if "bias" in name)
    i, f, g, o = b.chunk(4)
    assert torch.equal(f, torch.ones(8))
    assert all(gate.unique().numel() == 8 for gate in (i, g, o))


def test_a_forget_bias_must_be_finite():
    with pytest.raises(ValueError, match="`forget_bias` must be"):
        build("lstm", 8, forget_bias=float("nan"))
