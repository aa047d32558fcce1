import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.srwm import SRWM
from linrec.testing import assert_agree

from .fast_weights import TIME, D, check_equations, inputs, resets

VARIANTS = {
    "paper": {},
    "heads": {"n_heads": 2},
    "one rate": {"n_heads": 3, "rates": "one"},
    "inputs as they are": {"n_heads": 2, "input_softmax": False, "beta_init": 0.5},
}


def make(d_model: int = D, **arguments) -> SRWM:
    torch.manual_seed(0)
    mixer = build("srwm", d_model, **arguments)
    assert isinstance(mixer, SRWM)
    return mixer


def phi(x):
    return x.exp() / x.exp().sum()


def equations(mixer, x, reset, *, rates="separate", input_softmax=True, **_):
    """Outputs, and the change of the weights of each sequence and head."""
    h, d = mixer.n_heads, mixer.d_head
    outputs, changes = torch.zeros_like(x), []
    for b in range(len(x)):
        for i in range(h):
            channels = slice(i * d, (i + 1) * d)
            W_0 = mixer.W[i].T
            for t in range(x.shape[1]):
                if t == 0 or reset[b, t]:
                    W = W_0
                u = phi(x[b, t, channels]) if input_softmax else x[b, t, channels]
                y, k, q, beta = (W @ u)[:d], (W @ u)[d : 2 * d], (W @ u)[2 * d : 3 * d], (W @ u)[3 * d :]
                v, vbar = W @ phi(q), W @ phi(k)
                if rates == "one":
                    eta = torch.sigmoid(beta).expand(3 * d + 1)
                else:
                    eta = torch.cat([torch.sigmoid(beta[j]).expand(n) for j, n in enumerate((d, d, d, 4))])
                W = W + torch.outer(eta * (v - vbar), phi(k))
                outputs[b, t, channels] = y
            changes.append((W - W_0).T)
    return outputs @ mixer.out.weight.T, torch.stack(changes).unflatten(0, (len(x), h))


@pytest.mark.parametrize("reset", [torch.zeros(2, TIME, dtype=torch.bool), resets()], ids=["one", "several"])
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_gradients_and_state_are_those_of_the_equations(name, reset):
    mixer = make(**VARIANTS[name]).double()
    x = inputs().requires_grad_()
    expected, change = equations(mixer, x, reset, **VARIANTS[name])
    check_equations(mixer, x, reset, expected, change)


def test_rates_near_zero_leave_a_linear_layer_of_softmaxes():
    mixer = make(n_heads=2, beta_init=-1e4).double()
    y, state = mixer(inputs())
    u = inputs().unflatten(-1, (2, 3)).softmax(-1)
    fixed = torch.einsum("bthd,hde->bthe", u, mixer.W[..., :3]).flatten(2)
    assert_agree(y, fixed @ mixer.out.weight.T)
    assert_agree(state, torch.zeros_like(state))
    # and with rates that are not, the weights do change
    assert mixer.state_size == state[0].numel()
    assert make(n_heads=2).double()(inputs())[1].abs().max() > 0.1


def test_a_step_moves_what_is_under_the_key_towards_what_is_under_the_query():
    mixer, x = make(beta_init=1e4, rates="one").double(), inputs()[:1, :1]
    _, change = mixer(x)
    W_0 = mixer.W[0].T
    u = phi(x[0, 0])
    k, q = phi((W_0 @ u)[D : 2 * D]), phi((W_0 @ u)[2 * D : 3 * D])
    before, after, aim = W_0 @ k, (W_0 + change[0, 0].T) @ k, W_0 @ q
    # all the way but for the key's norm, which is below 1
    assert_agree(after - before, k.square().sum() * (aim - before))


def test_parameters_are_those_of_the_released_code():
    mixer = make(256)
    d = 16
    assert sum(p.numel() for p in mixer.parameters()) == 256 * (3 * d + 4) + 256 * 256
    assert sum(p.numel() for p in make(256, rates="one").parameters()) == 256 * (3 * d + 1) + 256 * 256
    assert mixer.W[..., : 3 * d].std().item() == pytest.approx(1 / math.sqrt(d), rel=0.05)
    assert mixer.W[..., : 3 * d].mean().abs() < 0.01
    assert mixer.W[..., 3 * d :].std().item() == pytest.approx(1 / math.sqrt(d), rel=0.1)
    assert mixer.W[..., 3 * d :].mean().item() == pytest.approx(-1, abs=0.05)
    assert make(256, init_scale=3).W[..., : 3 * d].std().item() == pytest.approx(3 / math.sqrt(d), rel=0.05)
    assert mixer.out.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 256), rel=0.05)


def test_state_size_counts_all_weights_of_all_heads():
    assert make(n_heads=2).state_size == 2 * 3 * (3 * 3 + 4)
    assert make(n_heads=2, rates="one").state_size == 2 * 3 * (3 * 3 + 1)
    assert [make(width).n_heads for width in (6, 32, 128)] == [1, 2, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"rates": "seperate"}, "there is no `rates` 'seperate'; did you mean 'separate'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
