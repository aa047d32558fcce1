import pytest
import torch

from linrec.mixers import build
from linrec.testing import assert_agree, generator

D = 5


def inputs() -> torch.Tensor:
    return torch.randn(2, 9, D, generator=generator(), dtype=torch.float64)


@pytest.mark.parametrize("mu", [0.0, 0.6])
def test_state_units_sum_the_outputs_of_the_past(mu):
    torch.manual_seed(0)
    mixer = build("jordan", D, d_hidden=7, mu=mu, output_activation="sigmoid").double()
    W, U, C = mixer.W, mixer.U, mixer.C
    outputs = []
    for x in inputs().unbind(1):
        s = sum((mu**age * y for age, y in enumerate(reversed(outputs))), torch.zeros(2, D).double())
        h = torch.tanh(x @ W.weight.T + W.bias + s @ U.weight.T)
        outputs.append(torch.sigmoid(h @ C.weight.T + C.bias))
    y, state = mixer(inputs())
    assert_agree(y, torch.stack(outputs, 1))
    assert_agree(state, torch.cat([outputs[-1], s], -1))


def test_the_past_is_seen_through_outputs_alone():
    """Without an output, the network forgets its hidden units."""
    mixer = build("jordan", D, d_hidden=7).double()
    torch.nn.init.zeros_(mixer.C.weight)
    x = inputs()
    y, _ = mixer(x)
    assert_agree(y, torch.tanh(mixer.C.bias).expand_as(y))


def test_parameter_count():
    assert sum(p.numel() for p in build("jordan", D, d_hidden=7).parameters()) == 2 * D * 7 + 7 + 7 * D + D


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mu": 1.0}, r"`mu` must be in \[0, 1\); got 1.0"),
        ({"d_hidden": 0}, "`d_hidden` must be at least 1; got 0"),
        ({"activation": "tan"}, "did you mean 'tanh'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("jordan", D, **arguments)
