"""Columnar networks against autograd through time, in float64."""

import pytest
import torch

from linrec import mixers
from linrec.learning import ColumnarNetwork, build_learner
from linrec.trees import leaves
from tests.learning.test_learners import assert_equal

STEPS = 15


def network_of(**options):
    torch.manual_seed(0)
    network = ColumnarNetwork(3, 2, **options).double()
    with torch.no_grad():
        for p in network.parameters():
            p.uniform_(-0.8, 0.8)
    return network


def drawn(rows=2):
    x, y = torch.randn(rows, STEPS, 3, dtype=torch.float64), torch.randn(rows, STEPS, 2, dtype=torch.float64)
    reset = torch.zeros(rows, STEPS, dtype=torch.bool)
    reset[0, 6] = True
    return x, y, reset


KINDS = [{}, {"decay": 1.0}, {"per_stage": 2}, {"per_stage": 1}, {"per_stage": 2, "late": True}]


@pytest.mark.parametrize("options", KINDS)
def test_gradients_of_the_stage_that_learns_are_autograds(options):
    network, (x, y, reset) = network_of(columns=4, **{"decay": 0.9, **options}), drawn()
    last = len(network.stages) - 1
    # a learner whose last stage learns from the start
    learner = build_learner("columnar", network, stage_steps=1)
    learner.steps = last
    learner.chunk(x, y, reset)
    assert network.grown == last + 1
    (network(x, reset=reset)[0] - y).square().mean(2).sum().backward()
    expected = {name: p.grad for name, p in network.named_parameters()}
    names = [f"stages.{last}", "readout.weight", "readout.bias"]
    assert_equal(learner.gradients(), expected, names)
    assert not any(learner.gradients()[f"stages.{i}"].any() for i in range(last))


def test_traces_are_derivatives_of_the_columns_numbers():
    network, (x, y, _) = network_of(columns=4, per_stage=2), drawn(rows=1)
    learner = build_learner("columnar", network, stage_steps=100)
    learner.chunk(x, y)
    for name in ("h", "c"):
        for column in range(2):
            state = network(x)[1][name][0, column]
            (expected,) = torch.autograd.grad(state, network.stages[0])
            assert_equal({0: learner.memory["traces"][name][0][:, column]}, {0: expected[:, column]})


def test_stages_learn_one_after_the_other_and_a_new_column_changes_nothing():
    torch.manual_seed(0)
    network, (x, y, _) = ColumnarNetwork(3, 2, columns=3, per_stage=1).double(), drawn()
    learner = build_learner(
        "columnar", network, torch.optim.SGD(network.parameters(), lr=0.1), stage_steps=5, update_every=1
    )
    start = [p.clone() for p in network.stages]
    for stage in range(3):
        before = [p.clone() for p in network.stages]
        learner.chunk(x[:, 5 * stage : 5 * stage + 5], y[:, 5 * stage : 5 * stage + 5])
        changed = [not torch.equal(a, b) for a, b in zip(before, network.stages, strict=True)]
        assert changed == [i == stage for i in range(3)]
        assert torch.equal(network.readout.weight[:, stage + 1 :], torch.zeros(2, 2 - stage))
    assert all(not torch.equal(a, b) for a, b in zip(start, network.stages, strict=True))


def test_a_state_continues_bit_for_bit_across_a_stage():
    def made():
        network = network_of(columns=3, per_stage=1)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        return build_learner("columnar", network, optimizer, stage_steps=4, update_every=2)

    (x, y, reset), whole, first, second = drawn(), made(), made(), made()
    whole.chunk(x, y, reset)
    first.chunk(x[:, :6], y[:, :6], reset[:, :6])
    second.load_state_dict(first.state_dict())
    second.chunk(x[:, 6:], y[:, 6:], reset[:, 6:])
    for a, b in zip(leaves(whole.state_dict()["model"]), leaves(second.state_dict()["model"]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options, words",
    [({"per_stage": 3}, "`per_stage`"), ({"decay": 0.0}, "`decay`"), ({"floor": 0.0}, "`floor`")],
)
def test_bad_networks_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ColumnarNetwork(3, 1, columns=4, **options)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="ColumnarNetwork"):
        build_learner("columnar", mixers.build("gru", 4))
