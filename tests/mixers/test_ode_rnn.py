"""ODE-RNN: the paper's equations with any solver, and initial values."""

import sys

import pytest
import torch

from linrec.errors import MissingExtraError
from linrec.mixers import build
from linrec.mixers.ode_rnn import OdeRNN
from linrec.testing import assert_agree, generator
from tests.tiers import thorough, tiered

D, TIME = 5, 4


def make(d_model: int = D, **arguments) -> OdeRNN:
    torch.manual_seed(0)
    mixer = build("ode_rnn", d_model, **{"d_hidden": 7} | arguments)
    assert isinstance(mixer, OdeRNN)
    return mixer


def spread(mixer: OdeRNN) -> OdeRNN:
    """In float64, with weights that bend the path."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)
    return x, torch.rand(2, TIME, generator=generator(1), dtype=torch.float64) + 0.1


def by_hand(mixer: OdeRNN, x: torch.Tensor, dt: torch.Tensor, n_steps: int) -> torch.Tensor:
    """h of every step; the path is followed by Runge and Kutta's 3/8 method of order four."""

    def f(h):
        drive = 0 if mixer.inputs == "gru" else mixer.W.weight @ x[row, t]
        for layer in mixer.f[:-1]:
            h, drive = torch.tanh(layer(h) + drive), 0
        return mixer.f[-1](h)

    rows = []
    for row in range(2):
        h, outputs = torch.zeros(D, dtype=x.dtype), []
        for t in range(TIME):
            step = dt[row, t] / n_steps
            for _ in range(n_steps):
                k1 = f(h)
                k2 = f(h + step / 3 * k1)
                k3 = f(h + step * (k2 - k1 / 3))
                k4 = f(h + step * (k1 - k2 + k3))
                h = h + step / 8 * (k1 + 3 * k2 + 3 * k3 + k4)
            if mixer.inputs == "gru":
                u, r, n = mixer.W(x[row, t]).chunk(3)
                U_u, U_r, U_n = mixer.U.weight.chunk(3)
                u, r = torch.sigmoid(u + U_u @ h), torch.sigmoid(r + U_r @ h)
                h = u * h + (1 - u) * torch.tanh(n + U_n @ (r * h))
            outputs.append(h)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("inputs_to", ["gru", "field"])
@pytest.mark.parametrize("solver", tiered(["rk4"], ["dopri8", "adjoint"]))
def test_the_layer_and_its_gradients_are_the_papers_equations(solver, inputs_to):
    if solver != "rk4":
        pytest.importorskip("torchdiffeq", reason="needs torchdiffeq: pip install 'linrec[ode]'")
    adjoint, solver = solver == "adjoint", "dopri8" if solver == "adjoint" else solver
    options = {"rtol": 1e-9, "atol": 1e-10, "adjoint": adjoint, "inputs": inputs_to}
    mixer = spread(make(solver=solver, n_steps=30, **options))
    x, dt = (tensor.requires_grad_() for tensor in inputs())
    ours, theirs = mixer(x, dt=dt)[0], by_hand(mixer, x, dt, 30)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)
    wanted = [x, dt, *mixer.parameters()]
    found, expected = (torch.autograd.grad(y.square().sum(), wanted) for y in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_adjoint_equation_stores_no_states_within_a_step():
    pytest.importorskip("torchdiffeq", reason="needs torchdiffeq: pip install 'linrec[ode]'")
    x, dt = inputs()
    stored = []
    for adjoint in (False, True):
        mixer, kept = spread(make(solver="dopri5", inputs="field", adjoint=adjoint)), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            mixer(x, dt=dt)
        stored.append(sum(tensor.numel() for tensor in kept))
    assert stored[1] < stored[0] / 5


def test_an_adaptive_solver_streams():
    pytest.importorskip("torchdiffeq", reason="needs torchdiffeq: pip install 'linrec[ode]'")
    mixer = spread(make(solver="dopri5", rtol=1e-10, atol=1e-10))
    x, dt = inputs()
    y, last = mixer(x, dt=dt)
    first, state = mixer(x[:, :3], dt=dt[:, :3])
    second, state = mixer(x[:, 3:], state, dt=dt[:, 3:])
    assert_agree((torch.cat([first, second], 1), state), (y, last))


@thorough
def test_more_steps_of_euler_come_nearer():
    x, dt = inputs()
    expected = by_hand(spread(make()), x, dt, 60)
    errors = [
        float((spread(make(n_steps=n_steps))(x, dt=dt)[0] - expected).detach().abs().max())
        for n_steps in (1, 10, 100)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]


def test_initial_values():
    mixer = make(300, d_hidden=200, n_layers=3)
    assert [tuple(layer.weight.shape) for layer in mixer.f] == [
        (200, 300),
        (200, 200),
        (200, 200),
        (300, 200),
    ]
    for layer in (*mixer.f, mixer.W, mixer.U):
        assert layer.weight.std().item() == pytest.approx(0.1, rel=0.02)
        assert layer.bias is None or not layer.bias.any()
    field = 7 * (D + 1) + 7 * 8 + D * 8
    assert sum(p.numel() for p in make().parameters()) == field + 3 * D * (2 * D + 1)
    assert sum(p.numel() for p in make(inputs="field").parameters()) == field + 7 * D


def test_what_cannot_run_is_refused(monkeypatch):
    for arguments, message in (
        ({"solver": "dopri6"}, "no `solver` 'dopri6'; did you mean 'dopri"),
        ({"n_steps": 0}, "`n_steps` must be at least 1; got 0"),
        ({"n_layers": 0}, "`n_layers` must be at least 1; got 0"),
        ({"atol": 0.0}, "`atol` must be positive and finite; got 0"),
        ({"inputs": "fields"}, "did you mean 'field'"),
        ({"adjoint": True}, "`adjoint` needs an adaptive solver, .*; got 'euler'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)
    monkeypatch.setattr("linrec.mixers.ode_rnn.check_extra", lambda *about: None)
    with pytest.raises(
        ValueError, match=r"`mode` must be .* with the adaptive solver 'dopri5'; got 'newton'"
    ):
        make(solver="dopri5", mode="newton")


def test_an_adaptive_solver_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(MissingExtraError, match=r"`solver=\"dopri5\"` needs .*'torchdiffeq'.*linrec\[ode\]"):
        make(solver="dopri5")
