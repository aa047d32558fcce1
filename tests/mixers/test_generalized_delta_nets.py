"""Mixers on the generalised delta rule against their equations, a head and a step after the other."""

import pytest
import torch
from torch.nn import functional

from linrec import mixers
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 8, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, True, False, False, True]])


def make(name, **arguments):
    torch.manual_seed(0)
    mixer = mixers.build(name, D, **{"conv_size": None} | arguments).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(parameter.numel())).double()
    return mixer


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def heads(mixer, x, *names):
    """SiLU of the projections, by head."""
    return [functional.silu(getattr(mixer, name)(x)).unflatten(-1, (mixer.n_heads, -1)) for name in names]


def log_decay(mixer, x, prefix=""):
    dt = functional.softplus(getattr(mixer, f"{prefix}alpha")(x) + getattr(mixer, f"{prefix}dt_bias"))
    return -getattr(mixer, f"{prefix}A_log").exp()[:, None] * dt.unflatten(-1, (mixer.n_heads, -1))


def run(step, q, k, v, norm):
    """RMSNorm(S^T q) with S_t = step(S_{t-1}, b, t, h), which starts from zeros at resets."""
    y = torch.zeros_like(v)
    for b in range(len(q)):
        for h in range(q.shape[2]):
            S = torch.zeros(q.shape[-1], v.shape[-1], dtype=q.dtype)
            for t in range(TIME):
                S = step(0 * S if RESET[b, t] else S, b, t, h)
                o = S.T @ q[b, t, h]
                y[b, t, h] = o / (o.square().mean() + norm.eps).sqrt() * norm.weight
    return y.flatten(-2)


def inputs():
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


@pytest.mark.parametrize("erase", ["sigmoid", "double_sigmoid"])
def test_gated_delta_net_2(erase):
    mixer, x = make("gated_delta_net_2", n_heads=2, erase=erase), inputs()
    q, k, v = heads(mixer, x, "q", "k", "v")
    q, k, log_alpha = unit(q), unit(k), log_decay(mixer, x)
    b = torch.sigmoid(mixer.b(x)).unflatten(-1, (2, -1)) * (2 if erase == "double_sigmoid" else 1)
    w = torch.sigmoid(mixer.w(x)).unflatten(-1, (2, -1))

    def step(S, *at):
        S = log_alpha[at].exp()[:, None] * S
        return S - torch.outer(k[at], (b[at] * k[at]) @ S) + torch.outer(k[at], w[at] * v[at])

    gate = mixer.gate[1](mixer.gate[0](x))
    expected = mixer.out(torch.sigmoid(gate) * run(step, q, k, v, mixer.norm))
    assert_agree(mixer(x, reset=RESET)[0], expected)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("changed", [{}, {"inner_decay": False}, {"correction": None}])
def test_comba(variant, changed):
    mixer, x = make("comba", n_heads=2, variant=variant, **changed), inputs()
    q, k, v = heads(mixer, x, "q", "k", "v")
    log_alpha, beta = log_decay(mixer, x), torch.sigmoid(mixer.beta(x))
    d = 1 if mixer.d is None else torch.sigmoid(mixer.d)[:, None]
    D = 0 if mixer.D is None else mixer.D[:, None]
    if variant == "paper":
        q, k = unit(q) - D * d * unit(k), unit(k)
        p = d * k
    else:
        q, k = unit(q - D * d * k), unit(k)
        p = k

    def step(S, *at):
        S = log_alpha[at].exp() * S
        return S + beta[at] * torch.outer(k[at], v[at] - p[at] @ S)

    expected = mixer.out(torch.sigmoid(mixer.gate(x)) * run(step, q, k, v, mixer.norm))
    assert_agree(mixer(x, reset=RESET)[0], expected)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_preconditioned_delta_net(decay):
    mixer, x = make("preconditioned_delta_net", n_heads=2, decay=decay, squash=1.7), inputs()
    q, k, v = heads(mixer, x, "q", "k", "v")
    q, k, log_alpha, beta = unit(q), unit(k), log_decay(mixer, x), mixer.beta(x)
    moment_decay, moment_beta = log_decay(mixer, x, "moment_"), torch.sigmoid(mixer.moment_beta(x))
    moments = {}

    def step(S, *at):
        b, t, h = at
        before = 0 if RESET[b, t] else moments.get((b, h), 0)
        moments[b, h] = M = moment_decay[at].exp() * before + moment_beta[at] * k[at].square()
        r = torch.log(M + 1e-6) - mixer.c[h]
        m = 1.7 ** (-r / (1 + r.abs()))
        S = log_alpha[at].exp()[:, None] * S
        return S + beta[at] * torch.outer(m * k[at], v[at] - k[at] @ S)

    gate = functional.silu(mixer.gate(x)) if decay == "head" else torch.sigmoid(mixer.gate(x))
    assert_agree(mixer(x, reset=RESET)[0], mixer.out(gate * run(step, q, k, v, mixer.norm)))


