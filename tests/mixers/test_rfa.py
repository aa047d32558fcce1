import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.rfa import RFA
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> RFA:
    torch.manual_seed(0)
    mixer = build("rfa", d_model, **arguments)
    assert isinstance(mixer, RFA)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def linear(x, module):
    return x @ module.weight.T + module.bias


def features(x, w, sigma):
    """phi of one head's unit vectors, in directions scaled by sigma."""
    angle = (x / (x.norm(dim=-1, keepdim=True) + 1e-3)) @ (w * sigma).T
    return torch.cat([angle.sin(), angle.cos()], -1) / math.sqrt(len(w))


def by_hand(mixer, x, phi):
    """The gated recurrence head by head, step by step; also the states and the denominators."""
    outputs, states, sums = [], [], []
    for h in range(mixer.n_heads):
        part = slice(h * mixer.d_head, (h + 1) * mixer.d_head)
        q, k, v = (linear(x, module)[..., part] for module in (mixer.q, mixer.k, mixer.v))
        g = torch.ones(2, TIME) if mixer.gate is None else torch.sigmoid(linear(x, mixer.gate)[..., h])
        s = torch.zeros(2, mixer.phi.d_features, mixer.d_head, dtype=torch.float64)
        z, head = torch.zeros(2, mixer.phi.d_features, dtype=torch.float64), []
        for t in range(TIME):
            keep = g[:, t, None]
            enter = 1 - keep if mixer.gate is not None else torch.ones(2, 1)
            key = phi(k[:, t], h)
            s = keep[..., None] * s + enter[..., None] * key[..., None] * v[:, t, None]
            z = keep * z + enter * key
            query = phi(q[:, t], h)
            total = (query * z).sum(-1, keepdim=True)
            sums.append(total)
            head.append((query[:, None] @ s)[:, 0] / total.abs().clamp(min=mixer.floor))
        outputs.append(torch.stack(head, 1))
        states.append(torch.cat([s, z[..., None]], -1))
    return linear(torch.cat(outputs, -1), mixer.out), torch.stack(states, 1), torch.cat(sums)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"n_heads": 2, "n_features": 5},
        {"gate": False},
        {"orthogonal": True, "floor": 0.5},
        {"n_heads": 2, "tau": 0.7},
    ],
    ids=["paper", "heads", "no gate", "larger floor", "temperature"],
)
def test_outputs_and_state_are_the_equations(arguments):
    mixer, x = make(**arguments).double(), inputs()
    with torch.no_grad():
        mixer.phi.sigma.uniform_(0.5, 1.5, generator=generator(3))
    w, sigma = mixer.phi.projection, mixer.phi.sigma / arguments.get("tau", 1.0)
    y, state, sums = by_hand(mixer, x, lambda x, h: features(x, w[h], sigma[h]))
    if "floor" in arguments:
        assert (sums.abs() < 0.5).any() and (sums.abs() > 0.5).any()
    assert_agree(mixer(x)[0], y)
    assert_agree(mixer(x)[1], state)


def test_arccos_has_rectified_features():
    mixer, x = make(feature_map="arc_cosine", n_features=4).double(), inputs()
    w = mixer.phi.projection[0]
    y, state, _ = by_hand(mixer, x, lambda x, h: (x @ w.T).clamp(min=0) / 2)
    assert_agree(mixer(x)[0], y)
    assert_agree(mixer(x)[1], state)


def test_weights_come_from_the_gaussian_kernel_when_directions_are_many():
    mixer, x = make(n_features=8192, gate=False).double(), inputs()
    q, k = (linear(x, module) for module in (mixer.q, mixer.k))
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    weights = (-(q[:, :, None] - k[:, None]).square().sum(-1) / 2).exp().tril()
    expected = weights / weights.sum(-1, keepdim=True)
    found = mixer.token_mixing(x)
    assert 0 < (found - expected).abs().max() < 0.03


