"""Strongly-typed networks: the paper's equations, step by step, and the exact online gradient."""

import pytest
import torch

from linrec.learning import RTRL
from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, TIME = 5, 9
VARIANTS = ["rnn", "gru", "lstm"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make(variant):
    torch.manual_seed(0)
    return build("strongly_typed_rnn", D, variant=variant).double()


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer, x, reset):
    def of(layer, now, before):
        V_and_W = layer.weight.split(D, 1)
        y = sum(part @ W.T for part, W in zip((now, before), V_and_W, strict=False))
        return y if layer.bias is None else y + layer.bias

    c, before, outputs = torch.zeros(2, D).double(), torch.zeros(2, D).double(), []
    for t in range(TIME):
        c, before = (torch.where(reset[:, t, None], 0.0, part) for part in (c, before))
        z, f = of(mixer.z, x[:, t], before), torch.sigmoid(of(mixer.f.f, x[:, t], before))
        o = torch.tanh(of(mixer.o, x[:, t], before)) if mixer.o is not None else None
        c = f * c + z * o if mixer.variant == "gru" else f * c + (1 - f) * z
        outputs.append(c * o if mixer.variant == "lstm" else c)
        before = x[:, t]
    return torch.stack(outputs, 1), c, before


@every_variant
def test_the_recurrence_and_its_gradients_are_the_papers_equations(variant):
    mixer, x, reset = make(variant), inputs().requires_grad_(), reset_mask(2, TIME, rate=0.2)
    y, state = mixer(x, reset=reset)
    h, c, last = by_hand(mixer, x, reset)
    assert_agree((y, state.c), (h, c))
    assert state.x is None if variant == "rnn" else torch.equal(state.x, last)
    cotangent, wanted = torch.randn_like(y), [x, *mixer.parameters()]
    found, expected = (torch.autograd.grad(out, wanted, cotangent) for out in (y, h))
    assert_agree(found, expected)


@every_variant
def test_parameters_and_what_forgets(variant):
    mixer, width = make(variant), D if variant == "rnn" else 2 * D
    gates = 2 if variant == "rnn" else 3
    # features of a T-RNN have no bias
    biases = D if variant == "rnn" else 3 * D
    assert sum(p.numel() for p in mixer.parameters()) == gates * width * D + biases
    marked = {name for name, group in groups_of(mixer).items() if group.name == "transition"}
    assert marked == {"f.f.weight", "f.f.bias"}


@every_variant
def test_every_parameter_of_the_memory_learns_exactly_online(variant):
    learner = RTRL(make(variant))
    assert set(learner.layers[0].owners) == {
        name for name, _ in learner.model.named_parameters() if variant == "gru" or not name.startswith("o.")
    }
    assert learner.layers[0].untraced == ()


def test_an_unknown_variant_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'lstm'"):
        build("strongly_typed_rnn", D, variant="lst")
