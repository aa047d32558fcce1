import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from linrec.lab.tasks import ScoredTask, Task
from linrec.lab.tasks.texts import IMDb, words_of
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifierConfig
from linrec.text import DataError

WHERE = (
    "Download and unpack https://.*/aclImdb_v1.tar.gz, and pass .* with --data.path; or pass --data.dataset"
)


def draw(n, seed):
    """Reviews of one class each, some with letters of several bytes, one that occurs twice."""
    rng = np.random.default_rng(seed)
    reviews = [
        ("é<br />" * int(rng.integers(1, 4)) + f"film {seed} {i}", int(rng.integers(2))) for i in range(n)
    ]
    return [*reviews, reviews[0]]


TRAIN, TEST = draw(29, 1), draw(11, 2)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "aclImdb"
    for part, reviews in (("train", TRAIN), ("test", TEST)):
        for name in ("neg", "pos", "unsup"):
            (path / part / name).mkdir(parents=True)
        (path / part / "unsup" / "0_0.txt").write_text("of no class")
        for number, (text, label) in enumerate(reviews):
            (path / part / ("neg", "pos")[label] / f"{number}_{7 * label + 1}.txt").write_bytes(text.encode())
    return path


def reviews_of(split):
    """Texts and labels of a split, as bytes."""
    batch = split.rows(torch.arange(len(split)))
    texts = [bytes(row[:n].tolist()) for row, n in zip(batch.inputs, batch.lengths.tolist(), strict=True)]
    return list(zip(texts, batch.targets.tolist(), strict=True))


def encoded(reviews):
    return sorted((text.encode(), label) for text, label in reviews)


def test_splits_are_the_reviews_and_validation_shares_none_with_training(folder):
    task = IMDb(path=folder, length=64, n_validation=9)
    train, validation, test = (reviews_of(task.split(name)) for name in ("train", "validation", "test"))
    assert sorted(test) == encoded(TEST) and len(validation) == 9
    assert not {*train} & {*validation}
    assert {*train} | {*validation} == {*encoded(TRAIN)}
    batch = task.split("test").rows(torch.tensor([3, 0]))
    assert batch.inputs.shape == (2, 64) and batch.inputs.dtype == torch.int64 and batch.reset is None


def test_a_review_that_occurs_twice_is_on_one_side(folder):
    twice = TRAIN[0][0].encode()
    on_both = 0
    for seed in range(6):
        task = IMDb(path=folder, length=64, n_validation=15, seed=seed)
        counts = [
            [text for text, _ in reviews_of(task.split(name))].count(twice)
            for name in ("train", "validation")
        ]
        assert 0 in counts
        on_both += counts == [0, 1]
    # in some of the draws it would have been on both
    assert on_both


def test_a_review_that_is_tested_is_neither_trained_on_nor_validates(folder):
    for number, (text, label) in enumerate(TEST[:3]):
        (folder / "train" / ("neg", "pos")[label] / f"{100 + number}_1.txt").write_bytes(text.encode())
    task = IMDb(path=folder, length=64, n_validation=9)
    train, validation, test = (reviews_of(task.split(name)) for name in ("train", "validation", "test"))
    assert sorted(test) == encoded(TEST) and len(validation) == 9
    assert {*train} | {*validation} == {*encoded(TRAIN)}


def test_the_seed_chooses_what_validates_whatever_the_files_are_called(folder):
    splits = [
        reviews_of(IMDb(path=folder, length=64, n_validation=9, seed=s).split("validation"))
        for s in (0, 0, 1)
    ]
    assert splits[0] == splits[1] and {*splits[0]} != {*splits[2]}
    for number, file in enumerate(sorted((folder / "train").glob("*/*.txt"))):
        file.rename(file.with_name(f"{999 - number}_1.txt"))
    assert reviews_of(IMDb(path=folder.parent, length=64, n_validation=9).split("validation")) == splits[0]


def test_what_follows_the_length_is_left_out(folder):
    task = IMDb(path=folder, length=5, n_validation=9)
    assert sorted(reviews_of(task.split("test"))) == sorted((t[:5], label) for t, label in encoded(TEST))
    # that beginnings are alike makes no two reviews one
    assert len(task.split("train")) + len(task.split("validation")) >= len(TRAIN) - 1


