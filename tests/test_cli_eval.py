"""`linrec eval`, on runs of a few steps: which text, what it says, what it writes."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from linrec.cli import main
from linrec.lab import evaluation
from linrec.lab.evaluation import choose_text, evaluate_windows
from linrec.lab.tasks import LanguageModeling, MemoryHorizon
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.lab.train.run import tokenizer_of
from linrec.models import ModelConfig
from linrec.text import CharacterTokenizer

TEXT = "a rose is a rose is a rosé — € —\n" * 10
HELD_OUT = "is a rose a rosé?\nno\n"
OTHER = "a rosé is — as is a — a rosé"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs called "bytes", "characters", "files" (documents, with a test split) and "horizon"."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "text.txt").write_text(TEXT)
    (folder / "texts").mkdir()
    for name, text in {"train": TEXT, "test.1": HELD_OUT, "test.2": HELD_OUT, "valid": OTHER}.items():
        (folder / "texts" / f"{name}.txt").write_text(text)
    task = LanguageModeling(path=folder / "text.txt", length=16, cache=folder / "cache")
    tasks = {
        "bytes": task,
        "characters": dataclasses.replace(task, tokenizer="characters"),
        "files": dataclasses.replace(task, path=folder / "texts", documents=True),
        "horizon": MemoryHorizon(length=8, n_resets=1, n_samples=20, n_validation=4, n_test=4),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, of in tasks.items():
        model = ModelConfig(vocab_size=1, d_model=8, n_layers=1, mixer="hgru")
        loop = LoopConfig(steps=2, batch_size=2, device="cpu")
        fit(TrainConfig(name, of, model, loop=loop), folder / name)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(autouse=True)
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder of its own with a copy of each run, and other texts."""
    monkeypatch.chdir(tmp_path)
    for run in runs.iterdir():
        if (run / "config.json").is_file():
            shutil.copytree(run, tmp_path / run.name)
    Path("other.txt").write_text(OTHER)
    Path("empty.txt").write_text("")
    Path("one.txt").write_text("a")
    Path("latin.txt").write_bytes("rosé".encode("latin-1"))


