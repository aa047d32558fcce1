import copy

import pytest
import torch
from torch import nn

from linrec.nn import ParameterGroup, groups_of, mark
from linrec.nn.parameters import Float32Module

DEFAULT = ParameterGroup("default", weight_decay=True)
TRANSITION = ParameterGroup("transition", weight_decay=False)


def test_unmarked_parameters_are_in_the_default_group_with_weight_decay():
    assert groups_of(nn.Linear(2, 2)) == {"weight": DEFAULT, "bias": DEFAULT}


def test_mark_returns_its_module_and_marks_every_parameter_in_it():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert mark(module, group="slow", weight_decay=True) is module
    groups = groups_of(nn.ModuleDict({"marked": module, "other": nn.Linear(2, 2, bias=False)}))
    assert groups.pop("other.weight") == DEFAULT
    assert len(groups) == 4 and {*groups.values()} == {ParameterGroup("slow", weight_decay=True)}


def test_mark_of_one_parameter_leaves_the_others():
    linear = nn.Linear(2, 2)
    assert mark(linear, "weight") is linear
    assert groups_of(linear) == {"weight": TRANSITION, "bias": DEFAULT}
    mark(linear, "bias", group="slow")
    assert groups_of(linear) == {"weight": TRANSITION, "bias": ParameterGroup("slow", weight_decay=False)}


def test_a_later_mark_replaces_an_earlier_one():
    linear = mark(mark(nn.Linear(2, 2, bias=False)), group="slow")
    assert groups_of(linear)["weight"].name == "slow"


def test_the_mark_stays_whatever_becomes_of_the_parameter():
    linear = mark(nn.Linear(2, 2), "weight")
    linear.to(torch.float64)
    linear.load_state_dict(nn.Linear(2, 2).state_dict())
    assert groups_of(linear) == {"weight": TRANSITION, "bias": DEFAULT}
    # a copy has parameters of its own, and so has a module that is sharded
    copied = copy.deepcopy(linear)
    assert groups_of(copied) == {"weight": TRANSITION, "bias": DEFAULT}
    linear.weight = nn.Parameter(torch.zeros(2, 2))
    assert groups_of(linear)["weight"] == TRANSITION
    # what becomes of the original is nothing to the copy
    mark(linear, "bias")
    assert groups_of(copied)["bias"] == DEFAULT


@pytest.mark.parametrize("marked", [0, 1])
def test_a_shared_parameter_has_the_mark_of_the_module_that_marks_it(marked):
    tied = nn.ModuleList([nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)])
    tied[1].weight = tied[0].weight
    mark(tied[marked])
    assert groups_of(tied) == {"0.weight": TRANSITION}


def test_a_name_that_the_module_does_not_hold_gives_the_nearest():
    with pytest.raises(ValueError, match="'weights'; did you mean 'weight'"):
        mark(nn.Linear(2, 2), "weights")
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        mark(nn.Sequential(nn.Linear(2, 2)), "0.weight")


def test_a_named_parameter_may_be_none():
    linear = nn.Linear(2, 2, bias=False)
    linear.extra = None
    groups = groups_of(mark(linear, "bias", "extra", "weight", group="channel"))
    assert groups == {"weight": ParameterGroup("channel", weight_decay=False)}


class Decay(Float32Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.full((3,), 1 / 3))
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.register_buffer("phase", torch.full((3,), 1 / 3))
        self.register_buffer("steps", torch.arange(3))
        self.network = nn.Sequential(nn.Linear(3, 3))
        self.absent = None
        self.register_parameter("bias", None)
        self.keep_float32("rate", "phase", "steps")
        self.keep_float32("network", "bias")


HALVES = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "to dtype": lambda module: module.to(torch.bfloat16),
    "to device and dtype": lambda module: module.to("cpu", torch.float16),
    "to the like of a tensor": lambda module: module.to(torch.zeros(1, dtype=torch.bfloat16)),
    "back and forth": lambda module: module.half().float().bfloat16(),
}


@pytest.mark.parametrize("cast", HALVES)
def test_named_tensors_keep_every_bit_in_half_precision(cast):
    model = nn.ModuleList([Decay()])
    decay = model[0]
    before = {name: tensor.clone() for name, tensor in decay.state_dict().items()}
    for parameter in decay.parameters():
        parameter.grad = torch.full_like(parameter, 1 / 3)
    HALVES[cast](model)
    assert (
        decay.weight.dtype in (torch.bfloat16, torch.float16)
        and decay.weight.grad.dtype == decay.weight.dtype
    )
    for name, tensor in decay.state_dict().items():
        if name != "weight":
            assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    for parameter in (decay.rate, *decay.network.parameters()):
        assert torch.equal(parameter.grad, torch.full_like(before["rate"], 1 / 3).expand_as(parameter))


def test_double_precision_and_devices_apply_to_all_tensors():
    decay = Decay().bfloat16().double()
    assert {tensor.dtype for tensor in decay.state_dict().values()} == {torch.float64, torch.int64}
    assert (decay.rate == torch.tensor(1 / 3).double()).all()
    decay = Decay().to("meta", torch.bfloat16)
    assert all(tensor.is_meta for tensor in decay.state_dict().values())
    assert (decay.rate.dtype, decay.weight.dtype) == (torch.float32, torch.bfloat16)
    assert decay.to_empty(device="cpu").rate.dtype == torch.float32


def test_weights_of_any_precision_are_loaded():
    rounded = {name: x.bfloat16() if x.is_floating_point() else x for name, x in Decay().state_dict().items()}
    decay = Decay().bfloat16()
    decay.load_state_dict(rounded)
    assert decay.rate.dtype == torch.float32 and torch.equal(decay.rate, rounded["rate"].float())
    exact = Decay().state_dict()
    decay.load_state_dict(exact)
    assert torch.equal(decay.rate, exact["rate"]) and decay.weight.dtype == torch.bfloat16
    # tensors in the place of its own are widened when the module is next cast
    decay.load_state_dict(rounded, assign=True)
    assert decay.bfloat16().rate.dtype == torch.float32


def test_copies_keep_what_their_original_keeps():
    twin = copy.deepcopy(Decay()).bfloat16()
    assert (twin.rate.dtype, twin.weight.dtype) == (torch.float32, torch.bfloat16)


def test_a_name_that_the_module_does_not_hold_is_refused():
    with pytest.raises(ValueError, match=r"'rat'; did you mean 'rate'"):
        Decay().keep_float32("rat")
