"""What `inspect_model` collects is what the mixers of the model do in that run."""

import pytest
import torch
from torch import nn

from linrec.lab.inspection import inspect_model
from linrec.mixers import Mixer, build
from linrec.models import (
    Bidirectional,
    ImageScan,
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
)
from linrec.testing import assert_agree, generator

D, TIME = 4, 5
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])


def language_model(mixer: str, **arguments) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=7, d_model=D, n_layers=2, mixer=mixer, mixer_args=arguments)
    return LanguageModel(config).double().eval()


def mixer_of(name: str, **arguments) -> Mixer:
    torch.manual_seed(1)
    return build(name, D, **arguments).double().eval()


def steps(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=generator(), dtype=torch.float64)


def test_transitions_of_every_layer_are_those_of_its_input():
    model = language_model("gate_loop")
    layers = inspect_model(model, TOKENS)
    assert [layer.name for layer in layers] == ["1", "2"]
    x = model.embedding.weight[TOKENS]
    for layer, block in zip(layers, model.blocks, strict=True):
        # the norm, the two projections of eq. 25 and their activations, number by number
        norm, gates = block.mixer_norm, block.mixer.transition
        u = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        u = u * norm.weight + norm.bias
        gamma = torch.einsum("btd,cd->btc", u, gates.magnitude.weight) + gates.magnitude.bias
        assert_agree(layer.magnitude, 1 / (1 + torch.exp(-gamma)), "magnitudes")
        assert_agree(
            layer.phase, torch.einsum("btd,cd->btc", u, gates.phase.weight) + gates.phase.bias, "phases"
        )
        x, _ = block(x)


def test_token_mixing_with_one_head_gives_the_output():
    attention, x = mixer_of("attention", n_heads=1), steps(2, TIME)
    (layer,) = inspect_model(attention, x)
    assert layer.magnitude is None and layer.phase is None
    assert_agree(attention.out(layer.mixing @ attention.v(x)), attention(x)[0], "attention")

    loop = mixer_of("gate_loop", n_heads=1, phase_activation="none")
    with torch.no_grad():
        # gates that are positive numbers: then the magnitudes of the weights are the weights
        for gate in (loop.q, loop.k):
            gate.weight.zero_()
            gate.bias.uniform_(0.5, 1.5)
    (layer,) = inspect_model(loop, x)
    assert_agree(layer.mixing @ loop.v(x), loop(x)[0], "GateLoop")


def test_a_constant_is_not_repeated_over_time():
    (layer,) = inspect_model(mixer_of("lru"), steps(2, TIME))
    assert layer.magnitude.shape == layer.phase.shape == (D,)
    hgru = inspect_model(mixer_of("hgru"), steps(2, TIME))[0]
    assert hgru.magnitude.shape == (2, TIME, D) and hgru.phase.shape == (D,)


@pytest.mark.parametrize("shared", [False, True])
def test_directions_are_told_in_the_order_of_the_input(shared):
    ahead = mixer_of("hgru", lower_bound=0.0)
    torch.manual_seed(2)
    back = None if shared else build("hgru", D, lower_bound=0.0).double()
    x = steps(1, TIME)
    layers = inspect_model(Bidirectional(ahead, back), x)
    assert [layer.name for layer in layers] == ["1 forward", "1 backward"]
    for layer, mixer in zip(layers, (ahead, back or ahead), strict=True):
        a = torch.sigmoid(mixer.mu(x))
        assert_agree(layer.magnitude, a, layer.name)
        for n in range(TIME):
            for m in range(TIME):
                passed = a[0, m + 1 : n + 1] if layer.name == "1 forward" else a[0, n:m]
                met = m <= n if layer.name == "1 forward" else m >= n
                expected = ((1 - a[0, m]) * passed.prod(0)).mean() * met
                assert_agree(layer.mixing[0, n, m], expected, f"{layer.name}, {n} from {m}")


def test_lines_of_images_are_sequences():
    mixer, image = mixer_of("gate_loop", transition="data"), steps(2, 3, 5)
    layers = inspect_model(ImageScan(mixer, directions=("right", "left", "up")), image)
    assert [layer.name for layer in layers] == ["1 right", "1 left", "1 up"]
    magnitude = torch.sigmoid(mixer.transition.magnitude(image))
    for layer in layers[:2]:
        assert_agree(layer.magnitude, magnitude.flatten(0, 1), layer.name)
    assert_agree(layers[2].magnitude, magnitude.transpose(1, 2).flatten(0, 1), "columns")
    assert not layers[1].mixing.tril(-1).any() and layers[1].mixing.triu(1).any()


def test_models_in_both_directions_and_arguments_by_name():
    torch.manual_seed(0)
    config = SequenceClassifierConfig(
        n_outputs=2, vocab_size=7, mixer="hgru", d_model=D, n_layers=2, bidirectional=True
    )
    layers = inspect_model(SequenceClassifier(config).eval(), TOKENS, lengths=torch.tensor([5, 3]))
    assert [layer.name for layer in layers] == ["1 forward", "1 backward", "2 forward", "2 backward"]
    for layer in layers:
        # padding and text do not reach each other
        assert not layer.mixing[1, 3:, :3].any() and not layer.mixing[1, :3, 3:].any()
        assert (layer.mixing[0].sum(-1) > 0).all()


def test_reset_cuts_the_matrices():
    reset = torch.tensor([[False, False, True, False, False]] * 2)
    for mixer in ("hgru", "gate_loop", "attention"):
        for layer in inspect_model(language_model(mixer), TOKENS, reset=reset):
            assert not layer.mixing[:, 2:, :2].any() and layer.mixing[:, 3, 2].all()


def test_matrices_can_be_left_out_and_a_mixer_may_tell_nothing():
    (layer,) = inspect_model(mixer_of("hgru"), steps(2, TIME), token_mixing=False)
    assert layer.mixing is None and layer.magnitude is not None

    class Plain(Mixer):
        init_state = state_size = None

        def forward(self, x, state=None, *, reset=None):
            return x, None

    (layer,) = inspect_model(Plain(D), steps(2, TIME))
    assert (layer.name, layer.magnitude, layer.phase, layer.mixing) == ("1", None, None, None)


def test_the_model_is_left_as_it_was():
    model = language_model("gate_loop")
    layers = inspect_model(model, TOKENS)
    assert not any(tensor.requires_grad for layer in layers for tensor in (layer.magnitude, layer.mixing))
    with pytest.raises(ValueError, match="batch, time"):
        inspect_model(model, TOKENS[0])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_mixers_is_refused():
    with pytest.raises(ValueError, match=r"`model` must run at least one .* got Linear without"):
        inspect_model(nn.Linear(D, D).double(), steps(2, TIME))
