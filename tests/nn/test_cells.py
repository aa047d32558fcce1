"""Solvers of differential equations, against exact solutions."""

import math
import sys

import pytest
import torch

from linrec.errors import MissingExtraError
from linrec.nn.cells import ADAPTIVE, SOLVERS, solve
from linrec.testing import assert_agree

TIME = torch.tensor([[0.5], [1.0], [-0.7]], dtype=torch.float64)


def pendulum(h: torch.Tensor) -> torch.Tensor:
    """theta'' = -sin(theta)"""
    return torch.stack([h[:, 1], -torch.sin(h[:, 0])], -1)


def logistic(h: torch.Tensor) -> torch.Tensor:
    return h * (1 - h)


def error(solver: str, n_steps: int) -> float:
    h = torch.tensor([[0.2], [0.6], [0.9]], dtype=torch.float64)
    expected = 1 / (1 + (1 / h - 1) * torch.exp(-TIME))
    return float((solve(logistic, h, TIME, solver, n_steps=n_steps) - expected).abs().max())


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_steps_half_as_long_have_errors_of_the_order(solver, order):
    coarse, fine = error(solver, 8), error(solver, 16)
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.2)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_adaptive_solvers_keep_their_tolerance(solver):
    pytest.importorskip("torchdiffeq", reason="needs torchdiffeq: pip install 'linrec[ode]'")
    h = torch.tensor([[0.3, 0.1], [2.0, 0.5], [-1.0, 0.2]], dtype=torch.float64)
    time = TIME.clone().requires_grad_()
    expected = solve(pendulum, h, TIME, "rk4", n_steps=1000)
    found = solve(pendulum, h, time, solver, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    # the end moves with the slope there
    slope = torch.autograd.grad(found.sum(), time)[0]
    torch.testing.assert_close(slope, pendulum(expected).sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_time_changes_nothing(solver):
    if solver in ADAPTIVE:
        pytest.importorskip("torchdiffeq", reason="needs torchdiffeq: pip install 'linrec[ode]'")
    h = torch.tensor([[0.3, 0.1]])
    assert_agree(solve(pendulum, h, torch.zeros(1, 1), solver), h)


def test_what_does_not_exist_is_refused(monkeypatch):
    h = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="no `solver` 'rk5'; did you mean 'rk4'"):
        solve(pendulum, h, h[:, :1], "rk5")
    with pytest.raises(ValueError, match=r"`n_steps`.*1; got 0"):
        solve(pendulum, h, h[:, :1], "rk4", n_steps=0)
    with pytest.raises(ValueError, match="`rtol` must be positive"):
        solve(pendulum, h, h[:, :1], "rk4", rtol=0)
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(MissingExtraError, match=r"torchdiffeq.*'linrec\[ode\]'"):
        solve(pendulum, h, h[:, :1], "dopri5")
