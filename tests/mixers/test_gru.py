import pytest
import torch

from linrec.mixers import build
from linrec.testing import assert_agree, generator
from tests.mixers.gates import assert_uniform

D = 6


def test_the_papers_reset_gate_acts_on_the_state():
    """Equations 5 to 8 of the paper, step by step, in which z and 1 - z are as in torch."""
    torch.manual_seed(0)
    mixer = build("gru", D, reset_after=False).double()
    x = torch.randn(2, 9, D, generator=generator(), dtype=torch.float64)
    W, U, b, c = mixer.rnn.parameters()
    (W_r, W_z, W_n), (U_r, U_z, U_n) = W.chunk(3), U.chunk(3)
    b_r, b_z, b_n = (b + c).chunk(3)
    h, expected = torch.zeros(2, D, dtype=torch.float64), []
    for x_t in x.unbind(1):
        r = torch.sigmoid(x_t @ W_r.T + h @ U_r.T + b_r)
        z = torch.sigmoid(x_t @ W_z.T + h @ U_z.T + b_z)
        n = torch.tanh(x_t @ W_n.T + (r * h) @ U_n.T + b_n)
        h = z * h + (1 - z) * n
        expected.append(h)
    assert_agree(mixer(x), (torch.stack(expected, 1), h))


def test_the_refine_gate_moves_the_update_gate_between_its_square_and_the_opposite():
    torch.manual_seed(0)
    mixer = build("gru", D, refine=True, uniform_init=True).double()
    x = torch.randn(2, 9, D, generator=generator(), dtype=torch.float64)
    W, U, b, c = (weight.chunk(4) for weight in mixer.rnn.parameters())
    h, expected = torch.zeros(2, D, dtype=torch.float64), []
    for x_t in x.unbind(1):
        of_x, of_h = ([x_t @ W[i].T + b[i] for i in range(4)], [h @ U[i].T + c[i] for i in range(4)])
        r, z, e = (torch.sigmoid(of_x[i] + of_h[i]) for i in (0, 1, 3))
        z = e * (1 - (1 - z) ** 2) + (1 - e) * z**2
        h = z * h + (1 - z) * torch.tanh(of_x[2] + r * of_h[2])
        expected.append(h)
    assert_agree(mixer(x), (torch.stack(expected, 1), h))


def test_update_gates_start_at_the_time_scales_asked_for():
    _, _, b, c = build("gru", 4096, chrono=101).rnn.parameters()
    (b_r, b_z, b_n), (_, c_z, _) = b.detach().double().chunk(3), c.chunk(3)
    assert not c_z.any() and b_r.abs().max() < 1 / 64 and b_n.abs().max() < 1 / 64
    # the gate is 1 - 1 / (1 + u)
    assert_uniform(b_z.exp(), 1, 100)
    _, _, b, _ = build("gru", 4096, refine=True, uniform_init=True).rnn.parameters()
    _, b_z, _, b_e = b.detach().double().chunk(4)
    assert_uniform(b_z.sigmoid(), 1 / 4096, 1 - 1 / 4096)
    assert torch.equal(b_e, -b_z)


def test_a_gate_has_one_start():
    with pytest.raises(ValueError, match="`chrono` must be None beside `uniform_init=True`; got 9"):
        build("gru", D, chrono=9, uniform_init=True)
    with pytest.raises(ValueError, match="`chrono` must be at least 2; got 1"):
        build("gru", D, chrono=1)
