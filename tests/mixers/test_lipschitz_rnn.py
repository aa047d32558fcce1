import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.nn.skew import skewed
from linrec.testing import assert_agree, generator

D, TIME = 6, 30
NOISY = {"learned_step": True, "epsilon": 0.1, "add_noise": 0.05, "mult_noise": 0.3, "init_std": 2.0}


def make(name="lipschitz_rnn", **arguments):
    torch.manual_seed(0)
    return build(name, D, **arguments).double()


def inputs():
    return torch.randn(2, TIME, D, generator=generator(0), dtype=torch.float64)


def by_hand(mixer, x, kept, added):
    """The equations, with the noise that is given: m_t = 1 - s_m kept, and s_a added."""
    eye = torch.eye(D, dtype=x.dtype)

    def between(M, gamma):
        return mixer.beta * (M - M.T) + (1 - mixer.beta) * (M + M.T) - gamma * eye

    A, W = between(mixer.M_A, mixer.gamma), between(mixer.M_W, mixer.gamma_w)

    def f(h, x):
        drive = mixer.U.weight @ x + mixer.U.bias
        return mixer.alpha * A @ h + torch.tanh(W @ h + drive)

    d = mixer.epsilon if mixer.d is None else mixer.d
    rows = []
    for row in range(len(x)):
        h, steps = torch.zeros(D, dtype=x.dtype), []
        for t in range(TIME):
            m = 1 - mixer.mult_noise * kept[row, t]
            middle = h + d / 2 * f(h, x[row, t]) if mixer.solver == "midpoint" else h
            h = h + m * d * f(middle, x[row, t]) + mixer.add_noise * added[row, t]
            steps.append(h)
        rows.append(torch.stack(steps))
    return torch.stack(rows)


@pytest.mark.parametrize("mode", ["recurrent", "newton"])
@pytest.mark.parametrize(
    "arguments",
    [
        NOISY,
        {**NOISY, "solver": "midpoint", "gamma_w": 0.5, "alpha": 0.5},
        {"solver": "midpoint", "epsilon": 0.2, "beta": 0.6, "init_std": 2.0, "mult_noise": 0.5},
    ],
)
def test_noise_is_of_training_and_the_same_in_all_iterations(arguments, mode):
    mixer, x = make(mode=mode, **arguments), inputs()
    torch.manual_seed(7)
    y, _ = mixer(x)
    torch.manual_seed(7)
    kept, added = torch.rand_like(x), torch.randn_like(x)
    expected = by_hand(mixer, x, kept, added)
    assert_agree(y, expected)
    wanted = list(mixer.parameters())
    found = torch.autograd.grad(y.square().sum(), wanted)
    assert_agree(found, torch.autograd.grad(expected.square().sum(), wanted), "gradients")
    zeros = torch.zeros_like(x)
    assert_agree(mixer.eval()(x)[0], by_hand(mixer, x, zeros, zeros))


def test_initial_values():
    torch.manual_seed(0)
    mixer = build("lipschitz_rnn", 500, learned_step=True, epsilon=0.02)
    for M in (mixer.M_A, mixer.M_W, build("antisymmetric_rnn", 500).M):
        assert M.std().item() == pytest.approx(0.1 / 500, rel=0.01)
        assert abs(M.mean().item()) < 1e-6
    assert mixer.d.eq(torch.tensor(0.02)).all()
    assert groups_of(mixer)["d"].name == "transition" and not groups_of(mixer)["d"].weight_decay
    assert sum(p.numel() for p in mixer.parameters()) == 3 * 500**2 + 2 * 500
    assert "d" not in dict(build("lipschitz_rnn", 4).named_parameters())


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


@pytest.mark.parametrize("arguments", [{"beta": 1.5}, {"mult_noise": -0.1}])
def test_a_number_that_is_no_share_is_refused(arguments):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]; got"):
        make(**arguments)
