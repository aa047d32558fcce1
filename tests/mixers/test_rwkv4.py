import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.rwkv4 import RWKV4, RWKV4State
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, True, False, False, True]])
VARIANTS = {
    "paper": {},
    "wide": {"d_state": 9},
    "no token shift": {"token_shift": False},
    "no bonus": {"bonus": False},
    "no receptance": {"receptance": False},
}
every_variant = pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
with_resets = pytest.mark.parametrize("reset", [None, RESET], ids=["one sequence", "several"])


def make(d_model: int = D, **arguments) -> RWKV4:
    torch.manual_seed(0)
    mixer = build("rwkv4", d_model, **{"zero_init": False} | arguments)
    assert isinstance(mixer, RWKV4)
    return mixer


def varied(mixer: RWKV4, *, key_scale: float = 1.0) -> RWKV4:
    """The mixer in float64, its constants off the grids that they start on."""
    mixer = mixer.double()
    random = generator(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        mixer.log_w.uniform_(-4, 1, generator=random)
        mixer.k.weight *= key_scale
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def shares(mixer, x, reset):
    """Of each value (b, t, i, d_state) in wkv, from the formula that has no recurrence; and r and v."""
    batch, time = x.shape[:2]
    reset = torch.zeros(batch, time, dtype=torch.bool) if reset is None else reset
    before = torch.zeros_like(x)
    for t in range(1, time):
        before[:, t] = torch.where(reset[:, t, None], 0, x[:, t - 1])

    def shifted(mu):
        return x if mu is None else mu * x + (1 - mu) * before

    k, v = shifted(mixer.mu_k) @ mixer.k.weight.T, shifted(mixer.mu_v) @ mixer.v.weight.T
    gate = torch.ones_like(v)
    if mixer.r is not None:
        gate = 1 / (1 + torch.exp(-(shifted(mixer.mu_r) @ mixer.r.weight.T)))
    w, document = mixer.log_w.exp(), reset.cumsum(1)
    rows = []
    for t in range(time):
        ages = t - torch.arange(time, dtype=x.dtype)[:, None]
        if mixer.u is None:
            exponents = k - ages * w
        else:
            exponents = torch.where(ages == 0, mixer.u + k, k - (ages - 1) * w)
        seen = (ages >= 0) & (document == document[:, t : t + 1])[..., None]
        rows.append(exponents.masked_fill(~seen, -torch.inf).softmax(1))
    return torch.stack(rows, 1), gate, v


@with_resets
@pytest.mark.parametrize("key_scale", [1.0, 2000.0])
@every_variant
def test_outputs_and_gradients_are_those_of_the_formula_also_where_exponentials_overflow(
    arguments, key_scale, reset
):
    mixer, x = varied(make(**arguments), key_scale=key_scale), inputs().requires_grad_()
    share, gate, v = shares(mixer, x, reset)
    assert (mixer.k(x).abs().max() > 710) == (key_scale > 1)
    expected = (gate * (share * v[:, None]).sum(2)) @ mixer.out.weight.T
    y, _ = mixer(x, reset=reset)
    assert_agree(y, expected)
    upstream = torch.randn(y.shape, generator=generator(2), dtype=y.dtype)
    wanted = [x, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)


def test_in_float32_a_large_key_of_long_ago_hides_nothing_that_follows():
    mixer = varied(make(token_shift=False))
    x = torch.randn(1, 300, D, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        # outweighed by what follows after 400, 200, .. steps
        x[0, 0] = torch.linalg.solve(mixer.k.weight, torch.full((D,), 200.0, dtype=torch.float64))
        mixer.log_w.copy_(torch.logspace(-1, 1, D, base=2.0).log())
    share, gate, v = shares(mixer, x, None)
    assert (share[0, -1, 0] > 0.99).any() and (share[0, -1, 0] < 0.01).any()
    expected = (gate * (share * v[:, None]).sum(2)) @ mixer.out.weight.T
    with torch.no_grad():
        y, _ = mixer.float()(x.float())
    assert_agree(y, expected)


def test_the_state_is_the_last_input_and_both_sums_over_the_largest_exponential():
    mixer, x = varied(make()), inputs()
    last, sums, largest = mixer(x)[1]
    assert_agree(last, x[:, -1])
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    k = (mixer.mu_k * x + (1 - mixer.mu_k) * before) @ mixer.k.weight.T
    v = (mixer.mu_v * x + (1 - mixer.mu_v) * before) @ mixer.v.weight.T
    exponents = k - (TIME - 1 - torch.arange(TIME, dtype=x.dtype))[:, None] * mixer.log_w.exp()
    assert_agree(largest, exponents.amax(1))
    weight = (exponents - largest[:, None]).exp()
    assert_agree(sums, torch.cat([(weight * v).sum(1), weight.sum(1)], -1))
    for part in (last, sums, largest):
        assert part.untyped_storage().nbytes() <= 2 * part.numel() * part.element_size()
    assert make().state_size == 4 * D
    assert make(d_state=9, token_shift=False).state_size == 27


def test_the_gradient_of_a_state_is_right():
    mixer, x = varied(make()), inputs()
    _, (last, sums, largest) = mixer(x)

    def function(last, sums):
        return mixer(x, RWKV4State(last, sums, largest))[0]

    given = [tensor.detach().requires_grad_() for tensor in (last, sums)]
    assert torch.autograd.gradcheck(function, given, fast_mode=True)


@with_resets
@every_variant
def test_token_mixing_is_what_values_are_multiplied_by(arguments, reset):
    mixer, x = varied(make(**arguments)), inputs()
    share, gate, _ = shares(mixer, x, reset)
    assert_agree(mixer.token_mixing(x, reset=reset), (gate[:, :, None] * share).mean(-1))


def test_transitions_are_the_decays():
    mixer = varied(make())
    magnitude, phase = mixer.transitions(inputs())
    assert_agree(magnitude, torch.exp(-torch.exp(mixer.log_w)))
    assert phase is None


@pytest.mark.parametrize(("layer", "n_layers"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_constants_start_where_the_released_code_has_them(layer, n_layers):
    layers = [make(d_state=9) for _ in range(n_layers)]
    if n_layers > 1:
        RWKV4.share(layers)
    mixer, depth, height = layers[layer], layer / max(1, n_layers - 1), 1 - layer / n_layers
    for i in range(D):
        assert mixer.mu_k[i].item() == pytest.approx((i / D) ** height)
        assert mixer.mu_v[i].item() == pytest.approx((i / D) ** height + 0.3 * depth)
        assert mixer.mu_r[i].item() == pytest.approx((i / D) ** (height / 2))
    for i in range(9):
        assert mixer.log_w[i].item() == pytest.approx(-5 + 8 * (i / 8) ** (0.7 + 1.3 * depth))
        assert mixer.u[i].item() == pytest.approx(math.log(0.3) + (0, 0.5, -0.5)[i % 3])


def test_most_matrices_start_at_zero_and_the_others_are_orthogonal():
    mixer = make(zero_init=True, d_state=2 * D)
    for part in (mixer.r, mixer.k, mixer.out):
        assert not part.weight.any()
    assert_agree(mixer.v.weight.T @ mixer.v.weight, 2 * torch.eye(D))
    for part in (make(d_state=2 * D).r, make(d_state=2 * D).k):
        assert_agree(part.weight.T @ part.weight, 2 * torch.eye(D))
    assert_agree(make().out.weight.T @ make().out.weight, torch.eye(D))
    narrow = make(d_state=2).out.weight
    assert_agree(narrow.T @ narrow, D / 2 * torch.eye(2))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 4 * D * D + 3 * D + 2 * D),
        ({"d_state": 9}, 4 * 9 * D + 3 * D + 2 * 9),
        ({"token_shift": False, "bonus": False}, 4 * D * D + D),
        ({"receptance": False}, 3 * D * D + 2 * D + 2 * D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_only_the_decay_is_marked():
    groups = groups_of(make())
    assert {name for name, group in groups.items() if group.name == "transition"} == {"log_w"}
    assert not groups["log_w"].weight_decay


def test_argument_errors():
    with pytest.raises(ValueError, match="`d_state` must be at least 1; got 0"):
        make(d_state=0)
