import pytest
import torch

from linrec.mixers import build


def test_the_identity_start_is_that_of_le():
    torch.manual_seed(0)
    rnn = build("elman", 64, activation="relu", init="identity").rnn
    assert torch.equal(rnn.weight_hh_l0, torch.eye(64))
    assert not rnn.bias_ih_l0.any() and not rnn.bias_hh_l0.any()
    assert float(rnn.weight_ih_l0.detach().std()) == pytest.approx(0.001, rel=0.05)


def test_the_orthogonal_start_keeps_the_norm_of_the_state():
    torch.manual_seed(0)
    U = build("elman", 32, init="orthogonal").rnn.weight_hh_l0.detach()
    assert torch.allclose(U @ U.T, torch.eye(32), atol=1e-5)
    scaled = build("elman", 32, init="orthogonal", radius=0.5).rnn.weight_hh_l0.detach()
    assert torch.allclose(scaled @ scaled.T, torch.eye(32) / 4, atol=1e-5)


def test_a_reservoir_has_its_density_and_spectral_radius():
    U = build("elman", 50, init="reservoir", radius=1.25, density=0.1).rnn.weight_hh_l0.detach()
    assert torch.equal(U.ne(0).sum(1), torch.full((50,), 5))
    assert float(torch.linalg.eigvals(U).abs().max()) == pytest.approx(1.25, rel=1e-4)


def test_the_leak_keeps_a_share_of_the_state():
    mixer = build("elman", 3, leak=0.25).double()
    x, h = torch.randn(1, 1, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    W, U, b, c = mixer.rnn.parameters()
    expected = 0.75 * h + 0.25 * torch.tanh(x[:, 0] @ W.T + b + h @ U.T + c)
    assert torch.allclose(mixer(x, h)[1], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "radius, radii, turn, across", [(1.05, (0.42, 0.43), 13.71, -0.099), (1.2, (0.73, 0.79), 13.84, -0.39)]
)
def test_limit_cycles_have_the_published_radius_period_and_exponents(radius, radii, turn, across):
    mixer = build("elman", 4, init="limit_cycle", radius=radius, longest=13.7).double()
    assert not mixer.rnn.bias_ih_l0.any() and not mixer.rnn.bias_hh_l0.any()
    # the second pair turns once in 13.7 steps
    h, x = (
        torch.tensor([[0.0, 0.0, 0.5, 0.0]], dtype=torch.float64),
        torch.zeros(1, 2000, 4, dtype=torch.float64),
    )
    _, start = mixer(x, h)
    path = mixer(x, start)[0][0, :, 2:].detach()
    norms, angles = path.norm(dim=1), torch.atan2(path[:, 1], path[:, 0])
    assert radii[0] - 0.01 < norms.min() and norms.max() < radii[1] + 0.01
    steps = torch.remainder(angles.diff(), 2 * torch.pi)
    assert float(2 * torch.pi / steps.mean()) == pytest.approx(turn, abs=0.01)
    Q, exponents = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    U = mixer.rnn.weight_hh_l0.detach()[2:, 2:]
    for h in path:
        Q, R = torch.linalg.qr((1 - h[:, None] ** 2) * U @ Q)
        exponents += R.diagonal().abs().log() / len(path)
    assert float(exponents[0]) == pytest.approx(0, abs=2e-3)
    assert float(exponents[1]) == pytest.approx(across, abs=0.01)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"init": "limit_cycle"}, "even"),
        ({"radius": 0.5}, "`radius`"),
        ({"leak": 1.5}, "`leak`"),
        ({"init": "limit_cycle", "longest": 3}, "`longest`"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        build("elman", 3, **arguments)
