"""Translation: pairs of files and data sets, batches of similar lengths, scores of what a model writes."""

import dataclasses
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from linrec.cli import main
from linrec.lab.corpora.pairs import Pair
from linrec.lab.tasks import Batch, GeneratedTask, SourcedTask, TokenizedTask
from linrec.lab.tasks.translation import PairSplit, Translation
from linrec.lab.train import (
    ConfigError,
    LearnerConfig,
    LoopConfig,
    OptimConfig,
    TrainConfig,
    get_recipe,
    load_run,
)
from linrec.lab.train.config import config_from_dict, config_to_dict, make_model
from linrec.lab.train.data import Batches
from linrec.lab.train.fabric import make_fabric
from linrec.lab.train.step import Objective, evaluate
from linrec.models import EncoderConfig, EncoderDecoder, EncoderDecoderConfig, ModelConfig
from linrec.text import CharacterTokenizer, DataError, read_tokenizer

TRAIN = [("ab", "x"), ("b", "yz"), ("", "z"), ("abba", "xyzzy"), ("a b", ""), ("aa", "zz"), ("ba", "y x")]
HELD_OUT = [("aa", "zz"), ("", "x")]
END = 256


def write(folder: Path, **splits: list[tuple[str, str]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, pairs in splits.items():
        for language, side in (("de", 0), ("en", 1)):
            lines = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{name}.{language}").write_text(lines)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "pairs", train=TRAIN, dev=HELD_OUT, test=HELD_OUT)


def texts(split: PairSplit) -> list[tuple[str, str]]:
    """Return the pairs as their tokens say."""
    batch, decode = split.rows(torch.arange(len(split))), Translation().tokenizer_object().decode
    assert batch.source is not None and batch.source_lengths is not None
    rows = zip(batch.source, batch.source_lengths, batch.targets, strict=True)
    return [(decode(x[:n]), decode(y[y >= 0])) for x, n, y in rows]


def test_a_batch_is_padded_to_its_longest_texts(folder: Path) -> None:
    split = Translation(path=folder).split("train")
    assert texts(split) == [("ab", "x"), ("b", "yz"), ("abba", "xyzzy"), ("ba", "y x")]
    batch = split.rows(torch.tensor([1, 0]))
    a, b, x, y, z = map(ord, "abxyz")
    assert batch.source is not None and batch.source_lengths is not None
    assert batch.source.tolist() == [[b, END, 0], [a, b, END]]
    assert batch.source_lengths.tolist() == [2, 3]
    assert batch.inputs.tolist() == [[END, y, z], [END, x, END]]
    assert batch.targets.tolist() == [[y, z, END], [x, END, -100]]


def test_training_leaves_out_pairs_that_other_splits_keep(folder: Path) -> None:
    task = Translation(path=folder, length=4)
    # without held-out pairs, empty sides, and more than 4 tokens
    assert texts(task.split("train")) == [("ab", "x"), ("b", "yz"), ("ba", "y x")]
    for name in ("validation", "test"):
        assert texts(task.split(name)) == HELD_OUT


def test_missing_splits_are_cut_from_the_end(tmp_path: Path) -> None:
    pairs = [(f"a{n}", f"b{n}") for n in range(20)]
    task = Translation(path=write(tmp_path / "one", train=pairs), validation_share=0.1, test_share=0.25)
    assert texts(task.split("train")) == pairs[:13]
    assert texts(task.split("validation")) == pairs[13:15]
    assert texts(task.split("test")) == pairs[15:]


@pytest.mark.parametrize("nested", [True, False])
def test_a_data_set_of_hugging_face_is_the_same_data(
    nested: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason='the extra "text" is not installed')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()

    def rows(pairs: list[tuple[str, str]]) -> Any:
        if nested:
            return {"translation": [{"de": source, "en": target} for source, target in pairs]}
        return {"de": [source for source, _ in pairs], "en": [target for _, target in pairs]}

    splits = {"train": TRAIN, "validation": HELD_OUT, "test": HELD_OUT}
    made = {name: datasets.Dataset.from_dict(rows(pairs)) for name, pairs in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    task = Translation(dataset=str(tmp_path / "saved"))
    for name in splits:
        assert texts(task.split(name)) == texts(Translation(path=folder).split(name))
    with pytest.raises(DataError, match="no language 'fr'"):
        Translation(dataset=str(tmp_path / "saved"), source="fr").split("train")


def test_batches_have_similar_lengths_and_each_pair_once(tmp_path: Path) -> None:
    numbers = random.Random(0)
    sizes = [(numbers.randint(1, 30), numbers.randint(1, 30)) for _ in range(503)]
    split = PairSplit.of([Pair("a" * m, "b" * n) for m, n in sizes], CharacterTokenizer("ab"), 2)
    orders = [split.order(batch_size=8, seed=0, epoch=epoch) for epoch in (0, 1)]
    for order in orders:
        assert order.sort().values.tolist() == list(range(503))
    assert not torch.equal(*orders)
    assert torch.equal(orders[0], split.order(batch_size=8, seed=0, epoch=0))
    batches = [*Batches(split, batch_size=8, seed=0, device=torch.device("cpu")).epoch(0)]
    assert len(batches) == 503 // 8
    padding = [(batch.targets < 0).float().mean().item() for batch in batches]
    assert sum(padding) / len(padding) < 0.05
    # short and long batches alternate at random
    widths = [batch.targets.shape[1] for batch in batches]
    assert widths != sorted(widths)


MODEL = EncoderDecoderConfig(
    vocab_size=1,
    d_model=8,
    n_layers=1,
    mixer="lru",
    encoder=EncoderConfig(vocab_size=1, d_model=8, n_layers=1, mixer=("gru",)),
    share_embeddings=True,
)


def test_the_loss_is_of_each_token_whatever_the_batch(folder: Path) -> None:
    config = TrainConfig("tr", Translation(path=folder).prepared(), MODEL)
    torch.manual_seed(0)
    model = make_model(config.model)
    assert isinstance(model, EncoderDecoder)
    fabric = make_fabric(LoopConfig(device="cpu"))
    objective, split = Objective(model), config.task.split("train")
    found = [
        evaluate(fabric, objective, config.task, split, batch_size=size)["loss"] for size in (1, 2, 3, 4)
    ]
    total = count = 0.0
    for row in range(len(split)):
        batch = split.rows(torch.tensor([row]))
        logits, _ = model(batch.inputs, source=batch.source)
        total -= logits.log_softmax(-1).gather(2, batch.targets[..., None]).sum().item()
        count += batch.targets.numel()
    assert found == pytest.approx([total / count] * 4, rel=1e-5)


def test_translations_are_those_of_each_text_alone(folder: Path) -> None:
    task = Translation(path=folder, length=8).prepared()
    torch.manual_seed(0)
    model = make_model(TrainConfig("tr", task, MODEL).model).eval()
    assert isinstance(model, EncoderDecoder)
    # far from training, so that translations of several texts differ
    torch.nn.init.normal_(model.blocks[0].reading.attention.out.weight, std=20.0)  # type: ignore[union-attr]
    lines = ["ab", "", "abba b", "b"]
    together = task.translate(model, lines)
    assert together == [task.translate(model, [line])[0] for line in lines]
    assert len(set(together)) > 1, together


def test_the_score_is_that_of_sacrebleu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("a", "the cat sat on the mat"), ("b", "there is a cat on the mat")]
    task = Translation(path=write(folder, test=pairs))
    monkeypatch.setattr(Translation, "translate", lambda *_: [target for _, target in pairs])
    scores = task.generated_scores(None, task.split("test"))  # type: ignore[arg-type]
    assert scores["bleu"] == pytest.approx(100) and "version:" in scores["bleu_signature"]
    monkeypatch.setattr(Translation, "translate", lambda *_: ["the cat sat on a mat", pairs[1][1]])
    assert 50 < task.generated_scores(None, task.split("test"))["bleu"] < 95  # type: ignore[arg-type]


def test_a_missing_package_is_named_before_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(DataError, match=r"needs the package 'sacrebleu'.*pip install 'linrec\[text\]'"):
        Translation(path=folder).prepared()


def test_interfaces_and_sizes(folder: Path) -> None:
    task = Translation(path=folder, tokenizer="characters")
    assert isinstance(task, SourcedTask) and isinstance(task, GeneratedTask)
    assert isinstance(task, TokenizedTask) and task.vocab_size is None
    # the characters of the training pairs, and the end
    assert task.prepared().vocab_size == task.prepared().source_vocab_size == 7
    assert Translation(path=folder).prepared().vocab_size == 257
    assert Translation(path=folder, vocab_size=300).prepared().n_outputs == 300
    # the end is the most frequent token of short targets, and 2 of the test's 5 tokens
    assert Translation(path=folder, length=5).trivial_score == pytest.approx(2 / 5)
    assert task.chance == 1 / 7


def test_configurations_are_stored(folder: Path) -> None:
    config = TrainConfig("tr", Translation(path=folder).prepared(), MODEL, optim=OptimConfig())
    assert isinstance(config.model, EncoderDecoderConfig)
    assert config.model.encoder.vocab_size == config.model.vocab_size == 257
    assert config_from_dict(config_to_dict(config)) == config
    stored = config_to_dict(config)
    stored["model"]["encoder"]["mixer_args"] = {"refine": "much"}
    with pytest.raises(ConfigError, match=r"gru.refine` must be true or false; got 'much'"):
        config_from_dict(stored)
    memory = dataclasses.replace(MODEL, memory={"kind": "recurrent_memory", "form": "encoder"})
    with pytest.raises(ConfigError, match=r"`model.memory.kind` must be 'none' for sources of any length"):
        dataclasses.replace(config, model=memory)
    with pytest.raises(ConfigError, match=r"`learner` must be None for an encoder-decoder.*got 'bptt'"):
        dataclasses.replace(config, learner=LearnerConfig(learner="bptt"))
    with pytest.raises(ConfigError, match="`model` must be a EncoderDecoderConfig for the task Translation"):
        TrainConfig("tr", Translation(path=folder), ModelConfig(vocab_size=1))


def test_batches_without_sources_have_none() -> None:
    assert Batch(torch.zeros(1, 2), torch.zeros(1, 2), None).source is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": None}, "got neither. Pass a folder"),
        ({"dataset": "x"}, "exactly one of `path` and `dataset`"),
        ({"source": "fr"}, "train.en has no translation: there is no train.fr"),
        ({"length": 1}, "`length` must be at least 2"),
        ({"test_share": 0.99}, "with a sum below 1"),
        ({"vocab_size": 200}, "`vocab_size` must be at least the 257 tokens"),
        ({"length": 2}, "no training pair has text on both sides and at most 2 tokens"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises((DataError, ValueError), match=message):
        Translation(**{"path": folder} | change).prepared()


def test_files_that_do_not_fit_each_other_are_refused(folder: Path) -> None:
    (folder / "test.en").write_text("one\ntwo\nthree\n")
    with pytest.raises(DataError, match=r"equally many lines.* 2 and 3"):
        Translation(path=folder).split("test")
    write(folder, test=HELD_OUT, val=HELD_OUT)
    with pytest.raises(DataError, match="several files of the split 'validation'"):
        Translation(path=folder).split("test")
    (folder / "val.de").unlink()
    (folder / "val.en").unlink()
    (folder / "train.de").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"train.de cannot be read"):
        Translation(path=folder).split("test")


def command_line(folder: Path, *, width: int, steps: int, n: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the words of a run that learns to reverse strings, and the test pairs."""
    numbers = random.Random(0)
    sources = {"".join(numbers.choices("abcd", k=numbers.randint(2, 6))): None for _ in range(n)}
    pairs = [(text, " ".join(reversed(text))) for text in sources]
    write(folder / "data", train=pairs[:-60], valid=pairs[-60:-30], test=pairs[-30:])
    words = ["train", "translation", "--data.path", "data", "--data.tokenizer", "characters"]
    words += ["--data.length", "16", "--model.mixer", "gru", "--model.encoder.mixer", "lru"]
    words += ["--model.encoder.mixer-args.r-min", "0.5", "--loop.compile", "off", "--loop.device", "cpu"]
    for side in ("--model.", "--model.encoder."):
        words += [f"{side}d-model", str(width), f"{side}n-layers", "1", f"{side}d-channel-mixing", "64"]
    words += ["--loop.precision", "32-true", "--optim.lr", "0.01", "--optim.warmup-steps", f"{steps // 6}"]
    words += ["--loop.steps", str(steps), "--loop.eval-every", str(steps // 2)]
    return [*words, "--loop.checkpoint-every", str(2 * steps // 3)], pairs[-30:]


def test_the_command_line_learns_to_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, pairs = command_line(tmp_path, width=32, steps=300, n=3000)
    assert main([*words, "--out", "run"]) == 0
    assert ", BLEU " in capsys.readouterr().out
    run = load_run("run")
    assert run.result is not None and run.result["test"]["bleu"] > 60
    model = run.model()
    assert isinstance(model, EncoderDecoder) and model.config.encoder.mixer_args["r_min"] == 0.5
    task = run.config.task
    assert isinstance(task, Translation)
    found = task.translate(model, [source for source, _ in pairs], tokenizer=read_tokenizer("run"))
    assert sum(text == target for text, (_, target) in zip(found, pairs, strict=True)) > 15
    for command in ("generate", "eval", "inspect"):
        assert main([command, "run"]) == 2
        assert re.search("is not a language model|is an encoder-decoder", capsys.readouterr().err)


def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words, _ = command_line(tmp_path, width=8, steps=12, n=300)
    for name in ("whole", "cut"):
        assert main([*words, "--out", name]) == 0
    # as if it had stopped after the checkpoint of step 8
    cut = Path("cut")
    (cut / "checkpoint.previous.safetensors").replace(cut / "checkpoint.safetensors")
    (cut / "result.json").unlink()
    assert main(["train", "--resume", "cut"]) == 0
    for name, tensor in load_run("cut").model().state_dict().items():
        assert torch.equal(tensor, load_run("whole").model().state_dict()[name]), name


def test_the_recipe_has_an_encoder_decoder() -> None:
    config = get_recipe("translation")
    assert isinstance(config.model, EncoderDecoderConfig) and config.optim.label_smoothing == 0.1
