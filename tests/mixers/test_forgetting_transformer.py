import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 8, 7


def make(**arguments):
    torch.manual_seed(0)
    return build("forgetting_transformer", D, **{"n_heads": 2} | arguments)


def inputs(dtype=torch.float64, time=TIME):
    return torch.randn(2, time, D, generator=generator(), dtype=dtype)


def by_hand(mixer, x):
    """The equations, with the matrix of sums of log f; in the dtype of x."""
    q, k, v = mixer.q_norm(mixer.q(x)), mixer.k_norm(mixer.k(x)), mixer.v(x)
    q, k, v = (part.unflatten(-1, (2, 4)) for part in (q, k, v))
    F = functional.logsigmoid(mixer.f(x)).cumsum(1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2 + (F[:, :, None] - F[:, None]).permute(0, 3, 1, 2)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    o = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2)
    return mixer.out(o if mixer.gate is None else torch.sigmoid(mixer.gate(x)) * o)


@pytest.mark.parametrize("arguments", [{}, {"qk_norm": True, "output_gate": True, "bias": True}])
def test_the_layer_is_its_equations(arguments):
    mixer = make(**arguments).double()
    assert_agree(mixer(inputs())[0], by_hand(mixer, inputs()))


def test_without_forgetting_it_is_attention():
    mixer = make().double()
    with torch.no_grad():
        mixer.f.weight.zero_()
        mixer.f.bias.fill_(60.0)
    q, k, v = (part(inputs()).unflatten(-1, (2, 4)).transpose(1, 2) for part in (mixer.q, mixer.k, mixer.v))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_agree(mixer(inputs())[0], mixer.out(expected.transpose(1, 2).flatten(-2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_differences_of_long_sums(dtype):
    # F reaches -900; rounded to 8 or 11 bits, differences of neighbours would be off by 2 or 0.25
    mixer, x = make(), inputs(torch.float32, 300)
    with torch.no_grad():
        mixer.f.bias.fill_(-3.0)
        mixer.f.weight.zero_()
    expected = by_hand(mixer, x)
    assert_agree(mixer.to(dtype)(x.to(dtype))[0], expected, dtype=torch.bfloat16)


def test_the_gate_is_marked_and_the_cache_grows_by_what_state_size_says():
    mixer = make()
    marked = {name for name, group in groups_of(mixer).items() if group.name == "transition"}
    assert marked == {"f.weight", "f.bias"}
    for made in (mixer, make().bfloat16()):
        cache = made(inputs(next(made.parameters()).dtype, 3))[1].cache
        assert sum(part.numel() for part in (cache.k, cache.v)) == 2 * 3 * made.state_size


def test_argument_errors():
    with pytest.raises(ValueError, match="`d_model` must be a positive multiple of `n_heads` = 3; got 8"):
        make(n_heads=3)
