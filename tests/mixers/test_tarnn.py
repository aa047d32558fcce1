import torch

from linrec.mixers import build
from linrec.nn import groups_of


def test_initial_values_are_those_of_the_released_code():
    torch.manual_seed(0)
    mixer = build("tarnn", 128, n_steps=3)
    values = dict(mixer.named_parameters())
    assert torch.equal(values["a"], torch.full((3,), 0.01))
    assert torch.equal(values["W_s.bias"], torch.full((128,), -3.0))
    assert not values["W_1.bias"].any()
    for name, value in values.items():
        if name.endswith("weight"):
            torch.testing.assert_close(value.std(), torch.tensor(0.1), rtol=0.05, atol=0)
    assert not build("tarnn", 4, gate_inside=True).W_s.bias.any()


def test_gates_and_steps_are_transitions():
    groups = groups_of(build("tarnn", 4))
    marked = {name for name, group in groups.items() if group.name == "transition"}
    assert marked == {"a", "W_s.weight", "W_s.bias", "U_s.weight"}
