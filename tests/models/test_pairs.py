"""Classifiers of pairs of sequences."""

from dataclasses import replace

import pytest
import torch

from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

CONFIG = SequenceClassifierConfig(
    n_outputs=3, vocab_size=6, mixer="hgru", d_model=8, n_layers=2, d_channel_mixing=12, pairs=True
)
LENGTHS = torch.tensor([[9, 4], [1, 7], [3, 3]])


def make(config: SequenceClassifierConfig = CONFIG) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(config).double()


def tokens() -> torch.Tensor:
    return torch.randint(0, 6, (3, 2, 9), generator=generator())


def gradients(y: torch.Tensor, model: SequenceClassifier) -> list[torch.Tensor]:
    weights = torch.randn(y.shape, generator=generator(1), dtype=y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), [*model.parameters()]))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_head_compares_what_one_encoder_makes_of_each_sequence_alone(pooling):
    model = make(replace(CONFIG, pooling=pooling))
    # the same encoder, of single sequences
    single = make(replace(CONFIG, pooling=pooling, pairs=False))
    encoder = {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}
    single.load_state_dict(encoder, strict=False)
    x, outputs = tokens(), []
    for pair, lengths in zip(x, LENGTHS.tolist(), strict=True):
        u, v = (single.features(one[None, :n])[0] for one, n in zip(pair, lengths, strict=True))
        hidden, output = model.head.hidden, model.head.output
        parts = hidden.weight.split(8, dim=1)
        sums = sum(part @ of for part, of in zip(parts, (u, v, u * v, u - v), strict=True))
        outputs.append(output.weight @ (sums + hidden.bias).clamp(min=0) + output.bias)
    assert_agree(model(x, lengths=LENGTHS), torch.stack(outputs))
    assert model.features(x, lengths=LENGTHS).shape == (3, 2, 8)


def test_padding_and_other_pairs_change_nothing():
    model, x = make(), tokens()
    padded = x.masked_fill(torch.arange(9) >= LENGTHS[:, :, None], -1)
    # each pair alone, in a batch that is as long as its longer sequence
    alone = [
        model(x[i : i + 1, :, : max(lengths)], lengths=torch.tensor([lengths]))
        for i, lengths in enumerate(LENGTHS.tolist())
    ]
    outputs = model(padded, lengths=LENGTHS)
    assert_agree(outputs, torch.cat(alone))
    assert_agree(gradients(outputs, model), gradients(torch.cat(alone), model), "gradients")
    assert_agree(model(x, lengths=torch.full((3, 2), 9)), model(x))


def test_real_features_come_in_pairs_too():
    model = make(replace(CONFIG, vocab_size=None, n_features=2))
    x = torch.randn(3, 2, 9, 2, generator=generator(), dtype=torch.float64)
    swapped = model.features(x.flip(1), lengths=LENGTHS.flip(1))
    assert_agree(swapped.flip(1), model.features(x, lengths=LENGTHS))
    assert model(x, lengths=LENGTHS).shape == (3, 3) and model(x[:0]).shape == (0, 3)


def test_marks_of_the_head():
    found = groups_of(make())
    assert [found[f"head.{name}"].name for name in ("hidden.weight", "output.weight")] == [
        "default",
        "vocabulary",
    ]


def test_what_is_refused():
    model = make()
    with pytest.raises(ValueError, match=r"\(batch, 2, time\); got \(3, 9\)"):
        model(tokens()[:, 0])
    with pytest.raises(ValueError, match=r"\(batch, 2, time\); got \(2, 3, 9\)"):
        model(tokens().transpose(0, 1))
    with pytest.raises(ValueError, match=r"`lengths`.*\(batch, 2\) = \(3, 2\); got \(3,\)"):
        model(tokens(), lengths=LENGTHS[:, 0])
    with pytest.raises(ValueError, match=r"`lengths`.*\[1, 9\].*; got 10"):
        model(tokens(), lengths=LENGTHS + 1)
    with pytest.raises(ValueError, match=r"\(batch, 2, time, 2\); got \(3, 2, 9\)"):
        make(replace(CONFIG, vocab_size=None, n_features=2))(tokens())
    with pytest.raises(ValueError, match=r"`pairs`.*`pooling` = 'none'"):
        replace(CONFIG, pooling="none")
