import math

import pytest
import torch
from torch.nn import functional

from linrec.models import LanguageModel, ModelConfig
from linrec.nn import GLU, FeedForward, RWKVChannelMixing
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_init_state,
    check_mixer,
    check_reset,
    check_split,
    check_steps,
    generator,
)
from tests.tiers import thorough

ACTIVATIONS = {
    "sigmoid": lambda z: 1 / (1 + (-z).exp()),
    "silu": lambda z: z / (1 + (-z).exp()),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "identity": lambda z: z,
}
D, HIDDEN = 4, 6
VARIANTS = {"paper": {}, "no receptance": {"receptance": False}, "no token shift": {"token_shift": False}}
every_variant = pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu_is_its_equation(activation):
    torch.manual_seed(0)
    glu = GLU(4, 7, activation=activation).double()
    x = torch.randn(2, 3, 4, generator=generator(), dtype=torch.float64)
    gate = ACTIVATIONS[activation](x @ glu.gate.weight.T + glu.gate.bias)
    hidden = gate * (x @ glu.up.weight.T + glu.up.bias)
    assert_agree(glu(x), hidden @ glu.down.weight.T + glu.down.bias)
    assert sum(p.numel() for p in glu.parameters()) == 3 * 4 * 7 + 2 * 7 + 4


def test_the_default_is_the_unit_of_that_name():
    assert GLU(4, 7).activation == "sigmoid"


def test_an_unknown_activation_gives_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'sigmoid'"):
        GLU(4, 7, activation="sigmod")


def make(**arguments) -> RWKVChannelMixing:
    torch.manual_seed(0)
    return RWKVChannelMixing(D, HIDDEN, **{"zero_init": False} | arguments)


@every_variant
def test_outputs_are_those_of_the_equations(arguments):
    mixing = make(**arguments).double()
    x = torch.randn(2, 7, D, generator=generator(), dtype=torch.float64)
    before, mu = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1), [torch.zeros(D)] * 2
    if mixing.shift.present:
        mu = [share.normal_(generator=generator(1)) for share in mixing.shift.mu.requires_grad_(False)]
    k = (mu[0] * before + (1 - mu[0]) * x) @ mixing.k.weight.T
    expected = (k * k * (k > 0)) @ mixing.v.weight.T
    if mixing.r is not None:
        r = (mu[1] * before + (1 - mu[1]) * x) @ mixing.r.weight.T
        expected = expected / (1 + torch.exp(-r))
    assert_agree(mixing(x)[0], expected)


def test_laws():
    check_mixer(make(), time=9, compiler="aot_eager")
    check_mixer(make(receptance=False), time=9, long=64, compiler=None)


def test_without_token_shift_there_is_no_state():
    mixing, x = make(token_shift=False), torch.randn(2, 5, D, generator=generator())
    assert mixing(x)[1] is None and mixing.state_size == 0
    check_init_state(mixing, x)
    check_steps(mixing, x)


def test_where_it_starts():
    layers = [RWKVChannelMixing(D, HIDDEN) for _ in range(4)]
    RWKVChannelMixing.share(layers)
    for layer, mixing in enumerate(layers):
        for share in mixing.shift.mu:
            expected = [1 - (i / D) ** (1 - layer / 4) for i in range(D)]
            assert_agree(share, torch.tensor(expected))
        assert not mixing.v.weight.any() and not mixing.r.weight.any()
        assert_agree(mixing.k.weight.T @ mixing.k.weight, torch.eye(D))
    assert_agree(RWKVChannelMixing(D, HIDDEN).shift.mu[0], layers[0].shift.mu[0])
    assert sum(p.numel() for p in layers[0].parameters()) == 2 * D * HIDDEN + D * D + 2 * D


@thorough
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("mixer", ["rwkv4", "rwkv6", "hgru"])
def test_a_language_model_with_it_streams(mixer, norm_position):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=6,
        d_model=8,
        n_layers=2,
        mixer=mixer,
        d_channel_mixing=12,
        channel_mixing="rwkv",
        norm_position=norm_position,
        embedding_norm=True,
    )
    model = LanguageModel(config).double()
    assert_agree(model.blocks[1].channel_mixing.shift.mu[0], 1 - (torch.arange(8) / 8).sqrt())
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(parameter.numel())).double()
    tokens = torch.randint(6, (3, 9), generator=generator())
    for law in (check_split, check_steps, check_reset, check_batch_independence, check_init_state):
        law(model, tokens)


def test_argument_errors():
    with pytest.raises(ValueError, match=r"`d_hidden`.*1; got 0"):
        RWKVChannelMixing(D, 0)


def test_feed_forward_is_linear_gelu_linear_with_biases():
    ffn = FeedForward(4, 7)
    x = torch.randn(2, 3, 4, generator=generator())
    hidden = functional.gelu(x @ ffn.up.weight.T + ffn.up.bias)
    assert_agree(ffn(x), hidden @ ffn.down.weight.T + ffn.down.bias)
    assert sum(p.numel() for p in ffn.parameters()) == 4 * 7 + 7 + 7 * 4 + 4


def test_squared_relu_without_biases():
    ffn = FeedForward(4, 7, activation="squared_relu", bias=False)
    x = torch.randn(2, 3, 4, generator=generator())
    assert_agree(ffn(x), (x @ ffn.up.weight.T).clamp(min=0).square() @ ffn.down.weight.T)
    assert sum(p.numel() for p in ffn.parameters()) == 2 * 4 * 7
