import pytest
import torch

from linrec.mixers.spacetime import SpaceTime
from linrec.nn.parameters import groups_of
from linrec.testing import assert_agree, generator
from tests import released

TIME, D, N = 9, 6, 4


def make(**arguments):
    torch.manual_seed(0)
    return SpaceTime(D, **({"d_state": N} | arguments)).double()


def inputs(time=TIME):
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def test_the_equations_channel_by_channel():
    mixer, u = make(n_kernels=3), inputs()
    y = torch.zeros_like(u)
    for channel in range(D):
        a, b, c = (part[channel // 2] for part in (mixer.a, mixer.b, mixer.c))
        x = torch.zeros(2, N, dtype=torch.float64)
        for t in range(TIME):
            shifted = torch.cat([torch.zeros(2, 1, dtype=torch.float64), x[:, :-1]], 1)
            x = shifted + x[:, -1:] * a / a.abs().sum() + b * u[:, t, channel, None]
            y[:, t, channel] = x @ c + mixer.D[channel] * u[:, t, channel]
    assert_agree(mixer(u)[0], y + torch.nn.functional.gelu(y) @ mixer.out.weight.T + mixer.out.bias)


def test_eigenvalues_are_within_the_unit_circle():
    mixer = make(d_state=32)
    A, *_ = mixer.system()
    assert torch.linalg.eigvals(A).abs().max() <= 1 + 1e-12


def autoregression(steps):
    """A sequence u_t = .5 u_{t-1} + .3 u_{t-2} - .2 u_{t-3}."""
    values = [1.0, -2.0, 3.0]
    while len(values) < steps:
        values.append(0.5 * values[-1] + 0.3 * values[-2] - 0.2 * values[-3])
    return torch.tensor(values, dtype=torch.float64)


def test_a_closed_loop_continues_an_autoregression():
    mixer, sequence = make(closed_loop=True), autoregression(30)
    with torch.no_grad():
        # without feedback the state is the last four inputs
        mixer.a.zero_()
        mixer.b.copy_(torch.eye(N)[0])
        for weights in (mixer.c, mixer.k):
            weights.copy_(torch.tensor([0.5, 0.3, -0.2, 0.0], dtype=torch.float64))
    shown = sequence[:10, None].expand(1, 10, D)
    y, state = mixer(shown)
    # each output is the next input
    assert_agree(y[0, 3:-1, 0], sequence[4:10])
    for forecast in mixer.forecast(state, 20):
        assert_agree(forecast[0, :, 1], sequence[10:])


def test_a_forecast_is_the_layer_that_reads_its_own_predictions():
    mixer, u = make(closed_loop=True), inputs()
    y, state = mixer(u)
    outputs, following = mixer.forecast(state, 5)
    assert_agree(outputs[:, 0], y[:, -1])
    again, _ = mixer(following[:, :-1], state)
    assert_agree(outputs[:, 1:], again)


def test_forecasts_are_those_of_the_released_decoder():
    numbers = released.read("spacetime_closed_loop")
    mixer = SpaceTime(4, d_state=5, closed_loop=True).double()
    mixer.load_state_dict({name: numbers[name] for name in ("a", "b", "c", "k")})
    limit = released.cases()["spacetime_closed_loop"]["error"]
    with torch.no_grad():
        y, state = mixer(numbers["x"])
        outputs, following = mixer.forecast(state, numbers["outputs"].shape[1])
    assert released.error(y, numbers["y"]) < limit
    # a state of undivided b, and inputs of undivided k, in the released code
    sums = {name: numbers[name].abs().sum(-1) for name in ("b", "k")}
    assert released.error(outputs * sums["b"], numbers["outputs"]) < limit
    assert released.error(following * sums["b"] * sums["k"], numbers["inputs"]) < limit


def test_parameters():
    count = sum(p.numel() for p in make().parameters())
    assert count == 3 * D * N + D + D * D + D
    assert sum(p.numel() for p in make(closed_loop=True, n_kernels=2).parameters()) == 4 * 2 * N
    mixer = make(d_state=512)
    for part in (mixer.a, mixer.b, mixer.c):
        assert abs(float(part.detach().mean())) < 0.1 and abs(float(part.detach().std()) - 1) < 0.1
    assert [groups_of(mixer)[name].name for name in ("a", "b", "c")] == ["channel"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_state": 1}, "`d_state` must be at least 2"),
        ({"n_kernels": 4}, "`n_kernels`"),
        ({"mode": "scan"}, "mode"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_forecasts_need_a_closed_loop():
    mixer = make()
    with pytest.raises(ValueError, match="`closed_loop` must be True"):
        mixer.forecast(mixer.init_state(1), 3)
    with pytest.raises(ValueError, match="`horizon` must be at least 1"):
        make(closed_loop=True).forecast(torch.zeros(1, D, N), 0)
