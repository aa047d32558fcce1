"""Irregular steps, `dt`, through blocks, both directions, language models and encoders."""

import pytest
import torch
from torch import Tensor, nn

from linrec import mixers
from linrec.models import (
    Bidirectional,
    Block,
    LanguageModel,
    MemoryConfig,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
)
from linrec.nn import FeedForward
from linrec.nn.channel_mixing import RWKVChannelMixing
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_causality,
    check_reset,
    check_split,
    check_steps,
    generator,
)

D, TIME = 8, 9
LANGUAGE = ModelConfig(vocab_size=6, d_model=D, n_layers=2, mixer=("s5", "lru"), d_channel_mixing=12)


def times(batch: int = 3, seed: int = 3) -> Tensor:
    return 8 ** (2 * torch.rand(batch, TIME, generator=generator(seed), dtype=torch.float64) - 1)


def inputs(width: int = D) -> Tensor:
    return torch.randn(3, TIME, width, generator=generator(), dtype=torch.float64)


def tokens() -> Tensor:
    return torch.randint(0, 6, (3, TIME), generator=generator())


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LANGUAGE).double()


def classifier(**arguments) -> SequenceClassifier:
    torch.manual_seed(0)
    config = {"n_outputs": 3, "n_features": 2, "mixer": "s5", "d_model": D, "n_layers": 2} | arguments
    return SequenceClassifier(SequenceClassifierConfig(**config)).double()


def test_a_block_gives_its_mixer_the_times():
    torch.manual_seed(0)
    block = Block(mixers.build("s5", D), FeedForward(D, 12)).double()
    y, state = block(inputs(), dt=times())
    z, last = block.mixer(block.mixer_norm(inputs()), dt=times())
    x = inputs() + z
    assert_agree(y, x + block.channel_mixing(block.channel_mixing_norm(x)))
    assert_agree(state, last)


def test_a_channel_mixing_over_steps_refuses_times():
    block = Block(mixers.build("s5", D), RWKVChannelMixing(D, 12)).double()
    with pytest.raises(TypeError, match="`dt` must be None for RWKVChannelMixing"):
        block(inputs(), dt=times())


def test_mixers_with_a_forward_of_their_own_need_no_times():
    class Own(mixers.Mixer):
        def __init__(self):
            super().__init__(D)
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x, state=None, *, reset=None):
            return self.weight * x, None

        def init_state(self, batch, *, device=None):
            return None

    x = inputs().float()
    block = Block(Own(), None)
    assert_agree(block(x)[0], x + block.mixer_norm(x))
    assert_agree(Bidirectional(Own())(x)[0], 2 * x)


def test_laws_of_a_language_model_with_times():
    model = language_model()

    def timed(given: tuple[Tensor, Tensor], state=None, **arguments):
        return model(given[0], state, dt=given[1], **arguments)

    given = tokens(), times() / 8
    for law in (check_split, check_steps, check_batch_independence, check_reset):
        law(timed, given)
    check_causality(lambda dt, state=None: timed((tokens(), dt), state), given[1])
    assert_agree(model(tokens(), dt=torch.ones(3, TIME))[0], model(tokens())[0])
    assert (model(tokens(), dt=given[1])[0] - model(tokens())[0]).abs().max() > 1e-3


def test_times_reach_every_layer_with_recomputation_too():
    model = language_model()
    dt = times().requires_grad_()
    y, _ = model(tokens(), dt=dt)
    expected = torch.autograd.grad(y.square().sum(), [dt, *model.parameters()])
    model.recompute = True
    again, _ = model(tokens(), dt=dt)
    assert_agree(again, y)
    assert_agree(torch.autograd.grad(again.square().sum(), [dt, *model.parameters()]), expected)


def test_a_language_model_of_other_mixers_refuses_times():
    model = LanguageModel(ModelConfig(vocab_size=6, d_model=D, n_layers=2, mixer=("s5", "gla")))
    with pytest.raises(TypeError, match=r"`dt`.*\(.*lru, .*mamba.*\)"):
        model(tokens(), dt=times().float())
    memory = MemoryConfig(kind="recurrent_memory", segment_length=4, n_tokens=2)
    model = LanguageModel(ModelConfig(vocab_size=6, d_model=D, n_layers=2, mixer="s5", memory=memory))
    with pytest.raises(ValueError, match=r"`dt`.*`memory.kind` = 'recurrent_memory'"):
        model(tokens(), dt=times().float())


def test_against_time_a_step_takes_the_time_of_the_step_after():
    torch.manual_seed(0)
    ahead, back = mixers.build("s5", D).double(), mixers.build("s5", D).double()
    x, dt = inputs(), times()
    y, _ = Bidirectional(ahead, back)(x, dt=dt)
    assert Bidirectional(ahead).takes_dt and not Bidirectional(mixers.build("gla", D)).takes_dt
    reversed_times = torch.cat([torch.ones(3, 1, dtype=dt.dtype), dt.flip(1)[:, :-1]], 1)
    assert_agree(y, ahead(x, dt=dt)[0] + back(x.flip(1), dt=reversed_times)[0].flip(1))


def test_resets_and_times_in_both_directions():
    torch.manual_seed(0)
    both = Bidirectional(mixers.build("s5", D).double(), mixers.build("s5", D).double())
    reset = torch.zeros(3, TIME, dtype=torch.bool)
    reset[:, [0, 4, 5]] = True

    def timed(given: tuple[Tensor, Tensor], state=None, **arguments):
        return both(given[0], state, dt=given[1], **arguments)

    check_reset(timed, (inputs(), times()), reset)
    check_batch_independence(timed, (inputs(), times()))


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_padded_times_change_nothing(bidirectional, pooling):
    model = classifier(bidirectional=bidirectional, pooling=pooling)
    x, dt, lengths = inputs(2), times(), [9, 4, 1]
    for row, length in enumerate(lengths):
        dt[row, length:] = torch.nan
    y = model(x, lengths=torch.tensor(lengths), dt=dt)
    for row, length in enumerate(lengths):
        found = y[row, :length] if pooling == "none" else y[row]
        assert_agree(found, model(x[row : row + 1, :length], dt=dt[row : row + 1, :length])[0])
    assert (found - model(x[2:, :1])[0]).abs().max() > 1e-3


def test_times_of_pairs():
    model = classifier(pairs=True)
    x, dt = torch.stack([inputs(2), inputs(2).flip(0)], 1), torch.stack([times(), times(seed=4)], 1)
    vectors = model.features(x, dt=dt)
    single = classifier()
    weights = {name: x for name, x in model.state_dict().items() if not name.startswith("head")}
    single.load_state_dict(weights, strict=False)
    assert_agree(vectors[:, 1], single.features(x[:, 1], dt=dt[:, 1]))
    with pytest.raises(ValueError, match=r"`dt`.*\(batch, 2, time\) = \(3, 2, 9\); got"):
        model(x, dt=times())
    with pytest.raises(ValueError, match=r"`dt`.*\(batch, time\) = \(3, 9\); got \(1, 9\)"):
        single(inputs(2), dt=times(1))
