import pytest
import torch

from linrec.mixers import build
from linrec.mixers.rwkv6 import RWKV6
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator
from linrec.trees import leaves

D, TIME = 8, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, True, False, False, True]])
VARIANTS = {
    "paper": {},
    "narrow heads": {"n_heads": 4, "shift_rank": 2, "decay_rank": 1},
    "learned token shift": {"token_shift": "learned"},
    "no token shift": {"token_shift": "none"},
    "learned decay": {"decay": "learned"},
    "no bonus": {"bonus": False},
    "no gate": {"output_gate": False},
    "no norm": {"output_norm": False},
}
every_variant = pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
with_resets = pytest.mark.parametrize("reset", [None, RESET], ids=["one sequence", "several"])


def make(d_model: int = D, **arguments) -> RWKV6:
    torch.manual_seed(0)
    mixer = build(
        "rwkv6", d_model, **{"n_heads": 2, "zero_init": False, "shift_rank": 3, "decay_rank": 5} | arguments
    )
    assert isinstance(mixer, RWKV6)
    return mixer


def varied(mixer: RWKV6) -> RWKV6:
    """The mixer in float64, with low-rank projections that matter and constants off their grids."""
    mixer, random = mixer.double(), generator(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        mixer.lambda_d.uniform_(-2, 0.5, generator=random)
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def projected(mixer, x, last, reset):
    """r, k, v, g and the decay w (b, t, d) by name, one token at a time."""
    names = [name for name, there in zip("rkvwg", (1, 1, 1, mixer.d, mixer.gate), strict=True) if there]
    matrices = {"r": mixer.r, "k": mixer.k, "v": mixer.v, "g": mixer.gate}
    rows = {name: [] for name in "rkvwg"}
    for t in range(TIME):
        a = x[:, t]
        b = last if t == 0 else x[:, t - 1]
        if reset is not None:
            b = b * ~reset[:, t, None]
        d = mixer.lambda_d.expand_as(a)
        for i, name in enumerate(names):
            mixture = a
            if mixer.shift.present:
                share = mixer.shift.mu[i]
                if mixer.shift.mu_x is not None:
                    A = mixer.shift.A.weight.unflatten(0, (len(names), -1))[i]
                    share = share + torch.tanh((a + (b - a) * mixer.shift.mu_x) @ A.T) @ mixer.shift.B[i]
                mixture = a + (b - a) * share
            if name == "w":
                d = d + torch.tanh(mixture @ mixer.d[0].weight.T) @ mixer.d[2].weight.T
            else:
                rows[name].append(mixture @ matrices[name].weight.T)
        rows["w"].append(torch.exp(-torch.exp(d)))
    return {name: torch.stack(row, 1) for name, row in rows.items() if row}


def by_hand(mixer, x, last, S, reset):
    """The paper's equations, head by head and step by step; the output, and the last S."""
    parts = projected(mixer, x, last, reset)
    outputs, states = [], []
    for head, channels in enumerate(torch.arange(D).chunk(mixer.n_heads)):
        r, k, v, w = (parts[name][..., channels] for name in "rkvw")
        u = None if mixer.u is None else mixer.u[channels]
        state, row = S[:, head], []
        for t in range(TIME):
            if reset is not None:
                state = state * ~reset[:, t, None, None]
            now = k[:, t, :, None] * v[:, t, None, :]
            wkv = None if u is None else state + u[:, None] * now
            state = w[:, t, :, None] * state + now
            row.append((r[:, t, :, None] * (state if wkv is None else wkv)).sum(1))
        o = torch.stack(row, 1)
        if mixer.norm is not None:
            o = o - o.mean(-1, keepdim=True)
            o = o / (o.square().mean(-1, keepdim=True) + 64e-5).sqrt()
            o = o * mixer.norm.weight[channels] + mixer.norm.bias[channels]
        outputs.append(o)
        states.append(state)
    o = torch.cat(outputs, -1)
    if "g" in parts:
        o = parts["g"] / (1 + torch.exp(-parts["g"])) * o
    return o @ mixer.out.weight.T, torch.stack(states, 1)


@with_resets
@every_variant
def test_outputs_states_and_gradients_are_those_of_the_papers_equations(arguments, reset):
    mixer, x = varied(make(**arguments)), inputs().requires_grad_()
    last, S = (
        torch.randn(shape, generator=generator(4), dtype=x.dtype).requires_grad_()
        for shape in ((2, D), (2, mixer.n_heads, mixer.d_head, mixer.d_head))
    )
    y, state = mixer(x, S if not mixer.shift.present else (last, S), reset=reset)
    expected, left = by_hand(mixer, x, last, S, reset)
    assert_agree(y, expected)
    assert_agree(state, left if not mixer.shift.present else (x[:, -1], left))
    upstream = torch.randn(y.shape, generator=generator(2), dtype=y.dtype)
    wanted = [x, S, *mixer.parameters()] + ([] if not mixer.shift.present else [last])
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)


