import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.mlstm import MLSTM
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator
from tests.nn.memory_loop import mlstm_loop

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> MLSTM:
    torch.manual_seed(0)
    mixer = build("mlstm", d_model, **arguments)
    assert isinstance(mixer, MLSTM)
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def silu(x):
    return x * torch.sigmoid(x)


def block_diagonal(x, projection):
    return x @ torch.block_diag(*projection.weight).T


def by_hand(mixer, x):
    """The paper's block, with its cell as a loop: y, u, and the last C and n."""
    u, z = (x @ mixer.up.weight.T).chunk(2, -1)
    c = u
    if mixer.conv.present:
        # torch's convolution has the taps the other way round
        taps = mixer.conv.weight.flip(-1)[:, None]
        padded = functional.pad(u.mT, (taps.shape[-1] - 1, 0))
        c = silu(functional.conv1d(padded, taps, mixer.conv.bias, groups=len(taps)).mT)
    q, k, v = block_diagonal(c, mixer.q), block_diagonal(c, mixer.k), block_diagonal(u, mixer.v)
    gates = torch.cat([q, k, v], -1)
    i = f = torch.ones(2, TIME, mixer.n_heads, dtype=x.dtype)
    if mixer.memory.i is not None:
        i = torch.exp(gates @ mixer.memory.i.weight.T + mixer.memory.i.bias)
    if mixer.memory.f is not None:
        f = torch.sigmoid(gates @ mixer.memory.f.weight.T + mixer.memory.f.bias)
    heads = [part.unflatten(-1, (mixer.n_heads, -1)) for part in (q, k, v)]
    h, C, n = mlstm_loop(*heads, i, f)
    mean, deviation = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
    normed = ((h - mean) / torch.sqrt(deviation + 1e-5)).flatten(-2) * mixer.norm.weight
    return (normed + mixer.skip * c) * silu(z) @ mixer.down.weight.T, u, C, n


@pytest.mark.parametrize(
    "arguments",
    [{}, {"conv_size": None}, {"input_gate": False}, {"forget_gate": "none", "n_heads": 3, "block_size": 3}],
)
def test_outputs_state_and_gradients_are_the_papers_equations(arguments):
    mixer = make(**{"n_heads": 2, "gate_std": 1.0} | arguments).double()
    assert (mixer.memory.i is None) == ("input_gate" in arguments)
    assert (mixer.memory.f is None) == ("forget_gate" in arguments)
    x = inputs().requires_grad_()
    with torch.no_grad():
        for vector in (mixer.norm.weight, mixer.skip):
            vector.uniform_(0.5, 2)
    y, state = mixer(x)
    expected, u, C, n = by_hand(mixer, x)
    assert_agree(y, expected)
    memory = state.memory * state.largest.exp()[..., None, None]
    assert_agree(memory, torch.cat([C.mT, n[..., None]], -1))
    if not mixer.conv.present:
        assert state.tail is None
    else:
        assert_agree(state.tail, u[:, -3:])
    wanted, weight = [x, *mixer.parameters()], torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad(y, wanted, weight)
    assert_agree(found, torch.autograd.grad(expected, wanted, weight), "gradients")


def test_token_mixing_is_the_magnitude_of_what_values_are_multiplied_by():
    mixer, x = make(n_heads=2, gate_std=1.0).double(), inputs()
    found = mixer.token_mixing(x)
    entries = torch.zeros(2, TIME, TIME, dtype=x.dtype)
    u, _ = (x @ mixer.up.weight.T).chunk(2, -1)
    c, _ = mixer.conv(u)
    q, k = (block_diagonal(c, projection) for projection in (mixer.q, mixer.k))
    gates = torch.cat([q, k, block_diagonal(u, mixer.v)], -1)
    i = torch.exp(gates @ mixer.memory.i.weight.T + mixer.memory.i.bias)
    f = torch.sigmoid(gates @ mixer.memory.f.weight.T + mixer.memory.f.bias)
    for m in range(TIME):
        # a value that is one at step m alone, in every head
        v = torch.zeros(2, TIME, 2, 1, dtype=x.dtype)
        v[:, m] = 1
        h, _, _ = mlstm_loop(q.unflatten(-1, (2, -1)), k.unflatten(-1, (2, -1)), v, i, f)
        entries[:, :, m] = h[..., 0].abs().mean(-1)
    assert_agree(found, entries)
    assert_agree(mixer.transitions(x).magnitude, f)


def test_a_reset_hides_the_steps_before_from_token_mixing():
    mixer, x = make(gate_std=1.0).double(), inputs()
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 3] = True
    found = mixer.token_mixing(x, reset=reset)
    assert not found[:, 3:, :3].any()
    assert_agree(found[:, 3:, 3:], mixer.token_mixing(x[:, 3:]))


def test_weights_start_as_in_the_released_code():
    mixer = make(128)
    small = math.sqrt(2 / (5 * 128))
    for weight in (mixer.up.weight, mixer.q.weight, mixer.k.weight, mixer.v.weight):
        assert weight.std().item() == pytest.approx(small, rel=0.08)
    assert mixer.down.weight.std().item() == pytest.approx(2 / math.sqrt(128), rel=0.02)
    assert mixer.q.weight.shape == (64, 4, 4)
    assert not mixer.memory.i.weight.any() and not mixer.memory.f.weight.any()
    assert mixer.memory.f.bias.tolist() == [3.0, 4.0, 5.0, 6.0]
    many = make(64, n_heads=64).memory.i.bias
    # four standard errors
    assert abs(many.mean().item()) < 0.05 and many.std().item() == pytest.approx(0.1, abs=0.036)


def test_layers_of_a_model_draw_their_down_projections_by_its_depth():
    config = ModelConfig(vocab_size=5, d_model=128, n_layers=4, mixer="mlstm", channel_mixing="none")
    torch.manual_seed(0)
    for mixer in LanguageModel(config).mixers:
        assert mixer.down.weight.std().item() == pytest.approx(2 / (4 * math.sqrt(128)), rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # d_inner 16 in 4 blocks of 4: up, q, k and v, convolution, gates, norm and skip, down
        ({}, 8 * 32 + 3 * 4 * 16 + 5 * 16 + 2 * (48 * 4 + 4) + 2 * 16 + 16 * 8),
        (
            {"d_inner": 12, "n_heads": 2, "block_size": 3, "conv_size": None, "forget_gate": "none"},
            8 * 24 + 3 * 4 * 9 + 36 * 2 + 2 + 2 * 12 + 12 * 8,
        ),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(parameter.numel() for parameter in make(8, **arguments).parameters()) == expected


def test_heads_and_blocks_are_as_many_as_divide_the_width():
    assert [make(d).n_heads for d in (2, 3, 4, 5, 64)] == [1, 2, 4, 2, 4]
    assert make(5).q.weight.shape == (5, 2, 2)
    assert make(64).state_size == 3 * 128 + 4 * (32 * 33 + 1)


def test_no_weight_decay_of_forget_gates():
    groups = groups_of(make())
    kept = {name for name, group in groups.items() if group.name == "transition" and not group.weight_decay}
    assert kept == {"memory.f.weight", "memory.f.bias"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 5}, "`d_inner` must be a positive multiple of `n_heads` = 5; got 12"),
        ({"block_size": 5}, "`block_size` must be a positive divisor of `d_inner` = 12; got 5"),
        ({"forget_gate": "tanh"}, "there is no `forget_gate` 'tanh'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
