import pytest
import torch

from linrec import mixers
from linrec.mixers.base_conv import BaseConv
from linrec.testing import assert_agree, generator


def make(**arguments) -> BaseConv:
    torch.manual_seed(0)
    mixer = mixers.build("base_conv", 6, **arguments)
    assert isinstance(mixer, BaseConv)
    return mixer.double()


@pytest.mark.parametrize(("size", "expand"), [(3, 2), (1, 1), (5, 3)])
def test_the_layer_is_its_equations(size, expand):
    mixer = make(conv_size=size, expand=expand)
    x = torch.randn(2, 7, 6, generator=generator(), dtype=torch.float64)
    u, g = mixer.ug(x).split(6 * expand, dim=-1)
    filtered = torch.zeros_like(u)
    for t in range(7):
        for j in range(min(size, t + 1)):
            filtered[:, t] += mixer.conv.weight[:, j] * u[:, t - j]
    y, tail = mixer(x)
    assert_agree(y, mixer.out(filtered * torch.sigmoid(filtered) * g))
    assert_agree(tail, u[:, 8 - size :])


def test_token_mixing_is_the_mean_of_what_the_filtered_half_is_multiplied_by():
    mixer = make()
    x = torch.randn(2, 7, 6, generator=generator(), dtype=torch.float64)
    u, g = mixer.ug(x).split(12, dim=-1)
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 4] = True
    expected = torch.zeros(2, 7, 7, dtype=torch.float64)
    for b in range(2):
        for n in range(7):
            seen = [m for m in range(max(0, n - 2), n + 1) if not reset[b, m + 1 : n + 1].any()]
            z = sum(mixer.conv.weight[:, n - m] * u[b, m] for m in seen)
            for m in seen:
                expected[b, n, m] = (torch.sigmoid(z) * g[b, n] * mixer.conv.weight[:, n - m]).abs().mean()
    assert_agree(mixer.token_mixing(x, reset=reset), expected)
    assert mixer.transitions(x) is None


def test_parameter_count():
    assert sum(p.numel() for p in make().parameters()) == (6 * 24 + 24) + 12 * 3 + (12 * 6 + 6)
    assert sum(p.numel() for p in make(expand=1, bias=False).parameters()) == 6 * 12 + 6 * 3 + 36


def test_argument_errors():
    with pytest.raises(
        ValueError, match=r"`conv_size` must be at least 1; got 0\. The released models have 3"
    ):
        make(conv_size=0)
    with pytest.raises(ValueError, match=r"`expand` must be at least 1; got 0"):
        make(expand=0)
