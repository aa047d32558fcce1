import math

import pytest
import torch

from linrec.lab.distillation import distill
from linrec.mixers import build
from linrec.mixers.tnn import TNN
from linrec.testing import assert_agree, generator, reset_mask

D = 3
CASES = {
    "paper": {"decay": 0.9},
    "no decay": {"decay": 1.0, "length": 11, "expansion": 1, "bias": False},
    "deep": {"decay": 0.5, "d_position": 7, "position_depth": 2},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> TNN:
    torch.manual_seed(0)
    mixer = build("tnn", d_model, **{"d_position": 5, "position_depth": 1, "expansion": 2} | arguments)
    assert isinstance(mixer, TNN)
    return mixer


def moved(mixer: TNN) -> TNN:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 30) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer: TNN, x: torch.Tensor, *, decay: float, length: int | None = None, **_) -> torch.Tensor:
    network = mixer.filter
    taps = []
    for i in range(x.shape[1]):
        z = network.inputs.weight[:, 0] * i + network.inputs.bias
        for layer in (*network.layers, network.out):
            z = z / (z.square().mean().sqrt() + 1e-8)
            z = layer.weight @ (z * (z > 0)) + layer.bias
        taps.append(decay**i * z if length is None or i < length else 0 * z)
    u, v = ((y := linear(x)) / (1 + torch.exp(-y)) for linear in (mixer.u, mixer.v))
    y = torch.stack([sum(taps[n - m] * v[:, m] for m in range(n + 1)) for n in range(x.shape[1])], 1)
    return mixer.out(u * y)


@every_case
def test_the_layer_and_its_gradients_are_the_papers_equations(case):
    mixer, x = moved(make(**CASES[case])), inputs().requires_grad_()
    ours, theirs = mixer(x)[0], by_hand(mixer, x, **CASES[case])
    # where taps are left out that are below 1e-8
    tolerance = {"rtol": 1e-7, "atol": 1e-7 if case == "deep" else 1e-9}
    torch.testing.assert_close(ours, theirs, **tolerance)
    dy = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    for mine, other in zip(
        *(torch.autograd.grad(y, [x, *mixer.parameters()], dy) for y in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_parameters_and_taps():
    d, width, depth = 20, 64, 3
    mixer = build("tnn", d)
    position = 2 * width + depth * (width + 1) * width + (width + 1) * 3 * d
    assert sum(p.numel() for p in mixer.parameters()) == 2 * (d + 1) * 3 * d + (3 * d + 1) * d + position
    # as many as fade to 1e-8, and no more than asked for
    assert 0.99 ** (mixer.filter.length - 1) > 1e-8 >= 0.99**mixer.filter.length
    assert build("tnn", d, length=512).filter.length == 512
    assert mixer.filter.decay == 0.99 and mixer.state_size == 3 * d


def test_the_exact_conversion_decodes_sequences_of_training():
    length = 33
    mixer, x = moved(make(decay=0.97)), inputs(length)
    exact = distill(mixer, method="exact", length=length)
    y, _ = mixer(x)
    prefix, state = exact(x[:, :20])
    outputs = [prefix]
    for n in range(20, length):
        z, state = exact(x[:, n : n + 1], state)
        outputs.append(z)
    assert_agree(torch.cat(outputs, 1), y)
    # one of each conjugate pair of as many numbers as there are steps
    assert state.shape == (2, 2 * D, math.ceil(length / 2))
    magnitude = torch.exp(-exact.filter.decay_log.exp())
    torch.testing.assert_close(magnitude, torch.full_like(magnitude, 0.97))


def test_token_mixing_is_the_taps_by_distance():
    mixer, x, reset = moved(make(length=12)), inputs(15), reset_mask(2, 15, rate=0.1)
    taps, found = mixer.filter.kernel(15).abs().mean(0), mixer.token_mixing(x, reset=reset)
    assert not taps[12:].any()
    for b in range(2):
        for n in range(15):
            for m in range(15):
                seen = m <= n and not reset[b, m + 1 : n + 1].any()
                assert found[b, n, m] == (taps[n - m] if seen else 0)


def test_errors():
    for message, arguments in {
        "`expansion` must be at least 1; got 0": {"expansion": 0},
        "`decay` must be above 0 and at most 1, and below 1 without a `length`; got 1.5": {"decay": 1.5},
        "below 1 without a `length`; got 1 and None": {"decay": 1},
        "`length` must be at least 1; got 0": {"length": 0},
        "`d_position` must be at least 1; got 0": {"d_position": 0},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
