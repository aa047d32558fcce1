import math

import pytest
import torch

from linrec.nn import groups_of
from linrec.nn.positions import BucketBias
from linrec.nn.state_gates import StateGate
from linrec.testing import assert_agree


def build(kind, *, tanh=False):
    torch.manual_seed(0)
    return StateGate(4, 3, kind, tanh=tanh).double()


S, H = (torch.randn(2, 5, d, dtype=torch.float64) for d in (3, 4))


@pytest.mark.parametrize("tanh", [False, True])
def test_gates_are_the_papers(tanh):
    fixed, full, lstm = (build(kind, tanh=tanh) for kind in ("fixed", "full", "lstm"))

    def z(gate):
        z = H @ gate.z.weight.T + gate.z.bias
        return z.tanh() if tanh else z

    g = 1 / (1 + torch.exp(-fixed.bias))
    assert_agree(fixed(S, H), g * S + (1 - g) * z(fixed))
    g = 1 / (1 + torch.exp(-(H @ full.gates.weight.T + full.gates.bias + 1)))
    assert_agree(full(S, H), g * S + (1 - g) * z(full))
    logits = H @ lstm.gates.weight.T + lstm.gates.bias
    f, i = 1 / (1 + torch.exp(-logits[..., :3] - 1)), 1 / (1 + torch.exp(-logits[..., 3:] + 1))
    assert_agree(lstm(S, H), f * S + i * z(lstm))


def test_initial_values_are_the_released_ones():
    torch.manual_seed(0)
    gate = StateGate(400, 1000, "lstm")
    # jax divides by the 0.88 that cutting at two standard deviations leaves
    assert gate.gates.weight.abs().max() <= 2 * math.sqrt(0.1 / 400) / 0.8796
    assert abs(gate.gates.weight.std() / math.sqrt(0.1 / 400) - 1) < 0.01
    assert abs(gate.gates.bias.std() / 0.1 - 1) < 0.05
    assert abs(StateGate(4, 10_000, "fixed").bias.std() / 0.1 - 1) < 0.05


def test_gates_are_transitions_without_weight_decay():
    groups = groups_of(build("full"))
    assert {name for name, group in groups.items() if group.name == "transition"} == {
        "gates.weight",
        "gates.bias",
    }


@pytest.mark.parametrize("options", [{"buckets": 1}, {"buckets": 32, "max_distance": 16}])
def test_buckets_that_do_not_exist_are_refused(options):
    with pytest.raises(ValueError, match="must be at least"):
        BucketBias(2, **options)


def test_buckets_of_distances_are_those_of_t5():
    """Worked by hand: 16 + 16 log(n / 16) / log(8), rounded down, from 16 on."""
    bias = BucketBias(2).double()
    buckets = bias.bucket(torch.arange(300))
    edges = (buckets.diff().nonzero().flatten() + 1).tolist()
    expected = [math.ceil(16 * 8 ** (j / 16) - 1e-9) for j in range(1, 16)]
    assert edges == [*range(1, 17), *expected]
    assert bias(0, 5).shape == (1, 2, 0, 5)
    scores = bias(3, 5)
    assert scores.shape == (1, 2, 3, 5)
    for i in range(3):
        for j in range(5):
            assert torch.equal(scores[0, :, i, j], bias.w[:, max(0, i + 2 - j)])
