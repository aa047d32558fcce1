import torch

from linrec.mixers import build
from linrec.testing import assert_agree, generator

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