def test_equal_gates_of_erasing_and_writing_are_kimi_delta_attention():
    mixer, kda, x = make("gated_delta_net_2", n_heads=2), make("kda", n_heads=2), inputs()
    with torch.no_grad():
        for name, value in mixer.state_dict().items():
            if name in kda.state_dict():
                kda.state_dict()[name].copy_(value)
        mixer.b.weight.copy_(kda.beta.projection.weight.repeat_interleave(4, 0))
        mixer.w.weight.copy_(kda.beta.projection.weight.repeat_interleave(4, 0))
    assert_agree(mixer(x)[0], kda(x)[0])


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("gated_delta_net_2", {}, {"A_log", "dt_bias"}),
        ("comba", {}, {"A_log", "dt_bias", "D"}),
        (
            "preconditioned_delta_net",
            {},
            {"A_log", "dt_bias", "moment_A_log", "moment_dt_bias", "c"},
        ),
    ],
)
def test_numbers_of_heads_do_not_decay(name, arguments, expected):
    groups = groups_of(make(name, **arguments))
    assert {name for name, group in groups.items() if not group.weight_decay} == expected


def test_initial_numbers():
    torch.manual_seed(0)
    for name, arguments, least in (
        ("gated_delta_net_2", {"n_heads": 400}, 1),
        ("comba", {"n_heads": 300}, 0),
        ("preconditioned_delta_net", {"n_heads": 400}, 0),
        ("preconditioned_delta_net", {"n_heads": 400, "decay": "channel"}, 1),
    ):
        mixer = mixers.build(name, 400, **arguments)
        A = mixer.A_log.exp()
        assert least <= A.min() < least + 0.5 and 15.5 < A.max() <= 16.001
        if mixer.dt_bias.any():
            steps = functional.softplus(mixer.dt_bias)
            assert 0.000999 < steps.min() < 0.002 and 0.09 < steps.max() < 0.1001
        else:
            assert arguments.get("decay") == "channel"
    assert (mixers.build("comba", 8, correction=0.02).D == 0.02).all()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gated_delta_net_2", {"n_heads": 3}, "`d_v` must be a positive multiple of `n_heads` = 3; got 8"),
        ("gated_delta_net_2", {"n_heads": 2, "qk_heads": 4}, "`n_heads`"),
        ("comba", {"n_heads": 2, "d_qk": 3}, "`d_qk` must be a positive multiple of `n_heads` = 2; got 3"),
        ("comba", {"variant": "papers"}, "there is no `variant` 'papers'; did you mean 'paper'"),
        ("preconditioned_delta_net", {"squash": 0.5}, "`squash` must be at least 1; got 0.5"),
        ("preconditioned_delta_net", {"decay": "heads"}, "there is no `decay` 'heads'"),
    ],
)
def test_argument_errors(name, arguments, message):
    with pytest.raises(ValueError) as error:
        mixers.build(name, D, **arguments)
    assert message in str(error.value)
