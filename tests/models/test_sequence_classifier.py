import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn import functional

from linrec import mixers
from linrec.models import Bidirectional, SequenceClassifier, SequenceClassifierConfig
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator
from tests.mixers.variants import OF_FAMILIES
from tests.tiers import thorough, tiered

CONFIG = SequenceClassifierConfig(
    n_outputs=3, n_features=2, mixer="hgru", d_model=8, n_layers=2, d_channel_mixing=12
)
TEXT = replace(CONFIG, n_features=None, vocab_size=6)
LENGTHS = torch.tensor([9, 4, 1])


def make(config: SequenceClassifierConfig = CONFIG) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(config).double()


def features(time: int = 9) -> torch.Tensor:
    return torch.randn(3, time, 2, generator=generator(), dtype=torch.float64)


def tokens(time: int = 9) -> torch.Tensor:
    return torch.randint(0, 6, (3, time), generator=generator())


def gradients(y: torch.Tensor, model: SequenceClassifier) -> list[torch.Tensor]:
    weights = torch.randn(y.shape, generator=generator(1), dtype=y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), [*model.parameters()], materialize_grads=True))


def test_the_encoder_written_out():
    model = make(TEXT)
    y = model.input.weight[tokens()]
    for block in model.blocks:
        ahead, back = block.mixer.mixers
        x = functional.layer_norm(y, (8,), block.mixer_norm.weight, block.mixer_norm.bias)
        y = y + ahead(x)[0] + back(x.flip(1))[0].flip(1)
        norm = block.channel_mixing_norm
        y = y + block.channel_mixing(functional.layer_norm(y, (8,), norm.weight, norm.bias))
    y = functional.layer_norm(y, (8,), model.norm.weight, model.norm.bias)
    assert_agree(model(tokens()), y.mean(1) @ model.head.weight.T + model.head.bias)
    assert_agree(model.features(tokens()), y.mean(1))


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("kind", ["features", "tokens"])
def test_padding_changes_nothing(pooling, bidirectional, kind):
    """Outputs and gradients of a padded batch are those of its sequences alone."""
    config = CONFIG if kind == "features" else TEXT
    model = make(replace(config, pooling=pooling, bidirectional=bidirectional))
    x = features() if kind == "features" else tokens()
    steps = torch.arange(9)
    # what is no token at all, and what would spread through every product
    padded = x.masked_fill(~(steps < LENGTHS[:, None]).reshape(3, 9, *[1] * (x.ndim - 2)), -1)
    if kind == "features":
        padded[1, 5], padded[2, 3:] = torch.nan, torch.inf
    outputs = model(padded, lengths=LENGTHS)
    alone = [model(x[i : i + 1, :length]) for i, length in enumerate(LENGTHS.tolist())]
    if pooling == "none":
        outputs = torch.cat([outputs[i, :length] for i, length in enumerate(LENGTHS.tolist())])
        expected = torch.cat([one[0] for one in alone])
    else:
        expected = torch.cat(alone)
    assert_agree(outputs, expected)
    assert_agree(gradients(outputs, model), gradients(expected, model), "gradients")


@pytest.mark.parametrize("name", tiered(OF_FAMILIES, [], mixers.names()))
def test_padding_with_any_mixer(name):
    model = make(replace(CONFIG, mixer=name)).eval()
    x = features()
    alone = [model(x[i : i + 1, :length]) for i, length in enumerate(LENGTHS.tolist())]
    assert_agree(model(x, lengths=LENGTHS), torch.cat(alone))


def test_full_lengths_are_no_lengths():
    for pooling in ("mean", "last", "none"):
        model = make(replace(CONFIG, pooling=pooling))
        assert_agree(model(features(), lengths=torch.tensor([9, 9, 9])), model(features()))


def test_last_and_mean_of_a_causal_encoder():
    last, mean, each = (
        make(replace(CONFIG, bidirectional=False, pooling=p)) for p in ("last", "mean", "none")
    )
    y = each(features())
    assert_agree(last(features()), y[:, -1])
    assert_agree(last(features(), lengths=LENGTHS), y[[0, 1, 2], LENGTHS - 1])
    assert_agree(mean(features(), lengths=LENGTHS)[1], y[1, :4].mean(0))


