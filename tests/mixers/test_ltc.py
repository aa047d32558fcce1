"""LTC: the fused steps solve the differential equation. `test_released` compares the steps themselves."""

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.ltc import LTC
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator
from tests.tiers import thorough

D, TIME = 4, 3


def make(d_model: int = D, **arguments) -> LTC:
    torch.manual_seed(0)
    mixer = build("ltc", d_model, **arguments)
    assert isinstance(mixer, LTC)
    return mixer.double()


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def slope(mixer: LTC, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dv/dt of a row, neuron by neuron."""
    c, g, w = (functional.softplus(parameter) for parameter in (mixer.c, mixer.g, mixer.w))
    x, slopes = mixer.scale[0] * x + mixer.offset[0], []
    for i in range(D):
        current = g[i] * (mixer.L[i] - v[i])
        for kind, source in ((0, v), (1, x)):
            for j in range(D):
                s = 1 / (1 + torch.exp(-mixer.sigma[kind, j, i] * (source[j] - mixer.mu[kind, j, i])))
                current = current + w[kind, j, i] * s * (mixer.E[kind, j, i] - v[i])
        slopes.append(current / c[i])
    return torch.stack(slopes)


@thorough
@torch.no_grad()
def test_many_fused_steps_solve_the_papers_differential_equation():
    mixer, x, dt = make(n_steps=4000), inputs(), torch.tensor([[1.0, 0.3, 0.7], [0.2, 1.5, 0.4]]).double()
    torch.nn.init.normal_(mixer.scale)
    torch.nn.init.normal_(mixer.offset)
    y, state = mixer(x, dt=dt)
    for row in range(2):
        v = torch.zeros(D, dtype=x.dtype)
        for t in range(TIME):
            # Runge and Kutta's method of order four
            h = dt[row, t] / 40
            for _ in range(40):
                first = slope(mixer, v, x[row, t])
                second = slope(mixer, v + h / 2 * first, x[row, t])
                third = slope(mixer, v + h / 2 * second, x[row, t])
                fourth = slope(mixer, v + h * third, x[row, t])
                v = v + h / 6 * (first + 2 * second + 2 * third + fourth)
            # the fused steps are of order one
            expected = mixer.scale[1] * v + mixer.offset[1]
            torch.testing.assert_close(y[row, t], expected, atol=1e-3, rtol=0)
        torch.testing.assert_close(state[row], v, atol=1e-3, rtol=0)


def test_a_held_input_may_be_cut_between_fused_steps():
    whole, last = make()(inputs())
    parts, end = make(n_steps=3)(inputs().repeat_interleave(2, 1), dt=torch.full((2, 2 * TIME), 0.5))
    assert_agree(parts[:, 1::2], whole)
    assert_agree(end, last)


def test_long_times_reach_an_equilibrium_between_the_potentials():
    mixer = make()
    y, v = mixer(inputs()[:, :1].expand(-1, 50, -1), dt=torch.full((2, 50), 1e6))
    assert_agree(y[:, -1], y[:, -2])
    assert v.abs().max() <= 1
    assert slope(mixer, v[0], inputs()[0, 0]).abs().max() < 1e-5


def test_the_general_form_is_the_papers_equation():
    """A fused step is implicit in v, and explicit in f."""
    mixer, x = make(variant="network", n_steps=2), inputs()
    dt = 0.5 + torch.rand(2, TIME, generator=generator(1), dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    tau, A = mixer.log_tau.exp(), mixer.A
    v, outputs = torch.zeros(2, D, dtype=x.dtype), []
    for t in range(TIME):
        step = dt[:, t, None] / 2
        for _ in range(2):
            drive = (mixer.scale[0] * x[:, t] + mixer.offset[0]) @ mixer.W.weight.T + mixer.W.bias
            f = torch.sigmoid(drive + v @ mixer.R.weight.T)
            after = (v + step * f * A) / (1 + step / tau + step * f)
            assert_agree(after - v, step * (-(1 / tau + f) * after + f * A))
            v = after
        outputs.append(mixer.scale[1] * v + mixer.offset[1])
    assert_agree(mixer(x, dt=dt), (torch.stack(outputs, 1), v))


def test_potentials_of_the_general_form_stay_within_a_over_any_time():
    mixer = make(variant="network")
    _, v = mixer(100 * inputs(), dt=torch.full((2, TIME), 1e6))
    assert (v.abs() <= mixer.A.abs()).all()
    assert sum(p.numel() for p in mixer.parameters()) == 2 * D * D + 7 * D
    assert sum(p.numel() for p in make(mixed_memory=True).parameters()) == 16 * D * D + 11 * D


def test_initial_values_and_groups():
    mixer = make(100)
    for parameter, low, high in (
        (mixer.c, 0.4, 0.6),
        (mixer.g, 0.001, 1),
        (mixer.L, -0.2, 0.2),
        (mixer.w, 0.001, 1),
        (mixer.sigma, 3, 8),
        (mixer.mu, 0.3, 0.8),
    ):
        assert low <= parameter.min() < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < parameter.max() <= high
    assert set(mixer.E.unique().tolist()) == {-1, 1}
    assert mixer.E.gt(0).double().mean().item() == pytest.approx(2 / 3, abs=0.02)
    assert sum(parameter.numel() for parameter in mixer.parameters()) == 8 * 100**2 + 7 * 100
    assert all(not group.weight_decay and group.name == "channel" for group in groups_of(mixer).values())


def test_a_number_of_steps_below_one_is_refused():
    with pytest.raises(ValueError, match="`n_steps` must be at least 1; got 0"):
        make(n_steps=0)
