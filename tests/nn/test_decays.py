import pytest
import torch

from linrec.nn import LowerBounds, groups_of
from linrec.testing import assert_agree


def filled(kind: str = "increasing", layers: int = 4) -> LowerBounds:
    torch.manual_seed(0)
    bounds = LowerBounds(layers, 5, kind).double()
    torch.nn.init.normal_(bounds.gamma)
    return bounds


def test_bounds_are_the_cumulative_sum_of_the_softmax_minus_its_first_row():
    bounds = filled()
    exponentials = bounds.gamma.exp()
    p = exponentials / exponentials.sum(0)
    gamma, expected = torch.zeros(5, dtype=torch.float64), []
    for row in p:
        gamma = gamma + row
        expected.append(gamma - p[0])
    rows = torch.stack([bounds(layer) for layer in range(4)])
    assert_agree(rows, torch.stack(expected))
    # exactly, so that the first layer forgets at will
    assert torch.equal(rows[0], torch.zeros(5, dtype=torch.float64))
    assert (rows.diff(dim=0) > 0).all() and (rows[-1] < 1).all()


def test_decreasing_bounds_are_the_increasing_ones_from_the_last_layer_on():
    up, down = filled(), filled("decreasing")
    for layer in range(4):
        assert torch.equal(down(layer), up(3 - layer))


def test_random_bounds_are_independent_of_each_other():
    bounds = filled("random")
    assert_agree(bounds(2), 1 / (1 + (-bounds.gamma[2]).exp()))
    bounds(2).sum().backward()
    assert bounds.gamma.grad[2].abs().min() > 0
    assert bounds.gamma.grad[[0, 1, 3]].abs().max() == 0


@pytest.mark.parametrize(("kind", "expected"), [("increasing", (0, 1, 2)), ("decreasing", (2, 1, 0))])
def test_bounds_start_at_equal_distances(kind, expected):
    bounds = LowerBounds(3, 2, kind)
    for layer, thirds in enumerate(expected):
        assert_agree(bounds(layer), torch.full((2,), thirds / 3))


def test_random_bounds_start_uniformly():
    torch.manual_seed(0)
    drawn = LowerBounds(1, 4000, "random")(0).sort().values
    # Kolmogorov-Smirnov, p ~ 1e-5
    assert (drawn - (torch.arange(4000) + 0.5) / 4000).abs().max() < 2.5 / 4000**0.5


def test_bounds_near_one_stay_below_one_in_half_precision():
    bounds = LowerBounds(1000, 1).bfloat16()
    assert bounds(999).dtype == torch.float32
    assert_agree(bounds(999), torch.tensor([0.999]))


def test_gamma_is_a_transition_without_weight_decay():
    group = groups_of(LowerBounds(2, 2))["gamma"]
    assert (group.name, group.weight_decay) == ("transition", False)


def test_an_unknown_kind_gives_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'increasing'"):
        LowerBounds(2, 2, "increase")
