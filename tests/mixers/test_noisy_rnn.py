import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 30
NOISY = {"epsilon": 0.1, "add_noise": 0.05, "mult_noise": 0.3, "init_std": 2.0}


def make(**arguments):
    torch.manual_seed(0)
    return build("noisy_rnn", D, **arguments).double()


def inputs():
    return torch.randn(2, TIME, D, generator=generator(0), dtype=torch.float64)


def by_hand(mixer, x, uniform, normal):
    """The equations, with the noise that is given: m_t = 1 - s_m uniform_t, and n_t = normal_t."""
    beta, eye = mixer.beta, torch.eye(D, dtype=x.dtype)
    A = (1 - beta) * (mixer.M_A + mixer.M_A.T) + beta * (mixer.M_A - mixer.M_A.T) - mixer.gamma * eye
    W = (1 - beta) * (mixer.M_W + mixer.M_W.T) + beta * (mixer.M_W - mixer.M_W.T) - mixer.gamma_w * eye
    rows = []
    for row in range(len(x)):
        h, steps = torch.zeros(D, dtype=x.dtype), []
        for t in range(TIME):
            drive = mixer.U.weight @ x[row, t] + mixer.U.bias
            f = mixer.alpha * A @ h + torch.tanh(W @ h + drive)
            h = h + mixer.d * (1 - mixer.mult_noise * uniform[row, t]) * f + mixer.add_noise * normal[row, t]
            steps.append(h)
        rows.append(torch.stack(steps))
    return torch.stack(rows)


@pytest.mark.parametrize("mode", ["recurrent", "newton"])
@pytest.mark.parametrize(
    "arguments",
    [
        NOISY,
        {**NOISY, "gamma_w": 0.5, "alpha": 0.5, "beta": 0.6},
        {**NOISY, "add_noise": 0.0},
        {**NOISY, "mult_noise": 0.0},
    ],
)
def test_noise_is_of_training_and_the_same_in_all_iterations(arguments, mode):
    mixer, x = make(mode=mode, **arguments), inputs()
    torch.manual_seed(7)
    y, _ = mixer(x)
    torch.manual_seed(7)
    uniform, normal = torch.rand_like(x), torch.randn_like(x)
    expected = by_hand(mixer, x, uniform, normal)
    assert_agree(y, expected)
    wanted = list(mixer.parameters())
    found = torch.autograd.grad(y.square().sum(), wanted)
    assert_agree(found, torch.autograd.grad(expected.square().sum(), wanted), "gradients")
    zeros = torch.zeros_like(x)
    assert_agree(mixer.eval()(x)[0], by_hand(mixer, x, zeros, zeros))


def test_without_noise_and_with_the_initial_step_it_is_the_lipschitz_rnn():
    # a step without rounding in float32
    mixer, x = make(epsilon=0.125, init_std=2.0).eval(), inputs()
    other = build("lipschitz_rnn", D, epsilon=0.125).double()
    other.load_state_dict({name: value for name, value in mixer.state_dict().items() if name != "d"})
    assert_agree(mixer(x)[0], other(x)[0])


def test_initial_values():
    torch.manual_seed(0)
    mixer = build("noisy_rnn", 500, epsilon=0.02)
    for M in (mixer.M_A, mixer.M_W):
        assert M.std().item() == pytest.approx(0.1 / 500, rel=0.01)
        assert abs(M.mean().item()) < 1e-6
    assert mixer.d.eq(torch.tensor(0.02)).all()
    assert groups_of(mixer)["d"].name == "transition" and not groups_of(mixer)["d"].weight_decay
    assert sum(p.numel() for p in mixer.parameters()) == 3 * 500**2 + 2 * 500


@pytest.mark.parametrize("arguments", [{"beta": -0.1}, {"mult_noise": 1.5}])
def test_a_number_that_is_no_share_is_refused(arguments):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]; got"):
        make(**arguments)
