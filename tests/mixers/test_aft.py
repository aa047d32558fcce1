import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.aft import AFT
from linrec.testing import assert_agree, check_compile, generator

D, TIME = 6, 7
FULL = {"variant": "full", "max_length": 20, "rank": 100}
VARIANTS = [{}, FULL, FULL | {"max_length": 4}]


def make(d_model: int = D, **arguments) -> AFT:
    torch.manual_seed(0)
    mixer = build("aft", d_model, **arguments)
    assert isinstance(mixer, AFT)
    return mixer


def inputs(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def linear(x, module):
    return x @ module.weight.T + module.bias


def weights(mixer, x, reset=None):
    """exp(K_t') over its sum so far, (b, t, t', d), within the sequences that resets make."""
    k = linear(x, mixer.k)
    w = torch.zeros(TIME, TIME, dtype=torch.float64)
    if mixer.is_full:
        table = mixer.position_q @ mixer.position_k.T
        last = mixer.max_length - 1
        for t in range(TIME):
            for s in range(TIME):
                w[t, s] = table[min(t, last), min(s, last)]
    found = torch.zeros(2, TIME, TIME, D, dtype=torch.float64)
    for b in range(2):
        start = 0
        for t in range(TIME):
            if reset is not None and reset[b, t]:
                start = t
            bias = w[t - start, : t - start + 1, None]
            found[b, t, start : t + 1] = (k[b, start : t + 1] + bias).softmax(0)
    return found


def resets() -> torch.Tensor:
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 3] = reset[1, 1] = reset[1, 2] = True
    return reset


@pytest.mark.parametrize("reset", [None, resets()], ids=["one sequence", "several"])
@pytest.mark.parametrize("scale", [1.0, 2000.0])
@pytest.mark.parametrize("arguments", VARIANTS, ids=["simple", "full", "beyond its positions"])
def test_outputs_are_weighted_means_of_values_also_for_keys_whose_exponential_overflows(
    arguments, scale, reset
):
    mixer, x = make(**arguments).double(), inputs(scale)
    assert (linear(x, mixer.k).abs().max() > 710) == (scale > 1)
    means = torch.einsum("btsd,bsd->btd", weights(mixer, x, reset), linear(x, mixer.v))
    expected = linear(torch.sigmoid(linear(x, mixer.q)) * means, mixer.out)
    assert_agree(mixer(x, reset=reset)[0], expected)


def test_gradients_are_those_of_the_weighted_means():
    mixer = make().double()
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    means = torch.stack(
        [
            torch.einsum(
                "bsd,bsd->bd", linear(y, mixer.k)[:, : t + 1].softmax(1), linear(y, mixer.v)[:, : t + 1]
            )
            for t in range(TIME)
        ],
        1,
    )
    expected = linear(torch.sigmoid(linear(y, mixer.q)) * means, mixer.out)
    mixer(x)[0].square().sum().backward()
    expected.square().sum().backward()
    assert_agree(x.grad, y.grad)


def test_the_state_is_both_sums_over_the_largest_exponential():
    mixer, x = make().double(), inputs()
    k, v = linear(x, mixer.k), linear(x, mixer.v)
    sums, largest = mixer(x)[1]
    assert_agree(largest, k.amax(1))
    weight = (k - k.amax(1, keepdim=True)).exp()
    assert_agree(sums, torch.cat([(weight * v).sum(1), weight.sum(1)], -1))
    assert make().state_size == 3 * D


def test_a_new_sequence_far_below_the_one_before_keeps_its_precision():
    mixer, x = make().float(), inputs().float()
    k = mixer.k.weight.detach().clone()
    x[:, :3] = 200 * torch.linalg.solve(k, torch.ones(D))
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 3] = True
    assert mixer.k(x)[:, 0].min() > 190
    assert_agree(mixer(x, reset=reset)[0][:, 3:], mixer(x[:, 3:])[0])


@pytest.mark.parametrize("reset", [None, resets()], ids=["one sequence", "several"])
@pytest.mark.parametrize("arguments", VARIANTS, ids=["simple", "full", "beyond its positions"])
def test_token_mixing_is_what_values_are_multiplied_by(arguments, reset):
    mixer, x = make(**arguments).double(), inputs()
    expected = torch.sigmoid(linear(x, mixer.q))[:, :, None] * weights(mixer, x, reset)
    assert_agree(mixer.token_mixing(x, reset=reset), expected.mean(-1))
    assert mixer.transitions(x) is None


def test_parameters_are_torchs_linear_layers():
    assert sum(p.numel() for p in make().parameters()) == 4 * (D * D + D)
    assert sum(p.numel() for p in make(bias=False, output_projection=False).parameters()) == 3 * D * D
    full = sum(p.numel() for p in make(variant="full").parameters())
    assert full == 4 * (D * D + D) + 2 * 1024 * 128
    for factor in (make(variant="full").position_q, make(variant="full").position_k):
        assert factor.std().item() == pytest.approx(0.1, rel=0.02)
    for parameter in make(512).parameters():
        assert parameter.std().item() == pytest.approx(1 / math.sqrt(3 * 512), rel=0.1)


def test_full_caches_keys_values_and_positions_which_resets_start_again():
    mixer, x = make(**FULL).double(), inputs()
    _, cache = mixer(x[:, :5], reset=resets()[:, :5])
    assert cache.position.tolist() == [[-1, -1, -1, 0, 1], [-1, -1, 0, 1, 2]]
    seen = (cache.position >= 0)[..., None]
    assert_agree(cache.k, linear(x[:, :5], mixer.k) * seen)
    assert_agree(cache.v, linear(x[:, :5], mixer.v) * seen)
    _, cache = mixer(x[:, 5:], cache, reset=torch.tensor([[False, False], [False, True]]))
    assert cache.position.tolist() == [[-1, -1, -1, 0, 1, 2, 3], [-1, -1, -1, -1, -1, -1, 0]]
    assert mixer.state_size == 2 * D + 1


def test_full_compiles():
    check_compile(make(**FULL), inputs().float(), compiler="aot_eager")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "local"}, "there is no `variant` 'local'; did you mean"),
        ({"max_length": 0}, "`max_length` must be at least 1; got 0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
