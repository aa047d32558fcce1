import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.rwkv7 import RWKV7
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, SequenceClassifierConfig
from linrec.nn import groups_of
from linrec.testing import assert_agree, check_reset, check_split, check_steps, generator

D, RANKS = 8, {"decay_rank": 3, "rate_rank": 4, "value_rank": 2, "gate_rank": 5}
CONFIG = {
    "vocab_size": 6,
    "d_model": D,
    "n_layers": 3,
    "mixer_args": RANKS | {"n_heads": 2, "zero_init": False},
    "channel_mixing": "rwkv7",
    "d_channel_mixing": 12,
    "embedding_norm": True,
}


def make(**arguments) -> RWKV7:
    mixer = build("rwkv7", D, **{"n_heads": 2, "zero_init": False} | RANKS | arguments)
    assert isinstance(mixer, RWKV7)
    return mixer


def model(**changed) -> LanguageModel:
    torch.manual_seed(0)
    found = LanguageModel(ModelConfig(**{"mixer": "rwkv7"} | CONFIG | changed)).double()
    with torch.no_grad():
        for parameter in found.blocks.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(parameter.numel())).double()
    return found


@pytest.mark.parametrize(("layer", "n_layers"), [(0, 1), (0, 4), (2, 4), (3, 4)])
def test_constants_start_where_the_released_code_has_them(layer, n_layers):
    layers = [make() for _ in range(n_layers)]
    RWKV7.share(layers)
    mixer, p, depth = layers[layer], 1 - layer / n_layers, layer / max(n_layers - 1, 1)
    for i in range(D):
        z = (i % 4 - 1.5) / 1.5
        z, linear, share = z * abs(z), i / (D - 1) - 0.5, i / D
        for mu, power in zip(mixer.shift.mu, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            assert mu[i].item() == pytest.approx(1 - share ** (power * p), abs=1e-6)
        decay = -6 + 6 * (i / (D - 1)) ** (1 + depth**0.3) + 0.5 + 2.5 * z
        assert mixer.w[2].bias[i].item() == pytest.approx(decay, abs=1e-5)
        assert mixer.a[2].bias[i].item() == pytest.approx(-0.19 + 0.3 * z + 0.4 * linear, abs=1e-6)
        assert mixer.xi[i].item() == pytest.approx(0.71 - 0.1 * linear)
        if layer:
            assert mixer.residual[2].bias[i].item() == pytest.approx(0.73 - 0.4 * linear)
    assert (mixer.residual is None) == (layer == 0)
    assert (mixer.alpha == 1.02).all() and (mixer.rho == -0.04).all()
    assert_agree(mixer.norm.weight, torch.full((D,), ((layer + 1) / n_layers) ** 0.7))


def test_matrices_start_uniform_and_low_ranks_orthogonal():
    mixer = build("rwkv7", 64)
    for part, bound in ((mixer.r, 0.5), (mixer.v, 0.5), (mixer.k, 0.05), (mixer.out, 0)):
        assert 0.99 * bound / 8 <= part.weight.abs().max().item() <= bound / 8
    for lora in (mixer.w, mixer.a, mixer.gate):
        assert not lora[0].weight.any()
        assert_agree(lora[2].weight.T @ lora[2].weight, 0.01 * torch.eye(32))


def test_the_defaults_are_the_papers_sizes():
    mixer = build("rwkv7", 768)
    assert mixer.n_heads == 12 and mixer.ranks == {"w": 64, "a": 64, "v": 32, "g": 128}


def test_the_decay_is_marked_and_low_ranks_do_not_decay():
    layers = [make(), make()]
    RWKV7.share(layers)
    groups = groups_of(layers[1])
    marked = {name for name, group in groups.items() if group.name == "transition"}
    assert marked == {"w.0.weight", "w.2.weight", "w.2.bias"}
    kept = {name.split(".")[0] for name, group in groups.items() if not group.weight_decay}
    assert kept == {"w", "a", "gate", "residual"}


def test_later_layers_mix_the_first_layers_values_into_theirs():
    # lerp weights of 1 replace the values of every layer by those of the first; weights of 0 keep them
    tokens, plain = torch.randint(6, (2, 7), generator=generator()), model()
    outputs = []
    for bias in (-math.inf, math.inf):
        with torch.no_grad():
            for block in plain.blocks[1:]:
                block.mixer.residual[2].weight.zero_()
                block.mixer.residual[2].bias.fill_(bias)
            outputs.append(plain(tokens)[0])
    values = []
    for block in plain.blocks:
        block.mixer.v.register_forward_hook(lambda module, inputs, v: values.append(v))
    plain(tokens)
    first, *later = values
    for block, replaced in zip(plain.blocks[1:], later, strict=True):
        block.mixer.v.register_forward_hook(lambda module, inputs, v: first)
        with torch.no_grad():
            block.mixer.residual[2].bias.fill_(-math.inf)
        assert (replaced - first).abs().max() > 0.01
    assert_agree(plain(tokens)[0], outputs[1])
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("changed", [{}, {"mixer": ("hgru", "rwkv7"), "mixer_args": {}}])
def test_a_language_model_with_it_streams(changed):
    found, tokens = model(**changed), torch.randint(6, (3, 9), generator=generator())
    for law in (check_split, check_steps, check_reset):
        law(found, tokens)


def test_gradients_are_those_without_recomputation():
    found, tokens, gradients = model(), torch.randint(6, (2, 7), generator=generator()), []
    for found.recompute in (False, True):
        loss = found(tokens)[0].square().sum()
        gradients.append(torch.autograd.grad(loss, tuple(found.parameters())))
    assert_agree(gradients[1], gradients[0])


def test_a_model_that_passes_no_values_on_is_refused():
    layers = [make(), make()]
    RWKV7.share(layers)
    with pytest.raises(ValueError, match="`values` of the first layer must reach each RWKV7 of a stack"):
        layers[1](torch.zeros(1, 2, D))


def test_layers_of_two_directions_have_values_of_their_own():
    config = SequenceClassifierConfig(
        n_outputs=3, vocab_size=6, n_layers=2, d_model=D, mixer="rwkv7", bidirectional=True
    )
    classifier = SequenceClassifier(config)
    assert not any("residual" in name for name, _ in classifier.named_parameters())
    assert classifier(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
        ({"value_rank": 0}, "`value_rank` must be at least 1; got 0"),
        ({"norm_eps": 0.0}, "`norm_eps` must be"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
