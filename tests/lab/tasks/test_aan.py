import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from linrec.lab.tasks import PairedTask, ScoredTask, Task
from linrec.lab.tasks.texts import AAN
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import SequenceClassifierConfig
from linrec.text import DataError

NAMES = {"train": "train", "validation": "eval", "test": "test"}
SIZES = {"train": 23, "validation": 5, "test": 7}
WHERE = "They are in .*/tsv_data of .* https://.*lra_release.gz; pass this folder with --data.path"


def draw():
    """Label, names and texts of pairs, none of which comes twice; of a few papers, each in several pairs."""
    rng = np.random.default_rng(0)
    papers = [(f"P{i}", "b'" + 'A paper\'s \\n \\xc3\\xa9 "text" ' * i + "'") for i in range(9)]
    both = rng.permutation([(one, other) for one in range(9) for other in range(one + 1)])
    pairs = [(int(rng.integers(2)), papers[one], papers[other]) for one, other in rng.permuted(both, axis=1)]
    return {split: [pairs.pop() for _ in range(n)] for split, n in SIZES.items()}


PAIRS = draw()


def line(label, first, second):
    return f"{label}\t{first[0]}\t{second[0]}\t{first[1]}\t{second[1]}\n"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tsv_data"
    path.mkdir()
    for split, pairs in PAIRS.items():
        # some write labels as real numbers
        lines = [line(f"{label}.0" if split == "test" else label, *both) for label, *both in pairs]
        (path / f"new_aan_pairs.{NAMES[split]}.tsv").write_text("".join(lines))
    return path


@pytest.mark.parametrize("length", [100, 7])
def test_a_pair_is_the_bytes_of_two_papers(folder, length):
    task = AAN(path=folder, length=length)
    for split, pairs in PAIRS.items():
        found = task.split(split)
        batch = found.rows(torch.arange(len(found)))
        assert batch.inputs.shape == (SIZES[split], 2, length) and batch.inputs.dtype == torch.int64
        assert batch.lengths.shape == (SIZES[split], 2) and batch.reset is None
        for row, lengths, target, (label, *both) in zip(
            batch.inputs, batch.lengths, batch.targets, pairs, strict=True
        ):
            for tokens, n, (_, text) in zip(row, lengths.tolist(), both, strict=True):
                assert bytes(tokens[:n].tolist()) == text.encode()[:length]
            assert target == label
        # a paper is kept once
        assert len(found.texts) == len({text.encode()[:length] for _, *both in pairs for _, text in both})


def test_rows_are_those_asked_for_and_the_folder_around_is_found(folder):
    split = AAN(path=folder.parent, length=50).split("train")
    everything, index = split.rows(torch.arange(len(split))), torch.tensor([4, 0, 4])
    for found, expected in zip(split.rows(index), everything, strict=True):
        assert (found is expected is None) or torch.equal(found, expected[index])
    assert split.of_epoch(seed=1, epoch=2) is split
    assert split.to("meta").rows(index).lengths.device.type == "meta"


def test_an_empty_text_is_one_byte(folder):
    (folder / "new_aan_pairs.eval.tsv").write_text("1\ta\tb\t\tabc\n")
    batch = AAN(path=folder, length=4).split("validation").rows(torch.tensor([0]))
    assert batch.lengths.tolist() == [[1, 3]] and batch.inputs.tolist() == [[[0, 0, 0, 0], [97, 98, 99, 0]]]


def test_a_pair_that_is_tested_or_validates_is_not_trained_on(folder):
    def write(split, *pairs):
        path = folder / f"new_aan_pairs.{NAMES[split]}.tsv"
        path.write_text("".join(line(*pair) for pair in (*PAIRS[split], *pairs)))

    def backwards(split):
        label, first, second = PAIRS[split][0]
        return label, second, first

    splits = [AAN(path=folder, length=9).split(name) for name in SIZES]
    write("validation", backwards("test"), PAIRS["validation"][1])
    write("train", PAIRS["test"][1], backwards("validation"), PAIRS["train"][0])
    for name, before in zip(SIZES, splits, strict=True):
        now = AAN(path=folder, length=9).split(name)
        # what comes twice within a split is left there
        again = [*range(SIZES[name]), *({"train": [0], "validation": [1]}.get(name, []))]
        for found, expected in zip(
            now.rows(torch.arange(len(now))), before.rows(torch.tensor(again)), strict=True
        ):
            assert (found is expected is None) or torch.equal(found, expected)
    (folder / "new_aan_pairs.train.tsv").write_bytes((folder / "new_aan_pairs.eval.tsv").read_bytes())
    with pytest.raises(
        DataError, match=r"train.tsv has no pair that is not also in another split. It must be"
    ):
        AAN(path=folder).prepared()


