"""GRU-D: the paper's equations, for which `test_released` has another form, and initial values."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.gru_d import GRUD
from linrec.testing import assert_agree, generator

D, N, TIME = 6, 3, 12


def make(d_model: int = D, **arguments) -> GRUD:
    torch.manual_seed(0)
    mixer = build("gru_d", d_model, **arguments)
    assert isinstance(mixer, GRUD)
    return mixer


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def decay(weight: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.maximum(torch.zeros(()), weight @ delta + bias))


def by_hand(mixer: GRUD, x: torch.Tensor, dt: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """h of every step, with the times and the values of the last observations found by a search."""
    W, U, b = mixer.W.weight.split(D), mixer.U.weight.split(D), mixer.W.bias.split(D)
    V = mixer.V.weight.split(D) if mixer.missing else None
    rows = []
    for row in range(len(x)):
        h, outputs = torch.zeros(D, dtype=x.dtype), []
        for t in range(x.shape[1]):
            now, delta = x[row, t], dt[row, t : t + 1]
            if mask is not None:
                values, deltas = [], []
                for i in range(N):
                    seen = [s for s in range(t) if mask[row, s, i]]
                    deltas.append(dt[row, seen[-1] + 1 : t + 1].sum() if seen else dt[row, : t + 1].sum())
                    beta = decay(mixer.w_beta[i].reshape(1, 1), deltas[-1].reshape(1), mixer.b_beta[i])
                    last = x[row, seen[-1], i] if seen else mixer.mean[i]
                    imputed = beta[0] * last + (1 - beta[0]) * mixer.mean[i]
                    values.append(now[i] if mask[row, t, i] else imputed)
                now, delta = torch.stack(values), torch.stack(deltas)
            decayed = decay(mixer.gamma.weight, delta, mixer.gamma.bias) * h
            driven = [w @ now + c for w, c in zip(W, b, strict=True)]
            if V is not None:
                driven = [s + v @ mask[row, t] for s, v in zip(driven, V, strict=True)]
            z = torch.sigmoid(driven[0] + U[0] @ decayed)
            r = torch.sigmoid(driven[1] + U[1] @ decayed)
            h = (1 - z) * decayed + z * torch.tanh(driven[2] + U[2] @ (r * decayed))
            outputs.append(h)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("missing", [False, True])
def test_the_layer_and_its_gradients_are_the_papers_equations(missing):
    mixer = make(missing=missing).double()
    if missing:
        mixer.mean.copy_(draw(N, seed=9))
    x = draw(2, TIME, N if missing else D, seed=0).requires_grad_()
    dt = draw(2, TIME, seed=1).exp().requires_grad_()
    mask = (draw(2, TIME, N, seed=2) > 0.3).double() if missing else None
    given = x if mask is None else torch.cat([x, mask], -1)
    ours, theirs = mixer(given, dt=dt)[0], by_hand(mixer, x, dt, mask)
    assert_agree(ours, theirs)
    wanted, cotangent = [x, dt, *mixer.parameters()], draw(2, TIME, D, seed=3)
    assert_agree(torch.autograd.grad(ours, wanted, cotangent), torch.autograd.grad(theirs, wanted, cotangent))


def test_the_state_decays_over_long_gaps():
    mixer = make().double()
    torch.nn.init.constant_(mixer.gamma.weight, 1.0)
    x = draw(2, TIME, D, seed=0)
    _, state = mixer(x)
    dt = torch.full((2, 1), 1e3, dtype=torch.float64)
    assert_agree(mixer(x[:, :1], state, dt=dt)[0], mixer(x[:, :1])[0])


def test_an_unobserved_value_changes_nothing():
    mixer = make(missing=True).double()
    x, mask = draw(2, TIME, N, seed=0), (draw(2, TIME, N, seed=2) > 0).double()
    y, state = mixer(torch.cat([x, mask], -1))
    again, last = mixer(torch.cat([x + 100 * (1 - mask), mask], -1))
    assert_agree((again, last), (y, state))


def test_initial_values():
    mixer = make(200, missing=True)
    for weight in (mixer.W.weight, mixer.V.weight):
        bound = math.sqrt(6 / 700)
        assert 0.99 * bound < weight.abs().max() <= bound
    assert_agree(mixer.U.weight.T @ mixer.U.weight, torch.eye(200))
    assert not mixer.W.bias.any() and not mixer.mean.any()
    assert 0.09 < mixer.gamma.weight.abs().max() <= 0.1
    assert 0.9 < mixer.w_beta.abs().max() <= 1 and 0.9 < mixer.b_beta.abs().max() <= 1
    assert sum(p.numel() for p in make().parameters()) == 3 * D * (2 * D + 1) + 2 * D
    assert sum(p.numel() for p in mixer.parameters()) == 600 * 401 + 200 * 101 + 200
    assert "mean" in mixer.state_dict()


def test_an_odd_width_has_no_room_for_a_mask():
    with pytest.raises(ValueError, match=r"`d_model` must be even with `missing=True`, .*; got 5"):
        make(5, missing=True)
