"""gMLP's start, positions and parameters; `tests/released` has its equations."""

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.gmlp import GMLP
from linrec.testing import assert_agree, generator

D, N, TIME = 6, 12, 9


def make(**arguments) -> GMLP:
    torch.manual_seed(0)
    mixer = build("gmlp", D, **{"d_inner": 8, "max_length": N} | arguments).double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


@torch.no_grad()
def test_positions_behind_the_last_are_gated_by_its_bias_alone():
    mixer, x = make(), inputs(N + 2)
    y, _ = mixer(x)
    z1, _ = functional.gelu(mixer.in_proj(x)).chunk(2, -1)
    assert_agree(y[:, N:], mixer.out(z1 * mixer.b_s[-1])[:, N:])
    assert_agree(y[:, :N], mixer(x[:, :N])[0])


def test_positions_start_again_at_a_reset():
    mixer, x = make(d_attention=3), inputs()
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 4] = True
    y, state = mixer(x, reset=reset)
    assert_agree(y[:, 4:], mixer(x[:, 4:])[0])
    assert state.position[0].tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4]


def test_the_cache_of_the_tiny_attention_holds_no_queries():
    _, state = make(d_attention=3)(inputs())
    for cached in (state.cache.k, state.cache.v):
        assert cached.untyped_storage().nbytes() == cached.nbytes


def test_token_mixing_is_the_matrix_over_time():
    mixer, x = make(), inputs()
    z1, _ = functional.gelu(mixer.in_proj(x)).chunk(2, -1)
    expected = z1.abs().mean(-1)[..., None] * mixer.W_s[:TIME, :TIME].tril().abs()
    assert_agree(mixer.token_mixing(x), expected)


@torch.no_grad()
def test_the_layer_starts_as_an_mlp_of_each_step():
    mixer, x = build("gmlp", D, max_length=N), inputs().float()
    assert mixer.d_inner == 6 * D and float(mixer.W_s.abs().max()) <= 1e-3 / N
    z1, _ = functional.gelu(mixer.in_proj(x)).chunk(2, -1)
    assert (mixer(x)[0] - mixer.out(z1)).abs().max() < 1e-3


def test_parameters_are_those_of_hgrns_table_1():
    """47.83M of 12 layers of width 512 with 2048 channels, tied embeddings of 50,265, and norms."""
    with torch.device("meta"):
        mixer = build("gmlp", 512, d_inner=2048)
    layer = sum(p.numel() for p in mixer.parameters()) + 2 * 512
    assert round((50_265 * 512 + 12 * layer + 2 * 512) / 1e6, 2) == 47.83


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"d_inner": 5}, "`d_inner` must be even, at least 2, to be split; got 5"),
        ({"max_length": 0}, "`max_length` must be at least 1; got 0"),
        ({"d_attention": 0}, "`d_attention` must be at least 1; got 0"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