def evaluated(*words: str) -> dict[str, Any]:
    """What a command that works writes into the run folder, or into that of --out."""
    assert main(["eval", *words, "--device", "cpu"]) == 0
    folder = Path(words[words.index("--out") + 1] if "--out" in words else words[0])
    assert (folder / "perplexity.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    content: dict[str, Any] = json.loads((folder / "perplexity.json").read_text())
    return content


@pytest.mark.parametrize("run", ["bytes", "characters", "files"])
def test_the_run_s_own_text_is_not_tokenised_again(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr("linrec.lab.corpora.corpus.write_shards", lambda *given: written.append(given))
    for _ in range(2):
        assert choose_text(load_run(run)).tokens.counts.tokens
    assert not written


def test_another_text_is_tokenised_once(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (1, 2):
        evaluated("characters", "--data", "other.txt", "--lengths", "8")
        assert capsys.readouterr().err.count("tokenising") == (command == 1)


def test_a_text_that_lost_a_character_keeps_the_tokens_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT.replace("a", "o"))
    run = load_run("characters")
    config = dataclasses.replace(run.config, task=dataclasses.replace(run.config.task, path=path))
    found = choose_text(dataclasses.replace(run, config=config)).tokens.tokens()
    # without "a", a new tokenizer would give other numbers to the characters after it
    assert tokenizer_of(run).decode(found.tolist()) == TEXT.replace("a", "o")[-len(found) :]


def test_the_run_s_own_text_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    content = evaluated("bytes", "--lengths", "8,16", "--carry")
    eight, trained, carried = content["scores"]
    # at the length of training it is what training found at its end
    result = json.loads(Path("bytes/result.json").read_text())
    assert trained["loss"] == pytest.approx(result["validation"]["loss"], rel=1e-6)
    assert trained["perplexity"] == pytest.approx(math.exp(trained["loss"]))
    assert [score["length"] for score in content["scores"]] == [8, 16, None]
    assert {score["tokens"] for score in content["scores"]} == {content["text"]["tokens"] - 1}
    assert eight["nats"] != trained["nats"] != carried["nats"]
    about = {name: content[name] for name in ("recipe", "split", "documents", "tokenizer", "trained_length")}
    assert about == {
        "recipe": "bytes",
        "split": "validation",
        "documents": False,
        "tokenizer": "bytes",
        "trained_length": 16,
    }
    assert content["command"] == "linrec eval bytes --lengths 8,16 --carry --device cpu"
    assert content["device"]["type"] == "cpu" and content["versions"]["torch"] == torch.__version__

    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith(f"the validation split of text.txt: {content['text']['tokens']} tokens, ")
    assert " ".join(lines[1].split()) == "window per token per word per byte bits/byte bits/char"
    names = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "bits_per_character")
    for line, title, score in zip(lines[2:], ("8", "16*", "carried"), content["scores"], strict=False):
        shown, *numbers = line.split()
        assert shown == title
        for number, name in zip(numbers, names, strict=True):
            assert float(number.replace(",", "")) == pytest.approx(score[name], rel=1e-2), name
    assert lines[5:] == ["* the length in training", "wrote perplexity.json and perplexity.png to bytes"]
    assert said.err.splitlines() == ["windows of 8", "windows of 16", "the whole text, state carried"]


def test_the_test_split_comes_first_and_documents_stay_apart() -> None:
    content = evaluated("files", "--lengths", "30")
    # twice the text, each with the token for its end
    n_bytes = len(HELD_OUT.encode())
    assert content["split"] == "test" and content["documents"]
    assert content["text"] == {
        "tokens": 2 * (n_bytes + 1),
        "documents": 2,
        "characters": 2 * len(HELD_OUT),
        "bytes": 2 * n_bytes,
        "words": 2 * 6,
        "lines": 2 * 2,
    }
    (score,) = content["scores"]
    loss, n_tokens = score["loss"], 2 * (n_bytes + 1)
    assert score["byte_perplexity"] == pytest.approx(math.exp(loss * n_tokens / (2 * n_bytes)))
    assert score["word_perplexity"] == pytest.approx(math.exp(loss * n_tokens / (2 * 8)))
    # the documents have the same text, and the second is read as if it were alone
    run = load_run("files")
    alone = choose_text(run, split="test").tokens
    half = dataclasses.replace(alone, ids=alone.ids[: n_bytes + 2])
    one = evaluate_windows(run.model(), dataclasses.replace(half, ids=half.ids[:-1]), n_bytes)
    two = evaluate_windows(run.model(), half, n_bytes + 1)
    whole = evaluate_windows(run.model(), alone, 2 * n_bytes + 1)
    assert whole.nats == pytest.approx(one.nats + two.nats, rel=1e-6)
    assert evaluated("files", "--split", "validation", "--lengths", "30")["text"]["words"] == 10


@pytest.mark.parametrize("option", ["--data", "--data.path"])
def test_another_text_in_the_tokens_of_the_run(option: str) -> None:
    content = evaluated("characters", option, "other.txt", "--out", "found/here")
    assert not Path("characters/perplexity.json").exists()
    assert (content["data"], content["split"], content["tokenizer"]) == ("other.txt", None, "characters")
    assert content["text"]["tokens"] == len(OTHER) and content["text"]["bytes"] == len(OTHER.encode())
    # all lengths of the table are longer than the text
    assert [score["length"] for score in content["scores"]] == [16]
    # the tokens are those of the text that the run was trained on, not of this one
    text = choose_text(load_run("characters"), path="other.txt").tokens
    tokenizer = CharacterTokenizer("".join(sorted(set(TEXT))))
    assert text.tokens().tolist() == tokenizer.encode(OTHER).tolist()
    # folders with names of splits have splits
    folder = json.loads(Path("files/config.json").read_text())["config"]["task"]["path"]
    named = evaluated("bytes", option, f"{folder}/*.txt", "--split", "validation")
    assert named["split"] == "validation" and named["text"]["words"] == 10


def test_data_sets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets", reason='the extra "text" is not installed')
    datasets.Dataset.from_dict({"line": ["a rose", "is —"]}).save_to_disk("rows")
    content = evaluated("bytes", "--data.dataset", "rows", "--data.text-column", "line", "--lengths", "8")
    assert content["text"]["bytes"] == len("a rose\nis —\n".encode()) and content["split"] is None


def test_the_text_of_the_run_need_not_be_there_for_another() -> None:
    config = json.loads(Path("characters/config.json").read_text())
    config["config"]["task"]["path"] = "gone.txt"
    Path("characters/config.json").write_text(json.dumps(config))
    assert evaluated("characters", "--data", "other.txt")["text"]["words"] == 10


def test_a_stopped_evaluation_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = evaluated("bytes", "--lengths", "8")
    files = sorted(path.name for path in Path("bytes").iterdir())
    original, calls = evaluate_windows, []

    def stopped(*args: Any, **named: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **named)

    monkeypatch.setattr(evaluation.write, "evaluate_windows", stopped)
    assert main(["eval", "bytes", "--lengths", "4,16"]) == 130
    assert capsys.readouterr().err.endswith("linrec: stopped.\n") and len(calls) == 2
    assert sorted(path.name for path in Path("bytes").iterdir()) == files
    assert json.loads(Path("bytes/perplexity.json").read_text()) == before


def test_a_full_disk_is_no_mistake_of_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert main(["eval", "bytes", "--lengths", "8"]) != 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("linrec: could not write ") and said.endswith("No space left on device.")
    assert not Path("bytes/perplexity.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "RUN"),
        (["nowhere"], "there is no run folder nowhere"),
        (["bytes", "--lenghts", "8"], "there is no option --lenghts; did you mean --lengths?"),
        (["bytes", "--lengths", "8;9"], "--lengths must be positive numbers separated by commas"),
        (["bytes", "--lengths", "8,99999"], "less than the 40 tokens of the validation split of text.txt"),
        (["bytes", "--split", "test"], "text.txt has no test data, only train, validation; pass another"),
        (["bytes", "--batch-tokens", "0"], "`batch_tokens` must be at least 1; got 0."),
        (["bytes", "--data", "gone.txt"], "`path` = gone.txt does not exist."),
        (["bytes", "--data", "empty.txt"], "`path` = empty.txt has no text: its files are empty."),
        (["bytes", "--data", "latin.txt"], "latin.txt is not UTF-8: unexpected end of data at byte 3"),
        (
            ["bytes", "--data", "one.txt"],
            "one.txt must have at least 2 tokens, to predict the second; it has 1.",
        ),
        (
            ["bytes", "--data", "other.txt", "--split", "test"],
            "other.txt has no splits, so it is evaluated as a whole",
        ),
        (["bytes", "--data", "a", "--data.dataset", "b"], "one of `path` and `dataset` must be given; got"),
        (["characters", "--data", "capitals.txt"], "the character 'R' (U+0052) is not among the"),
        (["horizon"], "horizon is not a language model: it was trained on MemoryHorizon"),
        (["large"], "the tokenizer in large has 2,000 tokens, but its model has 257"),
        (["untokenised"], "there is no tokenizer in untokenised: it has no tokenizer.json."),
        (["unsaved"], "unsaved has no checkpoint yet; train it until its first checkpoint."),
        (
            ["moved"],
            "the text of moved cannot be used: `path` = gone.txt does not exist. Or pass --data FILE.",
        ),
        (["bytes", "--lengths", "8", "--out", "other.txt"], "could not write to other.txt: File exists."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_answered_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("capitals.txt").write_text("a Rose")
    for name in {"large", "untokenised", "unsaved", "moved"} & {*words}:
        shutil.copytree("bytes", name)
    if "large" in words:
        CharacterTokenizer("".join(map(chr, range(0x4000, 0x4000 + 2000)))).save(Path("large"))
    if "untokenised" in words:
        Path("untokenised/tokenizer.json").unlink()
    if "unsaved" in words:
        Path("unsaved/checkpoint.safetensors").unlink()
    if "moved" in words:
        config = json.loads(Path("moved/config.json").read_text())
        config["config"]["task"]["path"] = "gone.txt"
        Path("moved/config.json").write_text(json.dumps(config))
    assert main(["eval", *words]) == 2
    said = capsys.readouterr()
    # reading a text is told before what is wrong with it
    lines = [line for line in said.err.splitlines() if line.startswith("linrec: ")]
    assert said.err.splitlines()[-1:] == lines and message in lines[0] and not said.out


def test_the_table_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path("long.txt").write_text(OTHER * 80)
    evaluated("bytes", "--data", "long.txt", "--carry")
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines[2:-2]]
    assert shown[:3] == ["16*", "512", "768"] and shown[-1] == "carried" and "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_help_fits_into_half_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["eval", "--help"]) == 0
    said = capsys.readouterr()
    assert "usage: linrec eval" in said.out and "--batch-tokens" in said.out and not said.err
