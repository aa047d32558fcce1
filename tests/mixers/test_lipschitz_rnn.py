import pytest
import torch

from linrec.mixers import build
from linrec.nn.orthogonal import skewed
from linrec.testing import assert_agree, generator

D, TIME = 6, 30


def make(name="lipschitz_rnn", **arguments):
    torch.manual_seed(0)
    return build(name, D, **arguments).double()


def inputs():
    return torch.randn(2, TIME, D, generator=generator(0), dtype=torch.float64)


def by_hand(mixer, x):
    """The equations."""
    eye = torch.eye(D, dtype=x.dtype)

    def between(M):
        return mixer.beta * (M - M.T) + (1 - mixer.beta) * (M + M.T) - mixer.gamma * eye

    A, W = between(mixer.M_A), between(mixer.M_W)

    def f(h, x):
        drive = mixer.U.weight @ x + mixer.U.bias
        slope = mixer.alpha * A @ h + torch.tanh(W @ h + drive)
        return slope if mixer.U_g is None else slope * torch.sigmoid(W @ h + mixer.U_g(x))

    rows = []
    for row in range(len(x)):
        h, steps = torch.zeros(D, dtype=x.dtype), []
        for t in range(TIME):
            middle = h + mixer.epsilon / 2 * f(h, x[row, t]) if mixer.solver == "midpoint" else h
            h = h + mixer.epsilon * f(middle, x[row, t])
            steps.append(h)
        rows.append(torch.stack(steps))
    return torch.stack(rows)


@pytest.mark.parametrize("mode", ["recurrent", "newton"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"epsilon": 0.1, "init_std": 2.0, "gamma": 0.3, "alpha": 0.5},
        {"solver": "midpoint", "epsilon": 0.2, "beta": 0.6, "init_std": 2.0},
        {"gate": True, "epsilon": 0.2, "init_std": 2.0},
    ],
)
def test_outputs_and_gradients_are_those_of_the_equations(arguments, mode):
    mixer, x = make(mode=mode, **arguments), inputs()
    y, expected = mixer(x)[0], by_hand(mixer, x)
    assert_agree(y, expected)
    wanted = list(mixer.parameters())
    found = torch.autograd.grad(y.square().sum(), wanted)
    assert_agree(found, torch.autograd.grad(expected.square().sum(), wanted), "gradients")


def test_initial_values():
    torch.manual_seed(0)
    mixer = build("lipschitz_rnn", 500)
    for M in (mixer.M_A, mixer.M_W, build("antisymmetric_rnn", 500).M):
        assert M.std().item() == pytest.approx(0.1 / 500, rel=0.01)
        assert abs(M.mean().item()) < 1e-6
    assert sum(p.numel() for p in mixer.parameters()) == 3 * 500**2 + 500


def test_real_parts_of_the_eigenvalues_are_minus_gamma():
    M = torch.randn(D, D, generator=generator(0), dtype=torch.float64)
    assert_agree(torch.linalg.eigvals(skewed(M, gamma=0.3)).real, torch.full((D,), -0.3, dtype=M.dtype))
    assert_agree(skewed(M, 0.0), M + M.T)


def test_the_gated_antisymmetric_network_is_the_papers_equation():
    mixer, x = make("antisymmetric_rnn", gated=True, epsilon=0.5, gamma=0.1, init_std=3.0), inputs()
    W = mixer.M - mixer.M.T - 0.1 * torch.eye(D, dtype=x.dtype)
    V, V_z = mixer.V.weight.chunk(2)
    b, b_z = mixer.V.bias.chunk(2)
    h, steps = torch.zeros(2, D, dtype=x.dtype), []
    for t in range(TIME):
        z = torch.sigmoid(h @ W.T + x[:, t] @ V_z.T + b_z)
        h = h + 0.5 * z * torch.tanh(h @ W.T + x[:, t] @ V.T + b)
        steps.append(h)
    assert_agree(mixer(x)[0], torch.stack(steps, 1))


def test_a_beta_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"`beta` must be in \[0, 1\]; got 1.5"):
        make(beta=1.5)
