import math

import pytest
import torch

from linrec.learning import build_learner
from linrec.mixers import build
from linrec.mixers.ind_rnn import IndRNN
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> IndRNN:
    torch.manual_seed(0)
    mixer = build("ind_rnn", d_model, **arguments)
    assert isinstance(mixer, IndRNN)
    return mixer


def inputs() -> torch.Tensor:
    return 2 * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer, x, h, u):
    sigma = torch.tanh if mixer.activation == "tanh" else lambda z: z * (z > 0)
    hidden = []
    for t in range(x.shape[1]):
        h = sigma(x[:, t] @ mixer.W.weight.T + u * h + mixer.W.bias)
        hidden.append(h)
    return torch.stack(hidden, 1)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_outputs_state_and_gradients_are_the_papers_equation(activation):
    mixer, x = make(activation=activation, max_length=10).double(), inputs().requires_grad_()
    with torch.no_grad():
        mixer.u[::2] *= -1
    start = torch.randn(2, D, generator=generator(3), dtype=torch.float64).requires_grad_()
    y, state = mixer(x, start)
    expected = by_hand(mixer, x, start, mixer.u)
    assert_agree((y, state), (expected, expected[:, -1]))
    wanted = [x, start, *mixer.parameters()]
    weight = torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad((weight * y).sum(), wanted, retain_graph=True)
    assert_agree(found, torch.autograd.grad((weight * expected).sum(), wanted), "gradients")


def test_recurrent_weights_are_clipped_and_their_gradients_pass_through():
    mixer, x = make(max_length=4, gamma=3.0).double(), inputs().abs()
    bound = 3 ** (1 / 4)
    assert mixer.bound == pytest.approx(bound)
    with torch.no_grad():
        mixer.W.weight.abs_()
        mixer.u.copy_(torch.tensor([2.0, 2.0, -2.0, -2.0, 0.5, 0.5]))
    y, _ = mixer(x)
    clipped = mixer.u.detach().clamp(-bound, bound).requires_grad_()
    expected = by_hand(mixer, x, torch.zeros(2, D, dtype=x.dtype), clipped)
    assert_agree(y, expected)
    weight = torch.tensor([1.0, -1.0] * 3, dtype=x.dtype)
    (free,) = torch.autograd.grad((weight * expected).sum(), clipped)
    # both signs of u and of its gradient
    assert {tuple(pair) for pair in torch.stack([mixer.u, free]).sign().T.tolist()} >= {
        (1, 1),
        (1, -1),
        (-1, -1),
    }
    (found,) = torch.autograd.grad((weight * y).sum(), mixer.u, retain_graph=True)
    assert_agree(found, free)
    # so gradients of parts add up
    parts = [
        torch.autograd.grad((weight * y)[:, t].sum(), mixer.u, retain_graph=True)[0] for t in range(TIME)
    ]
    assert_agree(sum(parts), free)


def test_descent_stops_at_the_bound_and_comes_back():
    mixer = make(1, max_length=10)
    learner = build_learner(
        "tbptt", mixer, torch.optim.SGD([mixer.u], lr=0.1), loss=lambda y, sign: sign * y[:, :, 0] * 2
    )
    with torch.no_grad():
        mixer.u.fill_(mixer.bound - 0.05)
        mixer.W.weight.fill_(1.0)
        mixer.W.bias.zero_()
    seen = []
    for sign in [-1.0] * 5 + [1.0] * 2:
        # d loss / d u = sign, because the first step does not depend on u
        learner.reset()
        learner.chunk(torch.tensor([[[1.0], [0.0]]]), torch.full((1, 2), sign))
        seen.append(mixer.u.item())
    assert seen == pytest.approx([mixer.bound] * 5 + [mixer.bound - 0.1, mixer.bound - 0.2])


def test_initial_distribution_parameters_and_state():
    mixer = make(1000, max_length=784)
    bound = 2 ** (1 / 784)
    distance = (mixer.u.detach().sort().values / bound - (torch.arange(1000) + 0.5) / 1000).abs().max()
    assert distance < 2.5 / math.sqrt(1000)
    u = make(1000, max_length=784, recurrent_init="long").u
    assert u.min() >= 1 / bound - 1e-6 and u.max() <= bound + 1e-6
    assert u.mean().item() == pytest.approx(1, abs=1e-4)
    assert mixer.W.weight.abs().max() <= 1 / math.sqrt(1000)
    released = make(1000, init="released").W
    # Kaiming's bound for a slope of 8 below zero
    assert 0.99 < released.weight.abs().max() / math.sqrt(6 / 65 / 1000) <= 1
    assert released.weight.std().item() == pytest.approx(math.sqrt(2 / 65 / 1000), rel=0.01)
    assert not released.bias.any()
    assert sum(parameter.numel() for parameter in make().parameters()) == D * D + 2 * D
    assert make().state_size == D
    assert {name for name, group in groups_of(make()).items() if not group.weight_decay} == {"u"}
    assert make().transitions(inputs()) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "rely"}, "there is no `activation` 'rely'; did you mean 'relu'"),
        ({"init": "release"}, "there is no `init` 'release'; did you mean 'released'"),
        ({"recurrent_init": "short"}, "there is no `recurrent_init` 'short'"),
        ({"max_length": 0}, "`max_length` must be at least 1; got 0"),
        ({"gamma": 0.5}, "`gamma` must be at least 1; got 0.5. At 1, gradients do not grow."),
        ({"gamma": float("inf")}, "`gamma` must be a finite number; got inf"),
        ({"gamma": float("nan")}, "got nan"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
