import pytest
import torch

from linrec.mixers import build
from linrec.testing import assert_agree, generator

TIME = 12


def inputs(d_model):
    return torch.randn(2, TIME, d_model, generator=generator(0), dtype=torch.float64)


def make(name, d_model, **arguments):
    torch.manual_seed(0)
    return build(name, d_model, **arguments).double()


@pytest.mark.parametrize("activation", ["relu", "tanh", "identity"])
def test_the_wave_network_is_the_papers_equation(activation):
    options = {"n_channels": 2, "kernel_size": 5, "activation": activation}
    mixer, x = make("wave_rnn", 6, init="random", input_init="normal", **options), inputs(6)
    act = {"relu": lambda v: v * (v > 0), "tanh": torch.tanh, "identity": lambda v: v}[activation]
    h, steps = torch.zeros(2, 6, dtype=x.dtype), []
    for t in range(TIME):
        around = torch.zeros_like(h)
        for out in range(2):
            for unit in range(3):
                around[:, 3 * out + unit] = mixer.u.bias[out]
                for ring in range(2):
                    for tap in range(5):
                        seen = h[:, 3 * ring + (unit + tap - 2) % 3]
                        around[:, 3 * out + unit] += mixer.u.weight[out, ring, tap] * seen
        h = act(x[:, t] @ mixer.V.weight.T + mixer.V.bias + around)
        steps.append(h)
    assert_agree(mixer(x)[0], torch.stack(steps, 1))


def test_an_input_travels_around_every_ring():
    mixer = make("wave_rnn", 8, n_channels=2)
    with torch.no_grad():
        mixer.u.bias.zero_()
    x = torch.zeros(1, 5, 8, dtype=torch.float64)
    x[0, 0, 3] = 2.0
    y, _ = mixer(x)
    expected = torch.zeros(1, 5, 2, 4, dtype=torch.float64)
    for t, unit in enumerate([0, 3, 2, 1, 0]):
        expected[0, t, :, unit] = 2.0
    assert_agree(y, expected.flatten(2))


def test_initial_values_of_the_wave_network():
    mixer = make("wave_rnn", 600, n_channels=6)
    assert mixer.V.weight.sum() == 6 * 600 and mixer.V.weight[::100].eq(1).all()
    assert not mixer.V.bias.any()
    shift = mixer.u.weight
    assert shift.sum() == 6 and shift[:, :, 2].equal(torch.eye(6, dtype=shift.dtype))
    assert mixer.u.bias.any() and mixer.u.bias.abs().max() <= 18**-0.5
    same = make("wave_rnn", 600, n_channels=6, init="identity", input_init="normal")
    assert same.u.weight[:, :, 1].equal(torch.eye(6, dtype=shift.dtype))
    assert same.V.weight.std().item() == pytest.approx(0.001, rel=0.01)
    assert sum(p.numel() for p in mixer.parameters()) == 600 * 601 + 6 * 6 * 3 + 6


@pytest.mark.parametrize("kernel_size", [2, 0, 1, 9])
def test_a_kernel_that_does_not_fit_is_refused(kernel_size):
    with pytest.raises(ValueError, match=r"`kernel_size` must be odd, from 3 to 7.*; got"):
        build("wave_rnn", 6, n_channels=2, kernel_size=kernel_size)


@pytest.mark.parametrize("neighbours", ["square", "row"])
def test_the_wave_machine_is_the_papers_equation(neighbours):
    mixer, x = make("neural_wave_machine", 12, neighbours=neighbours), inputs(12)
    rows, columns = 3, 4
    assert mixer.rows == rows
    z = y = torch.zeros(2, rows, columns, dtype=x.dtype)
    steps = []
    for t in range(TIME):
        drive = (x[:, t] @ mixer.V.weight.T + mixer.V.bias).unflatten(-1, (rows, columns))
        for down in (-1, 0, 1) if neighbours == "square" else (0,):
            for right in (-1, 0, 1):
                w_z, w_y = mixer.w[0, :, down + (neighbours == "square"), right + 1]
                # the neighbour below and to the right moves here
                near = [part.roll((-down, -right), (1, 2)) for part in (z, y)]
                drive = drive + w_z * near[0] + w_y * near[1]
        z = z + 0.042 * (torch.tanh(drive) - 2.7 * y - 4.7 * z)
        y = y + 0.042 * z
        steps.append(y.flatten(1))
    assert_agree(mixer(x)[0], torch.stack(steps, 1))


def test_initial_values_of_the_wave_machine():
    mixer = build("neural_wave_machine", 256)
    assert mixer.rows == 16 and mixer.state_size == 512
    assert mixer.w.abs().max() <= 1 / 3
    assert sum(p.numel() for p in mixer.parameters()) == 256 * 257 + 18
    assert build("neural_wave_machine", 7, rows=1).rows == 1
    with pytest.raises(ValueError, match=r"`d_model` must be a product of rows and columns.*; got 7"):
        build("neural_wave_machine", 7)
