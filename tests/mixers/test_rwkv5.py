import pytest
import torch

from linrec.mixers import build
from linrec.mixers.rwkv5 import RWKV5
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator
from linrec.trees import leaves

D, TIME = 8, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, True, False, False, True]])
VARIANTS = {
    "paper": {},
    "narrow heads": {"n_heads": 4},
    "no token shift": {"token_shift": False},
    "no bonus": {"bonus": False},
    "no gate": {"output_gate": False},
    "no norm": {"output_norm": False},
}
every_variant = pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
with_resets = pytest.mark.parametrize("reset", [None, RESET], ids=["one sequence", "several"])


def make(d_model: int = D, **arguments) -> RWKV5:
    torch.manual_seed(0)
    mixer = build("rwkv5", d_model, **{"n_heads": 2, "zero_init": False} | arguments)
    assert isinstance(mixer, RWKV5)
    return mixer


def varied(mixer: RWKV5) -> RWKV5:
    """The mixer in float64, its constants off the grids that they start on."""
    mixer, random = mixer.double(), generator(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        mixer.omega.uniform_(-3, 1, generator=random)
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def projected(mixer, x, last, reset):
    """r, k, v, g (b, t, d) by name, by the paper's lerp."""
    before = torch.cat([last[:, None], x[:, :-1]], 1)
    if reset is not None:
        before = torch.where(reset[..., None], 0, before)
    matrices = {"r": mixer.r, "k": mixer.k, "v": mixer.v, "g": mixer.gate}
    found = {}
    for i, (name, matrix) in enumerate(matrices.items()):
        if matrix is not None:
            mixture = x if not mixer.shift.present else x + (before - x) * mixer.shift.mu[i]
            found[name] = mixture @ matrix.weight.T
    return found


def weights(mixer, r, k, reset):
    """(b, t, i, h): what v_i is multiplied by in r_t wkv_t, and what the first state is, from the sums."""
    r, k = (part.unflatten(-1, (mixer.n_heads, -1)) for part in (r, k))
    w = torch.exp(-torch.exp(mixer.omega)).unflatten(0, (mixer.n_heads, -1))
    reset = torch.zeros(2, TIME, dtype=torch.bool) if reset is None else reset
    document = reset.cumsum(1)
    mixing = torch.zeros(2, TIME, TIME, mixer.n_heads, dtype=r.dtype)
    start = torch.zeros_like(r)
    early = 0 if mixer.u is None else 1
    for t in range(TIME):
        start[:, t] = r[:, t] * w ** (t + 1 - early) * (document[:, t] == 0)[:, None, None]
        for i in range(t + 1):
            factor = w ** (t - i - early)
            if i == t:
                factor = torch.ones_like(w) if mixer.u is None else mixer.u.view_as(w)
            seen = (document[:, i] == document[:, t])[:, None]
            mixing[:, t, i] = (r[:, t] * factor * k[:, i]).sum(-1) * seen
    return mixing, start


def expected_output(mixer, x, last, S, reset):
    parts = projected(mixer, x, last, reset)
    mixing, start = weights(mixer, parts["r"], parts["k"], reset)
    v = parts["v"].unflatten(-1, (mixer.n_heads, -1))
    o = torch.einsum("btih,bihd->bthd", mixing, v) + torch.einsum("bthk,bhkd->bthd", start, S)
    o = normed(mixer, o)
    if "g" in parts:
        o = parts["g"] / (1 + torch.exp(-parts["g"])) * o
    return o @ mixer.out.weight.T


def normed(mixer, o):
    if mixer.norm is not None:
        o = o - o.mean(-1, keepdim=True)
        o = o / (o.square().mean(-1, keepdim=True) + 64e-5).sqrt()
        return o.flatten(-2) * mixer.norm.weight + mixer.norm.bias
    return o.flatten(-2)


@with_resets
@every_variant
def test_outputs_and_gradients_are_those_of_the_sums_over_all_steps(arguments, reset):
    mixer, x = varied(make(**arguments)), inputs().requires_grad_()
    random = generator(4)
    last, S = (
        torch.randn(shape, generator=random, dtype=x.dtype).requires_grad_()
        for shape in ((2, D), (2, mixer.n_heads, mixer.d_head, mixer.d_head))
    )
    y, _ = mixer(x, S if not mixer.shift.present else (last, S), reset=reset)
    expected = expected_output(mixer, x, last, S, reset)
    assert_agree(y, expected)
    upstream = torch.randn(y.shape, generator=generator(2), dtype=y.dtype)
    wanted = [x, S, *mixer.parameters()] + ([] if not mixer.shift.present else [last])
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)


