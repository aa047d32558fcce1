import math

import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, check_mixer, generator, reset_mask
from tests.tiers import thorough

D, TIME = 5, 40


def make(**arguments):
    torch.manual_seed(0)
    return build("unicornn", D, **arguments).double()


def inputs(time=TIME):
    x = torch.randn(2, time, D, generator=generator(0), dtype=torch.float64)
    start = torch.randn(2, D, 2, generator=generator(1), dtype=torch.float64)
    return x.requires_grad_(), start.requires_grad_()


def by_hand(mixer, x, start, reset):
    z, y = start[..., 0], start[..., 1]
    step, out = mixer.dt / (1 + torch.exp(-mixer.c)), []
    for t in range(x.shape[1]):
        if reset is not None:
            z = torch.where(reset[:, t, None], 0.0, z)
            y = torch.where(reset[:, t, None], 0.0, y)
        z = z - step * (torch.tanh(y * mixer.w + x[:, t] @ mixer.V.weight.T + mixer.V.bias) + mixer.alpha * y)
        y = y + step * z
        out.append(y)
    return torch.stack(out, 1), torch.stack([z, y], -1)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"reversible": True}, {"mode": "newton"}])
def test_outputs_state_and_gradients_are_the_papers_equations(arguments, resets):
    mixer, (x, start) = make(**arguments), inputs()
    reset = reset_mask(2, TIME, rate=0.1) if resets else None
    assert reset is None or reset[:, 1:].any()
    wanted = [x, start, *mixer.parameters()]
    found, gradients = [], []
    for y, state in (mixer(x, start, reset=reset), by_hand(mixer, x, start, reset)):
        weight = torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
        loss = (weight * y).sum() + state.square().sum() + state[..., 0].sum()
        found.append((y, state))
        gradients.append(torch.autograd.grad(loss, wanted))
    assert_agree(found[0], found[1])
    assert_agree(gradients[0], gradients[1], "gradients")


def test_the_reversible_mixer_passes_the_laws():
    check_mixer(make(reversible=True).float(), time=9, long=64, compiler=None)


def saved(mixer, time, reset=None):
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    x, start = inputs(time)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mixer(x, start, reset=reset)
    return sum(sizes)


def test_the_reversible_backward_pass_saves_no_states():
    loop, reversible = make(), make(reversible=True)
    rows = 2 * D
    # x of the Linear and V x
    growth = saved(reversible, 80) - saved(reversible, 40)
    assert growth == 40 * 2 * rows
    assert saved(loop, 80) - saved(loop, 40) > 3 * growth


@thorough
def test_compiled_loops_of_many_steps_rebuild_their_states_too():
    torch.compiler.reset()
    mixer = make(reversible=True)
    compiled = torch.compile(mixer, backend="eager", dynamic=False)
    assert saved(compiled, 80) - saved(compiled, 40) == saved(mixer, 80) - saved(mixer, 40)
    x, start = inputs(40)
    (y, state), expected = compiled(x, start), mixer(x, start)
    assert_agree((y, state), expected)
    assert_agree(torch.autograd.grad(y.sum(), mixer.w), torch.autograd.grad(expected[0].sum(), mixer.w))


def test_the_reversible_backward_pass_saves_the_states_before_resets():
    reset = torch.zeros(2, 40, dtype=torch.bool)
    mixer = make(reversible=True)
    without = saved(mixer, 40, reset)
    reset[0, 7] = reset[0, 20] = reset[1, 20] = True
    assert saved(mixer, 40, reset) - without == 3 * D * 2


def test_states_are_rebuilt_over_many_steps_in_float32():
    x = torch.randn(2, 1000, D, generator=generator(0))
    gradients = []
    for arguments in ({}, {"reversible": True}):
        mixer = make(**arguments).float()
        y, _ = mixer(x)
        gradients.append(torch.autograd.grad(y.square().mean(), list(mixer.parameters())))
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).abs().max() < 2e-3 * expected.abs().max()


def test_initial_values():
    torch.manual_seed(0)
    mixer = build("unicornn", 1000)
    assert 0 <= mixer.w.min() < 0.01 and 0.99 < mixer.w.max() <= 1
    assert -0.1 <= mixer.c.min() < -0.099 and 0.099 < mixer.c.max() <= 0.1
    assert 0.99 < mixer.V.weight.abs().max() / math.sqrt(6 / 65 / 1000) <= 1
    assert mixer.V.weight.std().item() == pytest.approx(math.sqrt(2 / 65 / 1000), rel=0.01)
    assert not mixer.V.bias.any() and mixer.state_size == 2000
    groups = {name: (group.name, group.weight_decay) for name, group in groups_of(mixer).items()}
    assert groups["w"] == groups["c"] == ("transition", False)


def test_a_reversible_mixer_refuses_newtons_method():
    with pytest.raises(ValueError, match="`reversible` needs the loop, but `mode` is 'newton'"):
        build("unicornn", 4, reversible=True, mode="newton")
