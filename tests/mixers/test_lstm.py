import pytest
import torch

from linrec.mixers import build
from tests.mixers.gates import assert_uniform


def test_forget_gates_start_at_the_bias_given():
    torch.manual_seed(0)
    b = sum(bias for name, bias in build("lstm", 8, forget_bias=1.0).rnn.named_parameters() if "bias" in name)
    i, f, g, o = b.chunk(4)
    assert torch.equal(f, torch.ones(8))
    assert all(gate.unique().numel() == 8 for gate in (i, g, o))


def test_a_forget_bias_must_be_finite():
    with pytest.raises(ValueError, match="`forget_bias` must be"):
        build("lstm", 8, forget_bias=float("nan"))


def test_chrono_initialisation_opens_forget_gates_and_closes_input_gates_by_as_much():
    torch.manual_seed(0)
    _, _, b, c = build("lstm", 4096, chrono=101).rnn.parameters()
    (b_i, b_f, b_g, _), (c_i, c_f, c_g, _) = b.detach().double().chunk(4), c.chunk(4)
    # the gate is 1 - 1 / (1 + u)
    assert_uniform(b_f.exp(), 1, 100)
    assert torch.equal(b_i, -b_f) and not c_f.any() and not c_i.any()
    assert 0.9 / 64 < b_g.abs().max() < 1 / 64 and c_g.any()


def test_gates_of_ur_lstm_start_uniform_and_their_refinement_opposite():
    torch.manual_seed(0)
    _, _, b, _ = build("lstm", 4096, refine=True, uniform_init=True).rnn.parameters()
    b_i, b_f, _, _ = b.detach().double().chunk(4)
    assert_uniform(b_f.sigmoid(), 1 / 4096, 1 - 1 / 4096)
    assert torch.equal(b_i, -b_f)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chrono": 9, "uniform_init": True}, "`chrono` must be None beside `uniform_init=True`; got 9"),
        ({"chrono": 1}, "`chrono` must be at least 2; got 1"),
        ({"chrono": 9, "forget_bias": 1.0}, "`forget_bias` must be None beside `chrono` and"),
    ],
)
def test_a_forget_gate_has_one_start(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("lstm", 8, **arguments)
