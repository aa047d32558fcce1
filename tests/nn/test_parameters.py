import copy

import pytest
import torch
from torch import nn

from linrec.nn import ParameterGroup, groups_of, mark

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
    with pytest.raises(ValueError, match="no parameter of Linear 'weights'; did you mean 'weight'"):
        mark(nn.Linear(2, 2), "weights")
    with pytest.raises(ValueError, match=r"no parameter of Sequential '0\.weight', and none to choose from"):
        mark(nn.Sequential(nn.Linear(2, 2)), "0.weight")


def test_a_named_parameter_may_be_none():
    linear = nn.Linear(2, 2, bias=False)
    linear.extra = None
    groups = groups_of(mark(linear, "bias", "extra", "weight", group="channel"))
    assert groups == {"weight": ParameterGroup("channel", weight_decay=False)}
