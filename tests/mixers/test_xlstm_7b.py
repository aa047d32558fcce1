import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.xlstm_7b import XLSTM7B
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator
from tests.nn.memory_loop import mlstm_loop

D, TIME = 8, 7


def make(d_model: int = D, **arguments) -> XLSTM7B:
    torch.manual_seed(0)
    mixer = build("xlstm_7b", d_model, **arguments)
    assert isinstance(mixer, XLSTM7B)
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def heads(mixer, x):
    return [(x @ linear.weight.T).unflatten(-1, (2, -1)) for linear in (mixer.q, mixer.k, mixer.v)]


def gates(mixer, x, cap):
    i, f = (x @ gate.weight.T + gate.bias for gate in (mixer.memory.i, mixer.memory.f))
    if cap is not None:
        i, f = cap * torch.tanh(i / cap), cap * torch.tanh(f / cap)
    return torch.exp(i), torch.sigmoid(f) if mixer.memory.sigmoid else torch.exp(f)


@pytest.mark.parametrize("forget_gate", ["sigmoid", "exponential"])
@pytest.mark.parametrize("cap", [15.0, 1.0, None])
def test_outputs_state_and_gradients_are_the_papers_equations(cap, forget_gate):
    mixer = make(n_heads=2, d_v=6, gate_cap=cap, gate_std=2.0, forget_gate=forget_gate).double()
    assert mixer.memory.sigmoid == (forget_gate == "sigmoid")
    x = inputs().requires_grad_()
    with torch.no_grad():
        # many gates within the cap, others not
        mixer.memory.i.bias.zero_()
        mixer.norm.weight.uniform_(0.5, 2)
    h, C, n = mlstm_loop(*heads(mixer, x), *gates(mixer, x, cap))
    mean, deviation = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
    normed = ((h - mean) / torch.sqrt(deviation + 1e-6)).flatten(-2) * mixer.norm.weight
    expected = (torch.sigmoid(x @ mixer.gate.weight.T) * normed) @ mixer.out.weight.T
    y, state = mixer(x)
    assert_agree(y, expected)
    memory = state.memory * state.largest.exp()[..., None, None]
    assert_agree(memory, torch.cat([C.mT, n[..., None]], -1))
    wanted, weight = [x, *mixer.parameters()], torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad(y, wanted, weight)
    assert_agree(found, torch.autograd.grad(expected, wanted, weight), "gradients")


def test_token_mixing_is_the_magnitude_of_what_values_are_multiplied_by():
    mixer, x = make(n_heads=2, gate_std=1.0).double(), inputs()
    q, k, _ = heads(mixer, x)
    i, f = gates(mixer, x, 15.0)
    entries = torch.zeros(2, TIME, TIME, dtype=x.dtype)
    for m in range(TIME):
        # a value that is one at step m alone, in every head
        v = torch.zeros(2, TIME, 2, 1, dtype=x.dtype)
        v[:, m] = 1
        entries[:, :, m] = mlstm_loop(q, k, v, i, f)[0][..., 0].abs().mean(-1)
    assert_agree(mixer.token_mixing(x), entries)
    assert_agree(mixer.transitions(x).magnitude, f)


def test_weights_start_as_in_the_released_code():
    mixer = make(128)
    small = math.sqrt(2 / (5 * 128))
    for linear in (mixer.q, mixer.k, mixer.v, mixer.gate):
        assert linear.weight.std().item() == pytest.approx(small, rel=0.04)
    assert mixer.out.weight.std().item() == pytest.approx(2 / math.sqrt(128), rel=0.04)
    assert not mixer.memory.i.weight.any() and not mixer.memory.f.weight.any()
    assert mixer.memory.i.bias.tolist() == [-10.0] * 8
    assert_agree(mixer.memory.f.bias, torch.linspace(3, 6, 8))


def test_layers_of_a_model_draw_their_output_projections_by_its_depth():
    config = ModelConfig(vocab_size=5, d_model=128, n_layers=4, mixer="xlstm_7b")
    torch.manual_seed(0)
    for mixer in LanguageModel(config).mixers:
        assert mixer.out.weight.std().item() == pytest.approx(2 / (4 * math.sqrt(128)), rel=0.04)


def test_widths_and_parameters_are_the_papers():
    mixer = make(64)
    assert (mixer.n_heads, mixer.d_key, mixer.d_value) == (8, 4, 8)
    # q and k, v, W_g and W_o, gates with biases, norm
    expected = 2 * 64 * 32 + 3 * 64 * 64 + 2 * (64 * 8 + 8) + 64
    assert sum(parameter.numel() for parameter in mixer.parameters()) == expected
    assert mixer.state_size == 8 * (4 * 9 + 1)
    assert [make(d).n_heads for d in (1, 6, 8, 12)] == [1, 1, 4, 2]
    assert make(8, d_v=6).n_heads == 2


def test_no_weight_decay_of_forget_gates():
    groups = groups_of(make())
    kept = {name for name, group in groups.items() if group.name == "transition" and not group.weight_decay}
    assert kept == {"memory.f.weight", "memory.f.bias"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`d_qk` must be a positive multiple of `n_heads` = 3; got 4"),
        ({"d_v": 5, "n_heads": 2}, "`d_v` must be a positive multiple of `n_heads` = 2; got 5"),
        ({"gate_cap": -1.0}, "`gate_cap` must be positive and finite; got -1.0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