def test_directions_of_the_blocks():
    for unshared, n_mixers, n_thetas in ((None, 2, 4), (("theta",), 2, 4), ((), 1, 2)):
        model = make(replace(CONFIG, unshared=unshared))
        mixers = [block.mixer.mixers for block in model.blocks]
        assert [len(layer) for layer in mixers] == [n_mixers] * 2
        for first, second in zip(*mixers, strict=True):
            assert first.bounds is second.bounds
        names = [name for name, _ in model.named_parameters()]
        assert sum(name.endswith("theta") for name in names) == n_thetas
        assert sum(name.endswith(".c.weight") for name in names) == (4 if unshared is None else 2)
    blocks = make(replace(CONFIG, bidirectional=False)).blocks
    assert not any(isinstance(block.mixer, Bidirectional) for block in blocks)
    assert blocks[0].mixer.bounds is blocks[1].mixer.bounds
    assert make(replace(CONFIG, combine="concatenate")).blocks[0].mixer.project.in_features == 2 * 8


def test_mixer_arguments_and_marks():
    model = make(replace(TEXT, mixer_args={"phase": "none"}))
    assert all(mixer.theta is None for block in model.blocks for mixer in block.mixer.mixers)
    assert {groups_of(model)[name].name for name in ("input.weight", "head.weight")} == {"vocabulary"}
    with pytest.raises(ValueError, match="did you mean 'phase'"):
        make(replace(CONFIG, mixer_args={"phases": "none"}))


@thorough
def test_compile():
    torch.compiler.reset()
    model = make(replace(TEXT, n_layers=1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_agree(compiled(tokens(), lengths=LENGTHS), model(tokens(), lengths=LENGTHS))


@thorough
def test_it_learns_what_comes_next_which_takes_the_second_direction():
    accuracies = {}
    for bidirectional in (True, False):
        torch.manual_seed(0)
        model = SequenceClassifier(replace(TEXT, n_outputs=6, pooling="none", bidirectional=bidirectional))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
        random = generator(2)
        for _ in range(60):
            x = torch.randint(0, 6, (32, 8), generator=random)
            loss = functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        x = torch.randint(0, 6, (256, 8), generator=random)
        accuracies[bidirectional] = (model(x)[:, :-1].argmax(-1) == x[:, 1:]).float().mean().item()
    # chance is one in six, and all that the past tells
    assert accuracies[True] > 0.9 and accuracies[False] < 0.25


def test_a_config_survives_json():
    config = replace(TEXT, unshared=("theta",), pooling="last")
    assert SequenceClassifierConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_outputs": 0}, "`n_outputs` must be at least 1; got 0"),
        ({"n_features": 0}, "`n_features` must be at least 1; got 0"),
        ({"n_features": None, "vocab_size": 0}, "`vocab_size` must be at least 1; got 0"),
        ({"d_model": 0}, "`d_model` must be at least 1; got 0"),
        (
            {"vocab_size": 6},
            "Give either `vocab_size`, for tokens, or `n_features`, for real numbers; got 6 and 2",
        ),
        ({"n_features": None}, "got None and None"),
        ({"pooling": "average"}, "there is no `pooling` 'average'; did you mean"),
        (
            {"bidirectional": False, "combine": "mean"},
            "`unshared` and `combine` are for two directions",
        ),
        (
            {"bidirectional": False, "unshared": ("theta",)},
            "`bidirectional` = False with `unshared` = ('theta',)",
        ),
    ],
)
def test_errors_of_the_config(arguments, message):
    with pytest.raises(ValueError) as error:
        SequenceClassifierConfig(**{"n_outputs": 3, "n_features": 2, **arguments})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "x", "lengths", "kind", "message"),
    [
        (
            TEXT,
            tokens()[0],
            None,
            ValueError,
            "`x` must be tokens (batch, time) of at least one step; got (9,)",
        ),
        (TEXT, tokens(0), None, ValueError, "at least one step; got (3, 0)"),
        (TEXT, tokens().double(), None, TypeError, "`x` must be int64 token ids; got torch.float64"),
        (CONFIG, features()[..., :1], None, ValueError, "`x` must be features (batch, time, 2)"),
        (CONFIG, features(0), None, ValueError, "at least one step; got (3, 0, 2)"),
        (CONFIG, features().long(), None, TypeError, "`x` must be real features; got torch.int64"),
        (CONFIG, features(), LENGTHS.double(), TypeError, "`lengths` must be int64; got torch.float64"),
        (CONFIG, features(), LENGTHS[:2], ValueError, "`lengths` must have shape (batch,) = (3,); got (2,)"),
        (CONFIG, features(), LENGTHS - 1, ValueError, "`lengths` must be in [1, 9], the steps of `x`; got 0"),
        (
            CONFIG,
            features(),
            LENGTHS + 1,
            ValueError,
            "`lengths` must be in [1, 9], the steps of `x`; got 10",
        ),
    ],
)
def test_errors_of_inputs(config, x, lengths, kind, message):
    with pytest.raises(kind) as error:
        make(config)(x, lengths=lengths)
    assert message in str(error.value)
