import copy

import torch
from torch import nn

from linrec.nn import ParameterGroup, group_of, mark


def test_unmarked_parameters_are_in_the_default_group_with_weight_decay():
    assert group_of(nn.Linear(2, 2).weight) == ParameterGroup("default", weight_decay=True)


def test_mark_returns_its_target_and_marks_every_parameter_of_a_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert mark(module, group="slow", weight_decay=True) is module
    assert {group_of(p) for p in module.parameters()} == {ParameterGroup("slow", weight_decay=True)}


def test_mark_of_one_parameter_leaves_the_others():
    linear = nn.Linear(2, 2)
    mark(linear.weight)
    assert group_of(linear.weight) == ParameterGroup("transition", weight_decay=False)
    assert group_of(linear.bias).name == "default"


def test_the_mark_stays_through_dtype_changes_and_loading():
    linear = mark(nn.Linear(2, 2))
    linear.to(torch.float64)
    linear.load_state_dict(nn.Linear(2, 2).state_dict())
    assert group_of(linear.weight).name == "transition"


def test_a_deep_copy_has_no_mark():
    # documented: torch makes new parameters, so an optimiser must be made from the original
    assert group_of(copy.deepcopy(mark(nn.Linear(2, 2))).weight).name == "default"