@with_resets
@every_variant
def test_token_mixing_is_what_values_are_multiplied_by(arguments, reset):
    mixer, x = varied(make(**arguments)), inputs()
    parts = projected(mixer, x, torch.zeros(2, D, dtype=x.dtype), reset)
    r, k, w = (parts[name].unflatten(-1, (mixer.n_heads, -1)) for name in "rkw")
    document = (torch.zeros(2, TIME) if reset is None else reset).cumsum(1)
    expected = torch.zeros(2, TIME, TIME, dtype=x.dtype)
    for n in range(TIME):
        for m in range(n + 1):
            kept = w[:, m + 1 : n + 1 if mixer.u is None else n].prod(1)
            if m == n and mixer.u is not None:
                kept = mixer.u.view_as(w[0, 0])
            seen = (document[:, n] == document[:, m])[:, None]
            expected[:, n, m] = ((r[:, n] * kept * k[:, m]).sum(-1) * seen).abs().mean(-1)
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


@pytest.mark.parametrize("decay", ["data", "learned"])
def test_transitions_are_the_decays(decay):
    mixer, x = varied(make(decay=decay)), inputs()
    w = projected(mixer, x, torch.zeros(2, D, dtype=x.dtype), None)["w"]
    magnitude, phase = mixer.transitions(x)
    assert_agree(magnitude.expand_as(w), w)
    assert magnitude.dim() == (3 if decay == "data" else 1) and phase is None


def test_decays_of_the_input_stay_in_float32():
    mixer, x = varied(make(token_shift="learned")), inputs()
    expected = mixer.transitions(x).magnitude
    mixer = mixer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mixer.transitions(x.float()).magnitude
    assert found.dtype == torch.float32
    assert_agree(found, expected)


@pytest.mark.parametrize(("layer", "n_layers"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_constants_start_where_the_released_code_has_them(layer, n_layers):
    layers = [make() for _ in range(n_layers)]
    if n_layers > 1:
        RWKV6.share(layers)
    mixer, depth, height = layers[layer], layer / max(1, n_layers - 1), 1 - layer / n_layers
    r, k, v, w, g = mixer.shift.mu
    for i in range(D):
        assert k[i].item() == w[i].item() == mixer.shift.mu_x[i].item()
        assert k[i].item() == pytest.approx(1 - (i / D) ** height)
        assert v[i].item() == pytest.approx(1 - (i / D) ** height - 0.3 * depth, abs=1e-6)
        assert r[i].item() == g[i].item() == pytest.approx(1 - (i / D) ** (height / 2))
        assert mixer.lambda_d[i].item() == pytest.approx(-6 + 5 * (i / (D - 1)) ** (0.7 + 1.3 * depth))
        u = depth * (1 - i / (D - 1)) + (0, 0.1, -0.1)[i % 3]
        assert mixer.u[i].item() == pytest.approx(u, abs=1e-6)
        assert mixer.norm.weight[i].item() == pytest.approx(((layer + 1) / n_layers) ** 0.7)
        assert mixer.norm.bias[i] == 0


def test_matrices_start_orthogonal_the_last_one_at_zero_and_low_ranks_near_it():
    mixer = make(64, zero_init=True, n_heads=1, shift_rank=32, decay_rank=64)
    for part, gain in ((mixer.r, 1), (mixer.k, 0.1), (mixer.v, 1), (mixer.gate, 0.1), (mixer.out, 0)):
        assert_agree(part.weight @ part.weight.T, gain**2 * torch.eye(64))
    for A in (mixer.shift.A, mixer.d[0]):
        assert not A.weight.any()
    for B in (mixer.shift.B, mixer.d[2].weight):
        assert 0.0099 < B.abs().max().item() <= 0.01
        assert B.std().item() == pytest.approx(0.01 / 3**0.5, rel=0.03)
    assert_agree(make().out.weight @ make().out.weight.T, torch.eye(D))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # matrices, mu with mu_x and two matrices of rank 3, lambda_d and two of rank 5, u, the norm
        ({}, 5 * D * D + 6 * D + 5 * 3 * D * 2 + D + 5 * D * 2 + D + 2 * D),
        ({"token_shift": "learned", "output_norm": False}, 5 * D * D + 5 * D + D + 5 * D * 2 + D),
        ({"token_shift": "none", "decay": "learned", "output_gate": False}, 4 * D * D + D + D + 2 * D),
        ({"decay": "learned", "bonus": False}, 5 * D * D + 5 * D + 4 * 3 * D * 2 + D + 2 * D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_the_decay_is_marked_and_low_ranks_do_not_decay():
    groups = groups_of(make())
    marked = {name for name, group in groups.items() if group.name == "transition"}
    assert marked == {"lambda_d", "d.0.weight", "d.2.weight"}
    kept = {name for name, group in groups.items() if not group.weight_decay}
    assert kept == marked | {"shift.A.weight", "shift.B"}


def test_the_defaults_are_the_papers_sizes():
    mixer = build("rwkv6", 128)
    assert mixer.n_heads == 2 and mixer.shift.B.shape == (5, 32, 128) and mixer.d[0].weight.shape == (64, 128)


def test_state_size_counts_the_matrices_and_the_last_input():
    assert make().state_size == 2 * 4 * 4 + D
    assert make(token_shift="none").state_size == 2 * 4 * 4
    assert [part.shape for part in leaves(make().init_state(3))] == [(3, D), (3, 2, 4, 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
        ({"token_shift": "date"}, "there is no `token_shift` 'date'; did you mean 'data'"),
        ({"decay": "learnt"}, "there is no `decay` 'learnt'; did you mean 'learned'"),
        ({"shift_rank": 0}, "`shift_rank` must be at least 1; got 0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