def test_a_data_set_of_hugging_face_is_the_same_data(folder, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason='the extra "text" is not installed')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()

    def saved(name, columns=("text", "label"), **splits):
        made = {
            split: datasets.Dataset.from_dict(
                dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
            )
            for split, rows in splits.items()
        }
        datasets.DatasetDict(made).save_to_disk(str(tmp_path / name))
        return str(tmp_path / name)

    whole = saved("imdb", train=TRAIN, test=TEST, unsupervised=[("of no class", -1)])
    for name in ("train", "validation", "test"):
        of_folder, of_dataset = (
            IMDb(**source, length=64, n_validation=9).split(name)
            for source in ({"path": folder}, {"dataset": whole})
        )
        assert torch.equal(of_folder.tokens, of_dataset.tokens)
        assert torch.equal(of_folder.labels, of_dataset.labels)
    for wrong, message in (
        (saved("part", train=TRAIN), f"has no split 'test'. {WHERE}"),
        (saved("columns", columns=("text", "stars"), train=TRAIN, test=TEST), "no column 'label'"),
        (saved("labels", train=[("a", 2)], test=TEST), "must be 0 and 1; got 2"),
        (
            str(tmp_path / "gone"),
            "cannot be loaded: .* Download and unpack https://.*aclImdb with --data.path.$",
        ),
    ):
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match=message):
            IMDb(dataset=wrong).prepared()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package 'datasets'.*pip install 'linrec\[text\]'"):
        IMDb(dataset=whole).prepared()


def test_what_cannot_be_used_is_refused(folder):
    with pytest.raises(DataError, match=f"one of `path` and `dataset` must be given; got neither. {WHERE}"):
        IMDb().prepared()
    with pytest.raises(ValueError, match="one of `path` and `dataset` must be given; got both"):
        IMDb(path=folder, dataset="imdb")
    with pytest.raises(DataError, match=f"gone does not exist. It must be the folder .* {WHERE}"):
        IMDb(path=folder / "gone").prepared()
    with pytest.raises(
        DataError, match=f"train/neg must contain reviews in files .* in .txt; it has none. {WHERE}"
    ):
        IMDb(path=folder / "train").prepared()
    with pytest.raises(
        DataError,
        match=r"`n_validation` must be less than the 30 training reviews .*; got 30",
    ):
        IMDb(path=folder, n_validation=30).prepared()
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        IMDb(length=0)


def test_it_is_a_task_and_a_classifier_trains(folder, tmp_path):
    task: Task = IMDb(path=folder, length=64, n_validation=9)
    assert isinstance(task, Task) and isinstance(task, ScoredTask)
    majority = np.bincount([label for _, label in reviews_of(task.split("train"))]).argmax()
    assert task.chance == 0.5
    assert task.trivial_score == pytest.approx(np.mean([label == majority for _, label in TEST]))
    config = get_recipe("lra-text")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    model = SequenceClassifierConfig(n_outputs=1, vocab_size=1, d_model=8, n_layers=1)
    loop = LoopConfig(device="cpu", batch_size=4, steps=2, eval_every=2)
    result = fit(TrainConfig("tiny", task, model, loop=loop), tmp_path / "run")
    assert 0 < result.test["loss"] < 5 and len(result.test["accuracy_by_class"]) == 2


def test_words_are_numbered_by_their_frequency_in_the_training_split(folder):
    task = IMDb(path=folder, length=9, n_validation=9, n_words=4)
    assert words_of("It's GREAT, isn't it?<br /><br />8/10 é".encode()) == [
        *("it's", "great", ",", "isn't", "it", "?", "8", "/", "10", "é"),
    ]
    train = [
        (text.decode(), label) for text, label in reviews_of(IMDb(path=folder, n_validation=9).split("train"))
    ]
    counts = Counter(word for text, _ in train for word in words_of(text.encode()))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:4]
    assert task.vocab_size == 5 and task.split("train").tokens.dtype == torch.int32
    batch = task.split("test").rows(torch.arange(len(TEST)))
    found = [
        (row[:n].tolist(), label)
        for row, n, label in zip(batch.inputs, batch.lengths, batch.targets.tolist(), strict=True)
    ]
    expected = [
        ([ranked.index(word) + 1 if word in ranked else 0 for word in words_of(text.encode())][:9], label)
        for text, label in TEST
    ]
    assert sorted(found) == sorted(expected)
    assert {token for tokens, _ in found for token in tokens} >= {0, 1, 2, 3}
    with pytest.raises(ValueError, match="`n_words` must be at least 1; got 0"):
        IMDb(n_words=0)