def test_what_needs_no_model(folder):
    task = AAN(path=folder, length=40)
    labels = {split: np.array([label for label, *_ in pairs]) for split, pairs in PAIRS.items()}
    majority = np.bincount(labels["train"]).argmax()
    assert task.chance == 0.5
    assert task.trivial_score == pytest.approx((labels["test"] == majority).mean())
    assert task.score(torch.from_numpy(labels["test"]), task.split("test"))["accuracy"] == 1


def replaced(text):
    def damage(folder):
        (folder / "new_aan_pairs.test.tsv").write_text(text)
        return folder

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: folder / "gone",
            f"gone does not exist. It must be the folder with .* {WHERE}",
        ),
        (
            lambda folder: (folder / "new_aan_pairs.eval.tsv").unlink() or folder,
            f"no new_aan_pairs.eval.tsv. .*{WHERE}",
        ),
        (lambda folder: folder / "new_aan_pairs.eval.tsv", f"is not a folder. .*{WHERE}"),
        (replaced(""), "test.tsv has no pair"),
        (
            replaced("1\ta\tb\n"),
            "line 1 of .* must have 5 fields, .* it has 3. .*only_ids.tsv have names without texts",
        ),
        (
            replaced("1\ta\tb\tx\ty\n2\ta\tb\tx\ty\n"),
            "line 2 of .* must begin with the label 0 or 1; .* b'2'",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(folder, damage, message):
    with pytest.raises(DataError, match=message) as caught:
        AAN(path=damage(folder)).prepared()
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=f"`path` must be the path of the files; got None.*{WHERE}"):
        AAN().prepared()


def test_a_classifier_of_pairs_trains_and_its_scores_are_those_of_the_rebuilt_model(folder, tmp_path):
    task: Task = AAN(path=folder, length=40)
    assert isinstance(task, Task) and isinstance(task, ScoredTask) and isinstance(task, PairedTask)
    model = SequenceClassifierConfig(n_outputs=1, vocab_size=1, d_model=8, n_layers=1)
    loop = LoopConfig(device="cpu", batch_size=4, accumulate=2, steps=3, eval_every=3, log_every=1)
    config = TrainConfig("tiny", task, model, loop=loop)
    assert config.model.pairs and config.model.n_outputs == 2
    result = fit(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.config == config
    batch = task.split("test").rows(torch.arange(7))
    with torch.no_grad():
        logits = run.classifier()(batch.inputs, lengths=batch.lengths)
    # 7 pairs in batches of 4: what fills the last one counts for nothing
    loss = functional.cross_entropy(logits.double(), batch.targets)
    assert result.test["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert result.test["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == batch.targets).double().mean())
    )
    # the tokens of both papers
    speeds = [record for record in run.metrics if record["split"] == "train"]
    assert all(s["tokens_per_second"] == pytest.approx(s["steps_per_second"] * 4 * 80) for s in speeds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")
def test_pairs_compiled_and_captured_agree_with_eager(folder, tmp_path):
    model = SequenceClassifierConfig(n_outputs=1, vocab_size=1, d_model=8, n_layers=1, mixer="gla")
    for mode in ("off", "on"):
        loop = LoopConfig(device="cuda", compile=mode, batch_size=4, steps=8, eval_every=4, log_every=1)
        fit(TrainConfig("tiny", AAN(path=folder, length=40), model, loop=loop), tmp_path / mode)
    losses = [[record["loss"] for record in load_run(tmp_path / mode).metrics] for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_recipe_compares_pairs_and_survives_json():
    config = get_recipe("lra-retrieval")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert config.model.pairs and config.model.vocab_size == 256
    assert not get_recipe("lra-text").model.pairs
