import re

import pytest
import torch

from linrec.lab.tasks.arena import ListOps, expression
from linrec.lab.train import LoopConfig, OptimConfig, TrainConfig, fit, load_run
from linrec.models import SequenceClassifierConfig
from tests.tiers import thorough


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The published lengths and depth, with fewer samples."""
    return ListOps(n_train=3000, n_validation=20, n_test=20, cache=tmp_path_factory.mktemp("cache"))


def evaluated(words):
    """Return value, depth and largest number of arguments of an expression, by a stack, from its words."""
    stack = [[]]
    depths, most = [], 0
    for word in words:
        if word == "]":
            operator, *arguments = stack.pop()
            most = max(most, len(arguments))
            assert len(arguments) >= 2
            ordered = sorted(arguments)
            middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
            made = {
                "[MIN": ordered[0],
                "[MAX": ordered[-1],
                "[MED": int(middle),
                "[SM": sum(arguments) % 10,
            }
            stack[-1].append(made[operator])
        elif word.startswith("["):
            stack.append([word])
        else:
            depths.append(len(stack))
            stack[-1].append(int(word))
    ((value,),) = stack
    return value, max(depths), most


def samples(task, split="train", n=None):
    data = task.split(split)
    batch = data.rows(torch.arange(len(data))[:n])
    for row, length, target in zip(batch.inputs, batch.lengths.tolist(), batch.targets.tolist(), strict=True):
        assert not row[length:].any()
        yield expression(row[:length].tolist()).split(), target


def test_the_target_is_the_value_of_the_expression(published):
    depths, arguments = set(), set()
    for words, target in samples(published, n=300):
        value, depth, most = evaluated(words)
        assert value == target
        assert 500 < len(words) < 2000
        depths.add(depth)
        arguments.add(most)
    assert max(depths) == 10 and max(arguments) == 10


@pytest.mark.parametrize(
    ("text", "value"),
    [("[MED 1 4 ]", 2), ("[MED 9 0 4 ]", 4), ("[SM 9 [MIN 8 3 ] ]", 2), ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9)],
)
def test_the_oracle_itself(text, value):
    assert evaluated(text.split())[0] == value


def test_lengths_and_labels_are_distributed_as_in_the_original(published):
    train = published.labelled("train")
    # of 4,000 expressions that a plain recursion drew
    quantiles = train.lengths.double().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    assert ((quantiles - torch.tensor([543.0, 966.0, 1799.0])).abs() < torch.tensor([15, 60, 60])).all()
    shares = torch.bincount(train.labels, minlength=10) / 3000
    assert shares[0] == pytest.approx(0.166, abs=0.03) and shares[9] == pytest.approx(0.166, abs=0.03)
    assert shares[1:9].min() > 0.05 and shares[1:9].max() < 0.11
    assert published.chance == 0.1
    words = [word for words, _ in samples(published, n=300) for word in words]
    operators = [word for word in words if word.startswith("[")]
    for name in ("[MIN", "[MAX", "[MED", "[SM"):
        assert operators.count(name) / len(operators) == pytest.approx(0.25, abs=0.02)


def test_small_trees_have_the_probabilities_of_the_definition(tmp_path):
    # at depth 2 an expression is an operator of digits: 2 or 3 arguments, equally likely
    task = ListOps(
        length=5, min_length=4, depth=2, n_arguments=3, n_train=4000, n_validation=1, n_test=1, cache=tmp_path
    )
    lengths = task.labelled("train").lengths
    # all differ, and there are but 400 of the shorter ones
    assert lengths.unique().tolist() == [4, 5]
    assert (lengths == 4).sum() <= 400
    first_digit = task.labelled("train").tokens[lengths == 5][:, 1]
    counts = torch.bincount(first_digit, minlength=10).double()
    assert ((counts - len(first_digit) / 10).abs() < 4 * (len(first_digit) * 0.09) ** 0.5).all()


@thorough
def test_too_few_different_expressions_and_fields_out_of_range_are_refused(tmp_path):
    few = {"n_train": 3, "n_validation": 5, "n_test": 5, "cache": tmp_path}
    # there are ten digits
    message = "the split 'train' of ListOps has too few different samples: only 0 of 3 were found"
    with pytest.raises(ValueError, match=re.escape(message)):
        ListOps(length=1, min_length=1, **few).prepared()
    # one level is a digit
    with pytest.raises(
        ValueError, match="the split 'test' of ListOps has too few different samples: only 0 of 5 were found"
    ):
        ListOps(length=9, min_length=5, depth=1, **few).prepared()
    with pytest.raises(ValueError, match="`length` must be at least `min_length` = 501; got 400"):
        ListOps(length=400)
    for field, least in (("min_length", 1), ("depth", 1), ("n_arguments", 2)):
        with pytest.raises(ValueError, match=f"`{field}` must be at least {least}; got 0"):
            ListOps(**{field: 0})


def test_a_classifier_over_tokens_trains_and_its_scores_are_those_of_the_rebuilt_model(tmp_path):
    sizes = {"n_train": 40, "n_validation": 10, "n_test": 11, "cache": tmp_path / "cache"}
    task = ListOps(length=12, min_length=4, depth=3, n_arguments=3, **sizes)
    model = SequenceClassifierConfig(n_outputs=1, vocab_size=1, d_model=8, n_layers=1, mixer="hgru")
    loop = LoopConfig(steps=4, batch_size=4, accumulate=2, device="cpu")
    config = TrainConfig("tiny", task, model, OptimConfig(), loop)
    assert (config.model.vocab_size, config.model.n_outputs, config.model.n_features) == (15, 10, None)
    result = fit(config, tmp_path / "run")
    test = task.split("test")
    batch = test.rows(torch.arange(11))
    rebuilt = load_run(tmp_path / "run").classifier()
    with torch.no_grad():
        logits = torch.cat(
            [rebuilt(row[None, :n]) for row, n in zip(batch.inputs, batch.lengths.tolist(), strict=True)]
        )
    loss = torch.nn.functional.cross_entropy(logits.double(), batch.targets)
    assert result.test["loss"] == pytest.approx(float(loss), rel=1e-5)
    expected = float((logits.argmax(-1) == batch.targets).double().mean())
    assert result.test["accuracy"] == pytest.approx(expected)
