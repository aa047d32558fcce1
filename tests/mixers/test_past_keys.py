"""Keys and values of earlier steps, which the states of some mixers hold in evaluation, without gradients."""

import contextlib
import itertools

import pytest
import torch

from linrec import mixers
from linrec.testing import assert_agree, generator
from linrec.trees import leaves, map_tree
from tests.tiers import thorough

CASES = {
    "transformer_xl": {},
    "transformer_xl, same length": {"same_length": True},
    "transformer_xl, no memory": {"memory_length": 0},
    "compressive_transformer": {"compression_rate": 2},
    "compressive_transformer, most used": {"compression_rate": 2, "compression": "most_used"},
}
each = pytest.mark.parametrize("case", CASES)
X = torch.randn(2, 19, 6, generator=generator(), dtype=torch.float64)


def build(case):
    torch.manual_seed(0)
    sizes = {"n_heads": 2, "segment_length": 4, "init_std": 0.5}
    return mixers.build(case.split(",")[0], 6, **sizes, **CASES[case]).double().eval()


@each
def test_a_step_without_gradients_projects_itself_alone(case):
    mixer, state, steps = build(case), None, []
    mixer.k.register_forward_hook(lambda module, given, y: steps.append(y.shape[1]))
    with torch.no_grad():
        _, state = mixer(X[:, :9], state)
        # within a segment; at its end, compressed vectors are new too
        for n in (9, 10):
            steps.clear()
            _, state = mixer(X[:, n : n + 1], state)
            assert sum(steps) == 1


@thorough
@each
@pytest.mark.parametrize("lengths", [(1,) * 19, (3, 3, 6, 1, 6), (5, 14)])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("resets", [True, False])
def test_calls_with_and_without_gradients_follow_one_another(case, lengths, first, resets):
    mixer = build(case)
    reset = torch.zeros(2, 19, dtype=torch.bool)
    reset[0, 6] = reset[1, 13] = resets
    expected, end = mixer(X, reset=reset)
    outputs, state = [], None
    for n, (x, cut) in enumerate(zip(X.split(lengths, 1), reset.split(lengths, 1), strict=True)):
        with torch.set_grad_enabled(n % 2 == first):
            y, state = mixer(x, state, reset=cut if resets else None)
        outputs.append(y)
    assert_agree(torch.cat(outputs, 1), expected)
    assert_agree(mixer(X, state)[0], mixer(X, end)[0])


@each
def test_gradients_after_a_call_without_gradients_are_whole(case):
    mixer = build(case)

    def gradients(context):
        with context:
            _, state = mixer(X[:, :10])
        y, _ = mixer(X[:, 10:12], map_tree(torch.Tensor.detach, state))
        # the loss of f aside
        return torch.autograd.grad(y.square().sum(), [mixer.k.weight, mixer.v.weight])

    assert_agree(gradients(torch.no_grad()), gradients(contextlib.nullcontext()))


def test_keys_and_values_of_a_state_follow_autocast():
    mixer = build("transformer_xl").float().requires_grad_(False)
    x = X.float()
    with torch.no_grad():
        _, state = mixer(x[:, :6])
        with torch.autocast("cpu", torch.bfloat16):
            y, end = mixer(x[:, 6:7], state)
    assert y.dtype == torch.bfloat16 and end.segment[1].dtype == torch.bfloat16
    assert {part.dtype for part in leaves(end.memory)} == {torch.float32, torch.bool}


@pytest.mark.parametrize(
    "name", ["transformer_xl", "compressive_transformer", "block_recurrent", "infini_attention"]
)
def test_a_state_is_right_after_the_weights_change(name):
    """In training mode, made with gradients or without, and read with gradients or without."""
    torch.manual_seed(0)
    mixer = mixers.build(name, 8, n_heads=2, segment_length=4)
    x = torch.randn(1, 10, 8, generator=generator())
    states = {}
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            states[gradients] = mixer(x[:, :6])[1]
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.mul_(1.3)
    for made, called in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(called):
            found = mixer(x[:, 6:], states[made])[0].detach()
        assert_agree(found, mixer(x[:, 6:], states[True])[0].detach())