def test_token_mixing_is_what_values_are_multiplied_by():
    mixer, x = make(n_heads=2, n_features=5).double(), inputs()
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[1, 3] = True
    expected = torch.zeros(2, TIME, TIME, dtype=torch.float64)
    with torch.no_grad():
        mixer.out.weight.copy_(torch.eye(D))
        mixer.out.bias.zero_()
    for m in range(TIME):
        values = torch.zeros_like(x)
        values[:, m] = 1
        # values that are 1 at step m alone, in every channel
        hook = mixer.v.register_forward_hook(lambda *_, values=values: values)
        expected[:, :, m] = mixer(x, reset=reset)[0].abs().mean(-1)
        hook.remove()
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_gates_are_the_transitions_of_all_features_of_a_head():
    mixer, x = make(n_heads=2, n_features=5).double(), inputs()
    magnitude, phase = mixer.transitions(x)
    assert phase is None
    assert_agree(magnitude, torch.sigmoid(linear(x, mixer.gate)).repeat_interleave(10, -1))
    one, other = (torch.randn(2, 2, 10, 4, generator=generator(s), dtype=torch.float64) for s in (1, 2))
    left, right = (mixer(x[:, :1], state)[1] for state in (one, other))
    assert_agree(left - right, (one - other) * magnitude[:, 0].reshape(2, 2, 10, 1))
    assert make(gate=False).double().transitions(x) is None


def test_parameters_are_four_projections_a_gate_per_head_and_sigma():
    projections = 4 * (D * D + D)
    for arguments, expected in [
        ({}, projections + D + 1 + D),
        ({"n_heads": 2}, projections + 2 * D + 2 + D),
        ({"gate": False}, projections + D),
        ({"learn_sigma": False}, projections + D + 1),
        ({"feature_map": "arc_cosine", "bias": False}, 4 * D * D + D + 1),
    ]:
        assert sum(p.numel() for p in make(**arguments).parameters()) == expected
    assert_agree(make(n_heads=2).phi.sigma, torch.ones(2, 3))


def test_projections_start_as_in_the_released_code_if_told():
    mixer = make(512, init="released")
    for linear in (mixer.q, mixer.k, mixer.v, mixer.out):
        # the bound of Xavier's rule, times 1 / sqrt(2)
        bound = math.sqrt(6 / 1024) / math.sqrt(2)
        assert bound * 0.999 < linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert (mixer.out.bias == 0).all() and (mixer.q.bias != 0).any()
    assert make(512).q.weight.abs().max() <= 1 / math.sqrt(512)


def test_only_the_gate_is_a_transition_and_sigma_does_not_decay():
    groups = groups_of(make())
    assert {name for name, group in groups.items() if group.name == "transition"} == {
        "gate.weight",
        "gate.bias",
    }
    assert {name for name, group in groups.items() if not group.weight_decay} == {
        "gate.weight",
        "gate.bias",
        "phi.sigma",
    }


def test_each_head_has_directions_of_its_own_which_can_be_redrawn():
    mixer, x = make(n_heads=2), inputs().float()
    assert not torch.equal(mixer.phi.projection[0], mixer.phi.projection[1])
    before, _ = mixer(x)
    mixer.phi.redraw(generator(1))
    assert not torch.equal(mixer(x)[0], before)


def test_a_gate_that_is_nearly_one_writes_with_what_is_left():
    mixer = make()
    with torch.no_grad():
        mixer.gate.weight.zero_()
        mixer.gate.bias.fill_(30.0)
    _, state = mixer(inputs(1).float())
    k = mixer.phi(mixer.k(inputs(1).float()).unflatten(-1, (1, D)))
    # beside one, no tolerance would see it
    assert_agree(state[..., -1] * math.exp(30), k[:, 0])


def test_the_defaults_are_the_papers():
    assert [make(width).n_heads for width in (6, 64, 128, 192)] == [1, 1, 2, 3]
    assert make().floor == 0.01
    assert make().phi.tau == 1
    # directions are independent, hence not orthogonal
    w = make().phi.projection[0]
    assert (w @ w.T).triu(1).abs().max() > 0.5


def test_a_sequence_of_64_directions_starts_with_its_first_value():
    torch.manual_seed(0)
    x = torch.randn(64, 1, 64)
    mixer = make(64)
    expected = mixer.out(mixer.v(x))
    # the only weight is divided by itself, unless the floor bounds it
    assert_agree(mixer(x)[0], expected)
    mixer.floor = 0.1
    assert ((mixer(x)[0] - expected).abs().amax(-1) > 1e-3).any()


def test_state_size_counts_both_sums():
    assert make(n_heads=2, n_features=5).state_size == 2 * 10 * 4
    assert make(feature_map="arc_cosine").state_size == D * (D + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"feature_map": "arccos"}, "there is no `feature_map` 'arccos'; did you mean 'arc_cosine'"),
        ({"n_features": 0}, "`n_features` and `n_heads` must be at least 1; got 0 and 1"),
        ({"init": "release"}, "there is no `init` 'release'; did you mean 'released'"),
        ({"floor": -1.0}, "`floor` must be positive and finite; got -1.0"),
        ({"tau": 0.5, "feature_map": "arc_cosine"}, "`tau` is the temperature of the kernel"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
