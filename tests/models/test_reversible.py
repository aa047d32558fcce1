"""Reversible residuals beside plain autograd of the same equations."""

import weakref

import pytest
import torch

from linrec.models import (
    ImageClassifierConfig,
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
)
from linrec.models.config import MemoryConfig
from linrec.models.reversible import run_reversible
from linrec.testing import assert_agree, generator
from tests.tiers import tiered

D, V, TIME = 8, 5, 11


def make(mixer="gate_loop", n_layers=3, **arguments):
    torch.manual_seed(0)
    config = {"d_model": D, "d_channel_mixing": 12, "channel_mixing": "glu", "reversible": True}
    return LanguageModel(ModelConfig(V, n_layers=n_layers, mixer=mixer, **config | arguments)).double()


def tokens():
    return torch.randint(V, (2, TIME), generator=generator())


def resets():
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 4] = reset[1, 7] = True
    return reset


def gradients(model, **arguments):
    torch.manual_seed(1)
    y, _ = model.hidden(tokens(), reset=resets(), **arguments)
    wanted = [*model.blocks.parameters(), model.embedding.weight]
    return y, torch.autograd.grad((y * y.detach().cos()).sum(), wanted, allow_unused=True)


def test_the_equations():
    model = make(n_layers=2)
    x_1 = x_2 = model.embedding(tokens())
    for block in model.blocks:
        x_1 = x_1 + block.mixer(block.mixer_norm(x_2))[0]
        x_2 = x_2 + block.channel_mixing(block.channel_mixing_norm(x_1))
    assert_agree(model.hidden(tokens(), keep_state=False)[0], model.norm((x_1 + x_2) / 2))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mixer", tiered(["gate_loop", "reformer"], ["hgru", "attention", "lstm", "xl"]))
def test_gradients_are_those_of_plain_autograd(mixer, dropout):
    name = {"xl": "transformer_xl"}.get(mixer, mixer)
    model = make(name, dropout=dropout)
    # with states, activations are kept
    expected = gradients(model, keep_state=True)
    assert_agree(gradients(model, keep_state=False), expected)


def alive_after_forward(model):
    """Numbers that the graph holds after the forward pass."""

    class Held:
        def __init__(self, x):
            self.x = x

    held = weakref.WeakSet()

    def pack(x):
        # an output that an operation saves would hold its own graph
        item = Held(x.detach())
        held.add(item)
        return item

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item.x):
        y, _ = model.hidden(tokens(), keep_state=False)
    found = sum(item.x.numel() for item in held if item.x.shape[:1] == (2,))
    y.sum().backward()
    return found


def test_memory_does_not_grow_with_the_depth():
    two, eight = (alive_after_forward(make(n_layers=n)) for n in (2, 8))
    assert two == eight > 0
    plain = [alive_after_forward(make(n_layers=n, reversible=False)) for n in (2, 8)]
    assert plain[1] > 3 * plain[0] > 3 * two


def test_the_second_run_sees_autocast():
    model = make().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, found = gradients(model, keep_state=False)
        expected = gradients(model, keep_state=True)
    torch.testing.assert_close(y, expected[0], rtol=0, atol=0)
    # inputs are computed again with rounding errors of bfloat16
    for mine, other in zip(found, expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_states_are_those_of_a_model():
    model = make().eval()
    whole, _ = model(tokens())
    state, pieces = model.init_state(2), []
    for step in tokens().split([3, 1, 7], 1):
        y, state = model(step, state)
        pieces.append(y)
    assert_agree(torch.cat(pieces, 1), whole)


def test_an_encoder_in_both_directions():
    torch.manual_seed(0)
    model = SequenceClassifier(
        SequenceClassifierConfig(n_outputs=2, vocab_size=V, d_model=D, n_layers=2, reversible=True)
    ).double()
    lengths = torch.tensor([6, 11])
    y = model(tokens(), lengths=lengths)
    alone = torch.cat([model(tokens()[i : i + 1, :n]) for i, n in enumerate(lengths)])
    assert_agree(y, alone)
    found = torch.autograd.grad(y.square().sum(), model.parameters())
    x = model.embedded(tokens(), torch.arange(TIME) < lengths[:, None])
    reset = torch.arange(TIME) == lengths[:, None]
    x, _ = run_reversible(model.blocks, x, [None] * 2, reset=reset, dt=None, keep_state=True)
    valid = (torch.arange(TIME) < lengths[:, None])[..., None]
    mean = model.norm(x).masked_fill(~valid, 0).sum(1) / lengths[:, None]
    assert_agree(found, torch.autograd.grad(model.head(mean).square().sum(), model.parameters()))


def test_times_between_steps():
    model = make("s5")
    dt = torch.rand(2, TIME, generator=generator(), dtype=torch.float64) + 0.5
    assert_agree(gradients(model, dt=dt, keep_state=False), gradients(model, dt=dt, keep_state=True))
    dt.requires_grad_()
    y, _ = model.hidden(tokens(), dt=dt, keep_state=False)
    assert torch.autograd.grad(y.square().sum(), dt)[0].any()


@pytest.mark.parametrize(
    "arguments",
    [{"norm_position": "post"}, {"skip": False}, {"channel_mixing": "rwkv"}, {"channel_mixing": "none"}],
)
def test_other_blocks_are_refused(arguments):
    with pytest.raises(ValueError, match="`reversible` needs `norm_position` = 'pre', `skip`, and a channel"):
        make(**arguments)


def test_other_stacks_are_refused():
    with pytest.raises(ValueError, match=r"`reversible` must be False with `pool` = \(2,\)"):
        make(n_layers=4, pool=(2,))
    with pytest.raises(
        ValueError, match=r"`reversible` must be False with `memory\.kind` = 'recurrent_memory'"
    ):
        make("attention", memory=MemoryConfig(kind="recurrent_memory", segment_length=4))
    with pytest.raises(ValueError, match="`reversible` must be False for images"):
        ImageClassifierConfig(n_outputs=2, patch_size=2, reversible=True)
    with pytest.raises(ValueError, match="hidden states of every layer need `reversible` = False"):
        make().transformed(torch.zeros(1, 2, D).double(), every_layer=True)
