import pytest
import torch

from linrec.mixers import build
from linrec.mixers.attention import Attention
from linrec.mixers.falcon_h1 import FalconH1
from linrec.mixers.mamba2 import Mamba2
from linrec.testing import assert_agree, generator, reset_mask

D, TIME = 8, 7
ATTENTION = {"n_heads": 4, "kv_heads": 2, "d_head": 6, "rotary_base": 1e11}
MAMBA2 = {"d_inner": 12, "n_heads": 3, "d_state": 4, "output_norm": "none"}


def make(**arguments) -> FalconH1:
    torch.manual_seed(0)
    mixer = build("falcon_h1", D, **{"attention": ATTENTION, "mamba2": MAMBA2} | arguments)
    assert isinstance(mixer, FalconH1)
    return mixer.double()


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def test_the_output_is_the_sum_of_both_layers():
    mixer, x, reset = make(), inputs(), reset_mask(2, TIME)
    parts = Attention(D, **ATTENTION).double(), Mamba2(D, **MAMBA2).double()
    for name, part in zip(("attention", "mamba2"), parts, strict=True):
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in mixer.state_dict().items() if prefix in key}
        part.load_state_dict(own)
    y, states = mixer(x, reset=reset)
    expected = [part(x, reset=reset) for part in parts]
    assert_agree(y, expected[0][0] + expected[1][0], "outputs")
    assert_agree(states, (expected[0][1], expected[1][1]), "states")


def test_without_arguments_both_layers_have_their_defaults():
    mixer = FalconH1(128)
    assert (mixer.attention.n_heads, mixer.mamba2.n_heads, mixer.mamba2.phi.d_head) == (2, 4, 128)


def test_parameter_counts():
    # q, k, v and the output; z, X, B and C; dt; taps and their biases; A_log, dt's bias and D; the output
    attention = (24 + 12 + 12 + 24) * D
    mamba2 = (2 * 12 + 2 * 4) * D + 3 * D + (12 + 2 * 4) * 5 + 9 + 12 * D
    assert sum(parameter.numel() for parameter in make().parameters()) == attention + mamba2


def test_inspection_shows_mamba2():
    mixer, x, reset = make(), inputs(), reset_mask(2, TIME)
    assert_agree(mixer.transitions(x).magnitude, mixer.mamba2.transitions(x).magnitude)
    expected = mixer.mamba2.token_mixing(x, reset=reset)
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"attention": {"causal": False}}, ValueError, "`attention` must be causal beside Mamba-2"),
        ({"attention": {"n_heads": 3}}, ValueError, "`d_model` must be a positive multiple of `n_heads` = 3"),
        ({"mamba2": {"d_state": 0}}, ValueError, "`d_state` must be at least 1; got 0"),
        ({"mamba2": {"heads_": 2}}, TypeError, "heads_"),
    ],
)
def test_what_does_not_fit_is_named(arguments, error, message):
    with pytest.raises(error) as raised:
        FalconH1(D, **arguments)
    assert message in str(raised.value)
