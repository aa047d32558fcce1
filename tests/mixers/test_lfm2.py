import pytest
import torch

from linrec import mixers
from linrec.mixers.lfm2 import LFM2
from linrec.testing import assert_agree, generator


def make(**arguments) -> LFM2:
    torch.manual_seed(0)
    mixer = mixers.build("lfm2", 6, **arguments)
    assert isinstance(mixer, LFM2)
    return mixer.double()


@pytest.mark.parametrize(("size", "bias"), [(3, False), (1, True), (5, True)])
def test_the_layer_is_its_equations(size, bias):
    mixer = make(conv_size=size, bias=bias)
    x = torch.randn(2, 7, 6, generator=generator(), dtype=torch.float64)
    B, C, v = mixer.BCv(x).split(6, dim=-1)
    expected = torch.zeros_like(x)
    for t in range(7):
        for j in range(min(size, t + 1)):
            expected[:, t] += mixer.conv.weight[:, j] * B[:, t - j] * v[:, t - j]
    if bias:
        expected = expected + mixer.conv.bias
    y, tail = mixer(x)
    assert_agree(y, mixer.out(C * expected))
    assert_agree(tail, (B * v)[:, 8 - size :])


def test_token_mixing_is_the_mean_of_what_the_values_are_multiplied_by():
    mixer = make()
    x = torch.randn(2, 7, 6, generator=generator(), dtype=torch.float64)
    B, C, _ = mixer.BCv(x).split(6, dim=-1)
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 4] = True
    expected = torch.zeros(2, 7, 7, dtype=torch.float64)
    for b in range(2):
        for n in range(7):
            for m in range(max(0, n - 2), n + 1):
                if not reset[b, m + 1 : n + 1].any():
                    expected[b, n, m] = (C[b, n] * mixer.conv.weight[:, n - m] * B[b, m]).abs().mean()
    assert_agree(mixer.token_mixing(x, reset=reset), expected)
    assert mixer.transitions(x) is None


def test_parameter_count():
    assert sum(p.numel() for p in make().parameters()) == 3 * 36 + 18 + 36
    assert sum(p.numel() for p in make(bias=True).parameters()) == 3 * 36 + 18 + 18 + 6 + 36 + 6


def test_argument_errors():
    with pytest.raises(
        ValueError, match=r"`conv_size` must be at least 1; got 0\. The released models have 3"
    ):
        make(conv_size=0)
