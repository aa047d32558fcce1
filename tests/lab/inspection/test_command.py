"""`linrec inspect`, on runs of one step."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from linrec.cli import main
from linrec.lab import style
from linrec.lab.inspection import (
    choose_tokens,
    forgetting,
    histogram,
    inspect_model,
    reach,
    time_scales,
    write_inspection,
)
from linrec.lab.tasks import LanguageModeling, MemoryHorizon
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.models import ModelConfig
from tests.tiers import thorough

TEXT = "a rose is a rose "
ALPHABET = sorted(set(TEXT))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs called "hgru", "lru" and "attention" on a text, "documents" with resets, and "horizon"."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "text.txt").write_text(TEXT * 20)
    for number in range(12):
        (folder / f"{number}.md").write_text("a rose")
    text = LanguageModeling(
        path=folder / "text.txt", tokenizer="characters", length=16, cache=folder / "cache"
    )
    documents = dataclasses.replace(text, path=folder / "*.md", documents=True, tokenizer="bytes")
    horizon = MemoryHorizon(length=12, n_resets=1, n_samples=20, n_validation=4, n_test=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, mixer, task in (
        ("hgru", "hgru", text),
        ("lru", "lru", text),
        ("attention", "attention", text),
        ("documents", "hgru", documents),
        ("horizon", "gate_loop", horizon),
    ):
        model = ModelConfig(vocab_size=1, d_model=8, n_layers=2, mixer=mixer)
        loop = LoopConfig(steps=1, batch_size=2, device="cpu")
        fit(TrainConfig(name, task, model, loop=loop), folder / name)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(autouse=True)
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder where the runs can be found, and draw coarse pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(style, "DOTS_PER_INCH", 20)
    for run in runs.iterdir():
        if run.is_dir():
            (tmp_path / run.name).symlink_to(run)


def inspected(*words: str) -> tuple[dict, str]:
    """The numbers and the page of a command that works."""
    assert main(["inspect", *words, "--device", "cpu", "--out", "out"]) == 0
    return json.loads(Path("out/inspection.json").read_text()), Path("out/inspection.html").read_text()


@thorough
def test_numbers_and_page_of_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, page = inspected("hgru", "--prompt", "a rose")
    tokens = [ALPHABET.index(character) for character in "a rose"]
    layers = inspect_model(load_run("hgru").model(), torch.tensor([tokens]))
    assert (numbers["tokens"], numbers["text"], numbers["mixer"]) == (tokens, "a rose", "hgru")
    assert numbers["bin_edges"] == pytest.approx(np.linspace(0, 1, 51))
    for told, layer, block in zip(numbers["layers"], layers, load_run("hgru").model().blocks, strict=True):
        assert told["name"] == layer.name and told["reach"] == reach(layer)
        assert told["phase"] == block.mixer.theta.tolist()
        forget = told["forget"]
        assert forget.pop("histogram") == histogram(layer).tolist()
        assert forget.pop("time_scales") == time_scales(layer).tolist()
        assert forget == forgetting(layer).to_dict()
    said = capsys.readouterr().out
    assert said.startswith("the prompt: all 6 tokens\n") and said.endswith("wrote out/inspection.html\n")
    for told in numbers["layers"]:
        row = [told["name"], "8", *(f"{told['forget'][name]:.3f}" for name in ("mean", "median"))]
        assert re.search(r"^" + r" +".join(row), said, re.MULTILINE)
        first, *others = row
        assert f"<td>{first}</td>" + "".join(f'<td class="number">{cell}</td>' for cell in others) in page


@thorough
def test_the_page_holds_its_pictures_and_its_text() -> None:
    _, page = inspected("hgru", "--prompt", "a rose is a rose is a rose is a rose is a rose")
    pictures = re.findall(r'<img alt="([^"]*)" src="([^"]*)"', page)
    assert [title for title, _ in pictures] == [
        "Forget values",
        "Token mixing",
        "State transitions",
        "State transitions, token by token",
    ]
    assert all(source.startswith("data:image/png;base64,") for _, source in pictures)
    assert '<pre class="sample">\na rose is a rose is a rose is a rose is a rose</pre>' in page
    assert "linrec inspect hgru --prompt &#39;a rose is" in page and "What is missing" not in page
    names = ["histograms.png", "text.png", "token_mixing.png", "transitions.png"]
    assert sorted(path.name for path in Path("out").iterdir()) == [
        *names[:1],
        "inspection.html",
        "inspection.json",
        *names[1:],
    ]


@thorough
def test_mixers_that_tell_less_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, page = inspected("attention", "--prompt", "a rose")
    sentence = "The mixer has no state transitions, so there are no forget values."
    assert sentence in page and sentence in capsys.readouterr().out
    assert sorted(path.name for path in Path("out").glob("*.png")) == ["token_mixing.png"]
    assert all(told["forget"] is None and told["reach"] > 0 for told in numbers["layers"])

    shutil.rmtree("out")
    numbers, page = inspected("lru", "--prompt", "a rose", "--no-matrices")
    assert "The transitions are the same at every token" in page
    assert "There are no token-mixing matrices." in page
    assert [path.name for path in Path("out").glob("*.png")] == ["histograms.png"]
    assert all(told["forget"]["constant"] and told["reach"] is None for told in numbers["layers"])


@thorough
def test_the_text_is_that_of_the_run_or_another(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, page = inspected("hgru", "--tokens", "9")
    held_out = (TEXT * 20)[306:]
    assert numbers["text"] == held_out[:9] and "its first 9 of 34 tokens" in page
    assert capsys.readouterr().out.startswith("the validation split of text.txt: the first 9 of 34 tokens\n")
    assert inspected("hgru", "--split", "train", "--tokens", "4")[0]["text"] == "a ro"
    Path("other.txt").write_text("rose is")
    assert inspected("hgru", "--data.path", "other.txt")[0]["text"] == "rose is"


@thorough
def test_documents_do_not_reach_each_other() -> None:
    run = load_run("documents")
    found = write_inspection(run, choose_tokens(run, 12, split="train"), out="out")
    assert found.tokens.labels == (*"a␣rose", "∎", *"a␣ros")
    assert found.tokens.reset.nonzero()[:, 1].tolist() == [0, 7]
    for layer in found.layers:
        assert not layer.mixing[0, 7:, :7].any() and layer.mixing[0, 6, 0] > 0


@thorough
def test_a_run_of_another_task_is_inspected_on_its_first_validation_sequence() -> None:
    numbers, page = inspected("horizon")
    task = load_run("horizon").config.task
    first = task.split("validation").inputs[0].tolist()
    assert numbers["tokens"] == first and numbers["text"] is None
    assert f"<pre>\n{' '.join(map(str, first)).replace('5', 'R')}</pre>" in page
    assert [told["phase"] for told in numbers["layers"]] == ["changes", "changes"]
    assert inspected("horizon", "--tokens", "5")[0]["tokens"] == first[:5]


def test_names_of_tokens() -> None:
    Path("odd.txt").write_text("é\n\tx")
    found = choose_tokens(load_run("documents"), 12, path="odd.txt")
    # two bytes of one letter, then what leaves no mark, and the end of the document
    assert found.labels == ("\ufffd", "\ufffd", "↵", "→", "x", "∎")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hgr"], "there is no run folder hgr; did you mean hgru?"),
        (["hgru", "--prompt", "a"], "the prompt must have at least 2 tokens"),
        (["hgru", "--tokens", "1"], "--tokens must be at least 2, so that one can affect another; got 1"),
        (["hgru", "--split", "train"], "--tokens must be at most 64 for token-mixing matrices"),
        (["hgru", "--prompt", "x"], "the character 'x' (U+0078) is not among the 7"),
        (["hgru", "--prompt", "a", "--data.path", "b"], "leave out --data.path and --split"),
        (["hgru", "--data.path", "no.txt"], "`path` = no.txt does not exist."),
        (["hgru", "--split", "test"], "has no test data"),
        (["horizon", "--prompt", "a"], "horizon is not a language model"),
        (["horizon", "--data.path", "a"], "horizon is not a language model"),
        (["attention", "--no-matrices"], "nothing can be shown of the mixer 'attention'"),
        (["hgru", "--token", "3"], "there is no option --token; did you mean --tokens?"),
        (["hgru", "--out", "taken"], "could not write to taken: File exists."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    Path("taken").write_text("")
    monkeypatch.setattr("linrec.lab.inspection.write.MOST", 64)
    assert main(["inspect", *words]) == 2
    # after what is told of a text that is tokenised for the first time
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last and last.startswith("linrec: ")


def test_a_run_without_checkpoint(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    shutil.copytree(runs / "hgru", "new", ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(["inspect", "new"]) == 2
    assert "new has no checkpoint yet; train it until its first checkpoint." in capsys.readouterr().err
    assert not Path("new/inspection").exists()
