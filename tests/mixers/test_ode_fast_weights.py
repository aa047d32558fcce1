"""Continuous fast weights: exact solutions of the learning rules. `test_released` compares their slopes."""

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.ode_fast_weights import OdeFastWeights
from linrec.testing import assert_agree, generator
from tests.tiers import thorough

D, HEADS, N, TIME = 6, 2, 3, 5


def make(d_model: int = D, **arguments) -> OdeFastWeights:
    torch.manual_seed(0)
    mixer = build("ode_fast_weights", d_model, **{"n_heads": HEADS} | arguments)
    assert isinstance(mixer, OdeFastWeights)
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)
    return x, 3 * torch.rand(2, TIME, generator=generator(1), dtype=torch.float64)


def hebb(W, k, v, beta, time):
    return W + time * beta * torch.outer(torch.tanh(v), k.softmax(0))


def delta(W, k, v, beta, time):
    """The error v - W k decays as exp(-beta |k|^2 time)."""
    k, v = k.softmax(0), torch.tanh(v)
    return W + torch.outer(v - W @ k, k) * (1 - torch.exp(-beta * (k @ k) * time)) / (k @ k)


def oja(W, k, v, beta, time):
    """Many short steps of the rule, corrected by one extrapolation of their error."""
    v = torch.tanh(v)

    def euler(n):
        path = W
        for _ in range(n):
            path = path + time / n * beta * torch.outer(v, (k - path.T @ v).softmax(0))
        return path

    return 2 * euler(2000) - euler(1000)


@thorough
@pytest.mark.parametrize(
    ("solution", "arguments"),
    [
        (hebb, {"rule": "hebb", "solver": "euler"}),
        (delta, {"tanh_after": False, "n_steps": 100}),
        (oja, {"rule": "oja", "n_steps": 100}),
    ],
)
def test_the_weights_solve_the_differential_equation_of_the_rule(solution, arguments):
    mixer, (x, dt) = make(**arguments), inputs()
    y, state = mixer(x, dt=dt)
    for row in range(2):
        Ws = [torch.zeros(N, N, dtype=x.dtype) for _ in range(HEADS)]
        for t in range(TIME):
            kvb, q = mixer.kvb(x[row, t]).chunk(HEADS), mixer.q(x[row, t]).chunk(HEADS)
            read = []
            for head in range(HEADS):
                k, v, beta = kvb[head].split([N, N, 1])
                Ws[head] = solution(Ws[head], k, v, torch.sigmoid(beta), dt[row, t])
                read.append(Ws[head] @ q[head].softmax(0))
            torch.testing.assert_close(y[row, t], mixer.out(torch.cat(read)), rtol=1e-6, atol=1e-6)
        last = torch.stack(Ws).flatten(1)
        torch.testing.assert_close(state[row], last, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["hebb", "oja", "delta"])
def test_plain_rules_have_no_tanh_and_no_softmax(rule):
    mixer, (x, dt) = make(rule=rule, plain=True, solver="euler"), inputs()
    y, state = mixer(x, dt=dt)
    for row in range(2):
        Ws = torch.zeros(HEADS, N, N, dtype=x.dtype)
        for t in range(TIME):
            q, beta = mixer.q(x[row, t]).view(HEADS, N), mixer.kvb(x[row, t]).view(HEADS, -1)
            k, v, beta = beta.split([N, N, 1], -1)
            for W, k_h, v_h, strength in zip(Ws, k, v, dt[row, t] * torch.sigmoid(beta), strict=True):
                stored_k, stored_v = W.T @ v_h, W @ k_h
                right = k_h - stored_k if rule == "oja" else k_h
                left = v_h - stored_v if rule == "delta" else v_h
                W += strength * torch.outer(left, right)
            read = torch.cat([W @ q_h for W, q_h in zip(Ws, q, strict=True)])
            assert_agree(y[row, t], mixer.out(read))
        assert_agree(state[row], Ws.flatten(1))


def test_a_held_input_may_be_cut_anywhere():
    x, dt = inputs()
    whole, last = make(n_steps=40)(x, dt=dt)
    parts = torch.stack([0.3 * dt, 0.7 * dt], -1).flatten(1)
    finer, end = make(n_steps=40)(x.repeat_interleave(2, 1), dt=parts)
    torch.testing.assert_close((finer[:, 1::2], end), (whole, last), rtol=1e-6, atol=1e-6)


def test_sizes_and_names():
    assert build("ode_fast_weights", 64).state_size == 4 * 16**2
    assert_agree(make().init_state(2), torch.zeros(2, HEADS, N**2, dtype=torch.float64))
    assert sum(p.numel() for p in make().parameters()) == (2 * D + HEADS + 2 * D) * (D + 1)
    for arguments, message in (
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"rule": "hebbs"}, "no `rule` 'hebbs'; did you mean 'hebb'"),
        ({"solver": "dopri5"}, "no `solver` 'dopri5'"),
        ({"n_steps": 0}, "`n_steps` must be at least 1; got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)
