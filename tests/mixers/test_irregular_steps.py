"""Irregular steps, `dt`: mixers that take them, and mixers that refuse them. `test_laws` has their laws."""

import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

from linrec import mixers
from linrec.testing import assert_agree, check_compile, generator
from tests.mixers import variants
from tests.tiers import thorough, tiered

D, TIME = 4, 7
TAKE = [name for name in mixers.names() if mixers.get(name).takes_dt]
# logarithms of step sizes, which take log dt as a further term
LOG_STEPS = {
    "lru": ("nu_log", "nu_log.bias", "theta_log"),
    "mamba": ("W_dt.bias", "b_dt"),
    "s4d": ("ssm.dt_log",),
    "s5": ("dt_log",),
}


def make(name: str, variant: str) -> mixers.Mixer:
    torch.manual_seed(0)
    return mixers.build(name, D, **variants.arguments(name, variant))


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(seed), dtype=torch.float64)


def times() -> torch.Tensor:
    """From 1/8 to 8."""
    return 8 ** (2 * torch.rand(2, TIME, generator=generator(5), dtype=torch.float64) - 1)


def step_by_step(mixer: nn.Module, names: tuple[str, ...], x: torch.Tensor, dt: torch.Tensor):
    """Regular steps of each row, with log dt added to the parameters called `names`."""
    parameters, outputs, last = dict(mixer.named_parameters()), [], []
    for row in range(len(x)):
        state, ys = None, []
        for t in range(x.shape[1]):
            moved = {name: parameters[name] + dt[row, t].log() for name in names if name in parameters}
            y, state = functional_call(mixer, moved, (x[row : row + 1, t : t + 1], state))
            ys.append(y)
        outputs.append(torch.cat(ys, 1))
        last.append(state if isinstance(state, torch.Tensor) else state[-1])
    return torch.cat(outputs), torch.cat(last)


@pytest.mark.parametrize(("name", "variant"), variants.tiered(*LOG_STEPS))
def test_a_step_of_dt_is_a_regular_step_with_longer_step_sizes(name, variant):
    mixer = make(name, variant).double()
    x, dt = inputs().requires_grad_(), times().requires_grad_()
    y, state = mixer(x, dt=dt)
    ours = y, state if isinstance(state, torch.Tensor) else state[-1]
    theirs = step_by_step(mixer, LOG_STEPS[name], x, dt)
    assert_agree(ours, theirs)
    wanted = [x, dt, *mixer.parameters()]
    cotangents = [torch.randn(tensor.shape, generator=generator(2), dtype=tensor.dtype) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents), torch.autograd.grad(theirs, wanted, cotangents)
    )


@pytest.mark.parametrize("name", TAKE)
def test_times_of_another_shape_or_dtype_are_refused(name):
    mixer, x = make(*variants.cases(name)[0]), torch.zeros(2, TIME, D)
    for dt in (torch.ones(TIME), torch.ones(1, TIME), torch.ones(2, TIME, 1)):
        message = f"`dt` must have shape (batch, time) = (2, {TIME}); got {tuple(dt.shape)}"
        with pytest.raises(ValueError, match=re.escape(message)):
            mixer(x, dt=dt)
    with pytest.raises(TypeError, match=r"`dt` must be of a real floating dtype; got torch.int64"):
        mixer(x, dt=torch.ones(2, TIME, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"`dt` must be positive; got values down to -0\.5"):
        mixer(x, dt=torch.linspace(-0.5, 1, TIME).expand(2, TIME))
    with pytest.raises(ValueError, match=r"`dt` must be positive; got values down to nan"):
        mixer(x, dt=torch.full((2, TIME), torch.nan))


@pytest.mark.parametrize(
    "name", tiered(["gla", "hyena", "lem"], [name for name in mixers.names() if name not in TAKE])
)
def test_other_mixers_refuse_times_and_name_mixers_that_take_them(name):
    mixer = make(*variants.cases(name)[0])
    message = rf"`dt` must be None for {type(mixer).__name__},.*\({', '.join(TAKE)}\)"
    with pytest.raises(TypeError, match=message):
        mixer(torch.zeros(2, TIME, D), dt=torch.ones(2, TIME))


def test_a_convolution_refuses_times():
    mixer = mixers.build("s4d", D, mode="convolution")
    with pytest.raises(ValueError, match="`dt` must be None in mode 'convolution'"):
        mixer(torch.zeros(2, TIME, D), dt=torch.ones(2, TIME))


@thorough
@pytest.mark.parametrize("name", tiered(["s5"], rare=TAKE))
def test_times_compile(name):
    mixer = make(*variants.cases(name)[0])

    def timed(given, state=None):
        return mixer(given[0], state, dt=given[1])

    check_compile(timed, (inputs().float(), times().float()), compiler="eager")


@thorough
@pytest.mark.parametrize("name", TAKE)
def test_gradients_of_times_are_those_of_finite_differences(name):
    mixer, x = make(*variants.cases(name)[0]).double(), inputs()
    assert torch.autograd.gradcheck(lambda dt: mixer(x, dt=dt)[0], times().requires_grad_())
