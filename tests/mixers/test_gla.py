import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.gla import GLA
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 8, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, False, False, True, False]])


def make(d_model: int = D, **arguments) -> GLA:
    torch.manual_seed(0)
    mixer = build("gla", d_model, **{"n_heads": 2} | arguments)
    assert isinstance(mixer, GLA)
    return mixer


def steep(mixer: GLA) -> GLA:
    """The mixer in float64, with gates that differ between steps and channels more than they do at first."""
    mixer = mixer.double()
    parts = [mixer.q, mixer.k] if mixer.alpha is None else [mixer.q, mixer.k, mixer.alpha]
    with torch.no_grad():
        for part in parts:
            for parameter in part.parameters():
                parameter *= 5
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def low_rank(mixer, x):
    first, second = mixer.alpha
    return x @ first.weight.T @ second.weight.T + second.bias


def sigmoid(z):
    return 1 / (1 + (-z).exp())


def channels(mixer, x_t, head):
    alpha = (sigmoid(low_rank(mixer, x_t)) ** (1 / mixer.tau)).unflatten(-1, (mixer.kv_heads, -1))
    return alpha[:, head // (mixer.n_heads // mixer.kv_heads)]


def clamped(mixer, x_t, head):
    return channels(mixer, x_t, head).clamp(min=math.exp(mixer.clamp_min))


def scalars(mixer, x_t, head):
    return (sigmoid(low_rank(mixer, x_t)) ** (1 / mixer.tau))[:, head, None]


def constants(mixer, x_t, head):
    return torch.tensor([[1 - 2.0 ** (-5 - head)]], dtype=torch.float64)


def ones(mixer, x_t, head):
    return torch.ones(1, 1, dtype=torch.float64)


def layer_norm(o, norm):
    o = o - o.mean(-1, keepdim=True)
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def heads(mixer, x):
    """q, k and v of each head: k and v of a group's heads are the same."""
    parts = [x @ part.weight.T for part in (mixer.q, mixer.k, mixer.v)]
    if mixer.conv.present:
        whole, taps = torch.cat(parts, -1), mixer.conv.weight
        filtered = torch.zeros_like(whole) if mixer.conv.bias is None else mixer.conv.bias.expand(whole.shape)
        for lag in range(taps.shape[1]):
            before = torch.cat([torch.zeros_like(whole[:, :lag]), whole[:, : x.shape[1] - lag]], 1)
            filtered = filtered + taps[:, lag] * before
        parts = (filtered * sigmoid(filtered)).split([part.shape[-1] for part in parts], -1)
    q, k, v = (part.unflatten(-1, (-1, d)) for part, d in zip(parts, widths(mixer), strict=True))
    shared = mixer.n_heads // mixer.kv_heads
    k, v = ([part[:, :, head // shared] for head in range(mixer.n_heads)] for part in (k, v))
    return ([mixer.phi(x) for x in q.unbind(2)], [mixer.phi(x) for x in k], v)


def widths(mixer):
    return mixer.d_key, mixer.d_key, mixer.d_value


def by_hand(mixer, x, state, *, alpha=channels, norm=layer_norm, gate=True):
    """The paper's equations, step by step and head by head in float64."""
    outputs, states = [], []
    for head, (q, k, v) in enumerate(zip(*heads(mixer, x), strict=True)):
        S, o = state[:, head], []
        for t in range(x.shape[1]):
            S = alpha(mixer, x[:, t], head)[..., None] * S + k[:, t, :, None] * v[:, t, None, :]
            o.append((q[:, t, :, None] * S).sum(1))
        outputs.append(norm(torch.stack(o, 1), mixer.norm))
        states.append(S)
    y = torch.cat(outputs, -1)
    if gate:
        z = x @ mixer.gate.weight.T + mixer.gate.bias
        y = z * sigmoid(z) * y
    return y @ mixer.out.weight.T, torch.stack(states, 1)


def rms_norm(o, norm):
    return o / (o.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight


# arguments of each ablation, and what it does to the paper's equations
ABLATIONS = {
    "paper": ({}, {}),
    "other widths": ({"d_qk": 6, "d_v": 4, "gate_rank": 3, "tau": 2.0}, {}),
    "no gate": ({"forget_gate": "none"}, {"alpha": ones}),
    "data-independent scalar decay": ({"forget_gate": "fixed"}, {"alpha": constants}),
    "data-dependent scalar gate": ({"forget_gate": "head"}, {"alpha": scalars}),
    "no output gate": ({"output_gate": False}, {"gate": False}),
    "no norm": ({"output_norm": "none"}, {"norm": lambda o, norm: o}),
    "flash-linear-attention": (
        {
            "n_heads": 4,
            "kv_heads": 2,
            "d_qk": 8,
            "feature_map": "elu",
            "conv_size": 3,
            "conv_bias": True,
            "output_norm": "rms",
            "norm_eps": 1e-3,
        },
        {"norm": rms_norm},
    ),
    "convolution alone": ({"conv_size": 2}, {}),
    "a bound of forgetting": ({"clamp_min": -0.05}, {"alpha": clamped}),
    "released norm": (
        {"output_norm": "rms"},
        {"norm": lambda o, norm: o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight},
    ),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_layer_and_its_ablations_are_the_papers_equations(name):
    arguments, changes = ABLATIONS[name]
    mixer, x = steep(make(**arguments)), inputs().requires_grad_()
    start = mixer.init_state(2)
    shape = (start if not mixer.conv.present else start[1]).shape
    before = torch.randn(shape, generator=generator(1), dtype=x.dtype).requires_grad_()
    y, state = mixer(x, before if not mixer.conv.present else (start[0], before))
    state = state if not mixer.conv.present else state[1]
    expected, expected_state = by_hand(mixer, x, before, **changes)
    assert_agree(y, expected)
    assert_agree(state, expected_state)
    upstream = torch.randn(y.shape, generator=generator(2), dtype=y.dtype)
    wanted = [x, before, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)


@pytest.mark.parametrize(
    ("forget_gate", "alpha"), [("channel", channels), ("head", scalars), ("fixed", constants), ("none", ones)]
)
def test_token_mixing_is_the_mean_over_heads_of_what_values_are_multiplied_by(forget_gate, alpha):
    mixer, x = steep(make(forget_gate=forget_gate)), inputs()
    expected = torch.zeros(2, TIME, TIME, dtype=x.dtype)
    for head, (q, k, _) in enumerate(zip(*heads(mixer, x), strict=True)):
        for n in range(TIME):
            for m in range(n + 1):
                kept = torch.ones_like(k[:, 0])
                for j in range(m + 1, n + 1):
                    kept = kept * alpha(mixer, x[:, j], head)
                expected[:, n, m] += (q[:, n] * kept * k[:, m]).sum(-1).abs() / mixer.n_heads
    assert_agree(mixer.token_mixing(x), expected)
    document = RESET.cumsum(1)
    seen = document[:, :, None] == document[:, None, :]
    assert_agree(mixer.token_mixing(x, reset=RESET), expected * seen)


def test_forgetting_is_slow_when_training_starts():
    magnitude, _ = make(64).transitions(torch.randn(2, 50, 64, generator=generator()))
    # the 16th root of about one half
    assert magnitude.median().item() == pytest.approx(0.5 ** (1 / 16), abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # q and k to D / 2, v, gate with bias and out D x D, the gates of rank 16, a norm of D / 2 channels
        ({}, D * D + 3 * D * D + D + 16 * D + 16 * D // 2 + D // 2 + 2 * D // 2),
        ({"forget_gate": "head"}, D * D + 3 * D * D + D + 16 * D + 16 * 2 + 2 + D),
        ({"forget_gate": "none", "output_gate": False, "output_norm": "none"}, 3 * D * D),
        ({"gate_rank": 1, "output_norm": "rms"}, 4 * D * D + D + D + D // 2 + D // 2 + D // 2),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_initial_distribution_is_that_of_the_released_code():
    for name, parameter in make(256).named_parameters():
        if name.startswith("norm."):
            assert_agree(parameter, torch.full_like(parameter, float(name.endswith("weight"))))
        elif name == "gate.bias":
            assert_agree(parameter, torch.zeros_like(parameter))
        else:
            # weights are uniform in +- gain sqrt(6 / (fan in + fan out)), b_alpha as torch draws it
            bound = (
                2**-2.5 * math.sqrt(6 / sum(parameter.shape)) if parameter.dim() == 2 else 1 / math.sqrt(16)
            )
            assert parameter.abs().max().item() == pytest.approx(bound, rel=0.05), name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1), name


def test_only_the_forget_gate_is_marked():
    groups = groups_of(make())
    marked = {name for name, group in groups.items() if group.name == "transition"}
    assert marked == {"alpha.0.weight", "alpha.1.weight", "alpha.1.bias"}
    assert not any(groups[name].weight_decay for name in marked)


def test_there_are_four_heads_where_the_widths_allow_it():
    assert [build("gla", width).n_heads for width in (1024, 8, 6, 4)] == [4, 4, 1, 2]


def test_state_size_counts_h_dk_dv():
    assert make().state_size == 2 * 2 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`d_qk` must be a positive multiple of `n_heads` = 3; got 4"),
        ({"d_v": 7}, "`d_v` must be a positive multiple of `n_heads` = 2; got 7"),
        ({"gate_rank": 0}, "`gate_rank` must be at least 1; got 0"),
        ({"clamp_min": 0.1}, "`clamp_min` must be a negative number, the least log alpha; got 0.1"),
        ({"kv_heads": 3}, "`kv_heads` must be a positive divisor of `n_heads` = 2; got 3"),
        ({"feature_map": "dpfp"}, "`feature_map` must have a feature for each channel, and no phase"),
        ({"tau": 0.0}, "`tau` must be positive and finite; got 0.0"),
        ({"forget_gate": "chanel"}, "there is no `forget_gate` 'chanel'; did you mean 'channel'"),
        ({"output_norm": "batch"}, "there is no `output_norm` 'batch'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
