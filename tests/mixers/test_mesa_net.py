import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 8, 6
RESET = torch.tensor([[False] * TIME, [False, False, False, True, False, False]])


def make(**arguments):
    torch.manual_seed(0)
    return build("mesa_net", D, **{"n_heads": 2, "conv_size": None} | arguments).double()


def inputs():
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def test_the_layer_is_its_equations():
    mixer, x = make(output_gate=True), inputs()
    q, k = (functional.silu(part(x)).unflatten(-1, (2, 4)) for part in (mixer.q, mixer.k))
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    v, gamma, beta = mixer.v(x).unflatten(-1, (2, 4)), mixer.gamma(x).sigmoid(), mixer.beta(x).sigmoid()
    ridge = (torch.log(1 + mixer.ridge.exp()) + 0.25).unflatten(0, (2, 4))
    y = torch.zeros_like(v)
    for b in range(2):
        for h in range(2):
            H, G = torch.zeros(2, 4, 4, dtype=x.dtype)
            for t in range(TIME):
                a = 0 if RESET[b, t] else gamma[b, t, h]
                write = beta[b, t, h] * k[b, t, h]
                H = a * H + torch.outer(write, k[b, t, h])
                G = a * G + torch.outer(write, v[b, t, h])
                o = G.T @ torch.linalg.solve(H + ridge[h].diag(), q[b, t, h])
                y[b, t, h] = o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight
    expected = mixer.out(functional.silu(mixer.gate(x)) * y.flatten(-2))
    assert_agree(mixer(x, reset=RESET)[0], expected)


def test_the_output_is_the_ridge_regression_of_values_on_keys():
    # without decay and norm, with strengths of 1/2 and lambda = 1: minimise |K W - V|^2 / 2 + |W|^2
    mixer, x = make(n_heads=1), inputs()[:1]
    with torch.no_grad():
        for part in (mixer.gamma, mixer.beta):
            part.weight.zero_()
        mixer.gamma.bias.fill_(60.0)
        mixer.beta.bias.zero_()
    seen = []
    mixer.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    mixer(x)
    q, k = (functional.normalize(functional.silu(part(x)), dim=-1)[0] for part in (mixer.q, mixer.k))
    rows = torch.cat([k * 0.5**0.5, torch.eye(D)])
    wanted = torch.cat([mixer.v(x)[0] * 0.5**0.5, torch.zeros(D, D)])
    W = torch.linalg.lstsq(rows, wanted).solution
    assert_agree(seen[0][0, -1, 0], q[-1] @ W)


def test_marks_and_initial_numbers():
    mixer = make()
    assert_agree((functional.softplus(mixer.ridge) + 0.25).float(), torch.ones(D))
    groups = groups_of(mixer)
    marked = {name for name, group in groups.items() if group.name == "transition"}
    assert marked == {"gamma.weight", "gamma.bias"}
    assert "ridge" in {name for name, group in groups.items() if not group.weight_decay}


def test_argument_errors():
    with pytest.raises(ValueError, match="`n_iterations` must be at least 1; got 0"):
        make(n_iterations=0)