def test_the_state_is_the_last_input_and_what_is_left_of_the_outer_products():
    mixer, x = varied(make()), inputs()
    last, S = mixer(x)[1]
    assert_agree(last, x[:, -1])
    parts = projected(mixer, x, torch.zeros(2, D, dtype=x.dtype), None)
    k, v = (parts[name].unflatten(-1, (2, 4)) for name in "kv")
    ages = TIME - 1 - torch.arange(TIME, dtype=x.dtype)
    left = torch.exp(-torch.exp(mixer.omega) * ages[:, None]).unflatten(-1, (2, 4))
    assert_agree(S, torch.einsum("bthk,bthv->bhkv", left * k, v))


@with_resets
@every_variant
def test_token_mixing_is_what_values_are_multiplied_by(arguments, reset):
    mixer, x = varied(make(**arguments)), inputs()
    parts = projected(mixer, x, torch.zeros(2, D, dtype=x.dtype), reset)
    mixing, _ = weights(mixer, parts["r"], parts["k"], reset)
    assert_agree(mixer.token_mixing(x, reset=reset), mixing.abs().mean(-1))


def test_transitions_are_the_decays():
    mixer = varied(make())
    magnitude, phase = mixer.transitions(inputs())
    assert_agree(magnitude, torch.exp(-torch.exp(mixer.omega)))
    assert phase is None


@pytest.mark.parametrize(("layer", "n_layers"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_constants_start_where_the_released_code_has_them(layer, n_layers):
    layers = [make() for _ in range(n_layers)]
    if n_layers > 1:
        RWKV5.share(layers)
    mixer, depth, height = layers[layer], layer / max(1, n_layers - 1), 1 - layer / n_layers
    r, k, v, g = mixer.shift.mu
    for i in range(D):
        assert k[i].item() == pytest.approx(1 - (i / D) ** height)
        assert v[i].item() == pytest.approx(1 - (i / D) ** height - 0.3 * depth, abs=1e-6)
        assert r[i].item() == g[i].item() == pytest.approx(1 - (i / D) ** (height / 2))
        assert mixer.omega[i].item() == pytest.approx(-6 + 5 * (i / (D - 1)) ** (0.7 + 1.3 * depth))
        u = depth * (1 - i / (D - 1)) + (0, 0.1, -0.1)[i % 3]
        assert mixer.u[i].item() == pytest.approx(u, abs=1e-6)
        assert mixer.norm.weight[i].item() == pytest.approx(((layer + 1) / n_layers) ** 0.7)
        assert mixer.norm.bias[i] == 0


def test_matrices_start_orthogonal_and_the_last_one_at_zero():
    mixer = make(zero_init=True)
    for part, gain in ((mixer.r, 1), (mixer.k, 0.1), (mixer.v, 1), (mixer.gate, 0.1), (mixer.out, 0)):
        assert_agree(part.weight @ part.weight.T, gain**2 * torch.eye(D))
    assert_agree(make().out.weight @ make().out.weight.T, torch.eye(D))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # matrices, mu, omega and u, the norm
        ({}, 5 * D * D + 4 * D + 2 * D + 2 * D),
        ({"output_gate": False, "output_norm": False}, 4 * D * D + 3 * D + 2 * D),
        ({"token_shift": False, "bonus": False}, 5 * D * D + D + 2 * D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_only_the_decay_is_marked():
    groups = groups_of(make())
    assert {name for name, group in groups.items() if group.name == "transition"} == {"omega"}
    assert not groups["omega"].weight_decay


def test_heads_are_64_channels_wide_where_the_width_allows_it():
    assert [build("rwkv5", width).n_heads for width in (256, 64, 8, 96)] == [4, 1, 1, 1]


def test_state_size_counts_the_matrices_and_the_last_input():
    assert make().state_size == 2 * 4 * 4 + D
    assert make(token_shift=False).state_size == 2 * 4 * 4
    assert [part.shape for part in leaves(make().init_state(3))] == [(3, D), (3, 2, 4, 4)]


def test_argument_errors():
    with pytest.raises(ValueError, match="`d_model` must be a positive multiple of `n_heads` = 3; got 8"):
        make(n_heads=3)
