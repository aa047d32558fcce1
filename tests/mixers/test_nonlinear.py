"""Mixers on `nonlinear_scan`: the parallel modes agree with the loop."""

import pytest
import torch

from linrec import mixers
from linrec.ops.nonlinear_scan import ConvergenceError
from linrec.testing import assert_agree, generator, reset_mask
from linrec.trees import leaves
from tests.mixers import variants
from tests.tiers import tiered

D_MODEL = 4
# whose iterations do not converge on the test's inputs
DIVERGING = {("scornn", "damped"), ("unicornn", "damped")}


@pytest.mark.parametrize("name", variants.NONLINEAR)
@pytest.mark.parametrize("mode", tiered(["newton"], ["quasi_newton", "damped"]))
def test_modes_agree(name, mode):
    torch.manual_seed(0)
    loop = mixers.build(name, D_MODEL).double().eval()
    parallel = mixers.build(name, D_MODEL, mode=mode).double().eval()
    parallel.load_state_dict(loop.state_dict())
    x = torch.randn(2, 60, D_MODEL, generator=generator(0), dtype=torch.float64, requires_grad=True)
    reset = reset_mask(2, 60, rate=0.05)
    found = []
    for mixer in (loop, parallel):
        if mixer is parallel and (name, mode) in DIVERGING:
            with pytest.raises(ConvergenceError):
                mixer(x, reset=reset)
            return
        y, state = mixer(x, reset=reset)
        loss = y.square().sum() + sum(part.abs().square().sum() for part in leaves(state))
        found.append((y, state, torch.autograd.grad(loss, [x, *mixer.parameters()])))
    assert_agree(found[1], found[0])


@pytest.mark.parametrize("name", ["exp_rnn", "scornn", "nn_rnn", "u_rnn", "eu_rnn"])
def test_modes_agree_where_modrelu_cuts(name):
    """Their biases start near zero, where modReLU is linear."""
    torch.manual_seed(0)
    loop = mixers.build(name, D_MODEL).double()
    with torch.no_grad():
        loop.b.normal_(-0.2, 0.1)
        for weight in (parameter for key, parameter in loop.named_parameters() if key.endswith("weight")):
            weight.normal_(std=0.5)
    parallel = mixers.build(name, D_MODEL, mode="newton").double()
    parallel.load_state_dict(loop.state_dict())
    x = torch.randn(2, 60, D_MODEL, generator=generator(0), dtype=torch.float64, requires_grad=True)
    start = loop.init_state(2)
    start = torch.randn(start.shape, generator=generator(1), dtype=start.dtype, requires_grad=True)
    found = []
    for mixer in (loop, parallel):
        y, state = mixer(x, start)
        loss = y.square().sum() + state.abs().square().sum()
        found.append((y, state, torch.autograd.grad(loss, [x, start, *mixer.parameters()])))
    assert_agree(found[1], found[0])
    with torch.no_grad():
        loop.b.zero_()
        assert (loop(x, start)[0] - found[0][0]).abs().max() > 0.1
