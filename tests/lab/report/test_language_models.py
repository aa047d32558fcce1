"""Reports of language models: perplexities for accuracies, and no need of the text."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from markupsafe import escape

from linrec.cli import main
from linrec.errors import printable
from linrec.files import parse_json
from linrec.lab.evaluation import choose_text, evaluate_run
from linrec.lab.pages import Text, render
from linrec.lab.report import collect_runs, write_report
from linrec.lab.report.collect import _prompt
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.models import ModelConfig
from linrec.text import CharacterTokenizer
from tests.lab.report.test_write import Page
from tests.tiers import thorough

SAMPLE = {"text": "a", "prompt": "a newline", "temperature": 0.8, "seed": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs "one" and "two", of two seeds, evaluated and without test split; and "tested", with one."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "text.txt").write_text("a rose is a rosé\n" * 20)
    task = LanguageModeling(path=folder / "text.txt", length=16, cache=folder / "cache")
    model = ModelConfig(vocab_size=1, d_model=8, n_layers=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tasks = {"one": task, "two": task, "tested": dataclasses.replace(task, test_share=0.2)}
    for seed, (name, of) in enumerate(tasks.items()):
        loop = LoopConfig(steps=2, batch_size=2, log_every=1, device="cpu", seed=seed % 2)
        fit(TrainConfig("rose", of, model, loop=loop), folder / name)
    for name in ("one", "two"):
        run = load_run(folder / name)
        evaluate_run(run, choose_text(run), lengths=[8, 16, 20, 24], carry=True)
    torch.set_num_threads(threads)
    # a report needs run folders and nothing else
    (folder / "text.txt").unlink()
    return folder


def result(folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((folder / "result.json").read_text())
    return found


@thorough
def test_perplexities_take_the_place_of_accuracies(made: Path, tmp_path: Path) -> None:
    page = Page(write_report([made / "one", made / "two", made / "tested"], tmp_path))
    losses = {name: result(made / name)["validation"]["loss"] for name in ("one", "two", "tested")}
    tested = result(made / "tested")["test"]["loss"]
    rows = {row[0]: row for row in reversed(page.rows)}
    assert rows["configuration"][1:4] == ["test perplexity", "validation perplexity", "validation loss"]
    first, second = math.exp(losses["one"]), math.exp(losses["two"])
    spread = f"{(first + second) / 2:.2f} ± {abs(first - second) / 2**0.5:.2f}"
    assert rows["test_share: 0.0"][1:3] == ["–", spread]
    assert rows["test_share: 0.2"][1:4] == [
        f"{math.exp(tested):.2f} (1 seed)",
        f"{math.exp(losses['tested']):.2f} (1 seed)",
        f"{losses['tested']:.3f} (1 seed)",
    ]
    # a uniform guess among 257 bytes; what the most frequent token scores is in the text alone
    assert rows["chance"][1:4] == ["", "257", ""] and "always the most frequent answer" not in rows
    by_folder = {row[0]: row for row in page.rows}
    assert by_folder["tested"][2:4] == [f"{tested:.4f} nats", f"{losses['tested']:.4f} nats"]
    assert not page.text.count("What is missing")
    assert [path.name for path in tmp_path.glob("*.png")] == ["learning_curves.png"]


@thorough
def test_what_was_evaluated_is_shown(made: Path, tmp_path: Path) -> None:
    page = Page(write_report([made / "one", made / "tested"], tmp_path))
    scores = json.loads((made / "one" / "perplexity.json").read_text())["scores"]
    names = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
    expected = [
        ["one", "test_share: 0.0", "text.txt, validation", title, *(f"{score[name]:,.3f}" for name in names)]
        # the length of training, the longest one, and no window
        for title, score in zip(("16", "24", "carried"), (scores[1], *scores[3:]), strict=True)
    ]
    assert [row for row in page.rows if row[2:3] == ["text.txt, validation"]] == expected
    assert "<h2>Perplexity</h2>" not in write_report([made / "tested"], tmp_path).read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"scores": []}', '{"scores": [{"length": "long"}]}'])
def test_a_damaged_evaluation_is_one_line(made: Path, tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "result.json", "metrics.jsonl"):
        (run / name).write_bytes((made / "one" / name).read_bytes())
    (run / "perplexity.json").write_text(content)
    message = r"run/perplexity.json cannot be used: .* Delete it, or evaluate again\.$"
    with pytest.raises(ValueError, match=message):
        write_report([run], tmp_path / "out")
    (run / "perplexity.json").unlink()
    scores = result(run)
    (run / "result.json").write_text(json.dumps({**scores, "validation": {"accuracy": 0.5}}))
    with pytest.raises(ValueError, match=r"cannot be reported: it lacks validation loss\."):
        write_report([run], tmp_path / "out")


def test_a_sample_is_what_linrec_generate_writes(made: Path, tmp_path: Path, capsys) -> None:
    # two seeds are one arm, which has one sample, of its first seed
    page = write_report([made / "one", made / "two"], tmp_path / "report").read_text()
    words = ["generate", str(made / "one"), "--temperature", "0.8", "--seed", "0", "--device", "cpu"]
    assert main(words) == 0
    written = capsys.readouterr().out.removesuffix("\n")
    assert page.count('<pre class="sample">') == 1
    made_by = "The text continues the end of a document; it was drawn at temperature 0.8 with random seed 0."
    assert f"seed 0. {made_by}" in " ".join(page.split())
    assert f'<pre class="sample">\n{escape(printable(written))}</pre>' in page


@thorough
def test_a_table_keeps_the_sample_and_runs_without_weights_have_none(made: Path, tmp_path: Path) -> None:
    collect_runs([made / "one", made / "tested"], tmp_path / "tables" / "kept")
    made_from = {}
    for name, folders in (("old", ("one", "tested")), ("new", (tmp_path / "tables" / "kept",))):
        page = write_report([made / folder for folder in folders], tmp_path / name)
        # learning curves are rounded
        made_from[name] = re.sub('base64,[^"]*', "", page.read_text())
    assert made_from["old"].count('<pre class="sample">') == 2
    assert made_from["old"] == made_from["new"]
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "result.json", "metrics.jsonl"):
        (bare / name).write_bytes((made / "one" / name).read_bytes())
    page = write_report([bare], tmp_path / "none").read_text()
    assert "Sample text" not in page and "What is missing" not in page


def test_a_sample_that_cannot_be_made_is_said(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "one", tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    page = Page(write_report([tmp_path / "run"], tmp_path / "out"))
    assert (
        "No sample text of run: there is no tokenizer in run" in page.text and str(tmp_path) not in page.text
    )


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (3, "`extra.sample` must be an object"),
        ({"text": "\n"}, "it has no 'extra.sample.prompt'"),
        ({**SAMPLE, "prompt": 1}, "`extra.sample.prompt` must be a text"),
    ],
)
def test_a_damaged_sample_of_a_table_is_one_line(made: Path, tmp_path: Path, sample, message: str) -> None:
    rows, _ = collect_runs([made / "one"], tmp_path)
    row = parse_json(rows.read_text())
    row["extra"]["sample"] = sample
    rows.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"one cannot be used: {message}"):
        write_report([tmp_path], tmp_path / "out")


def test_characters_of_html_and_terminals_are_spelt_out() -> None:
    page = render("title", "about", [Text("verbatim", "\n<b>\x1b&\n")])
    assert '<pre class="sample">\n\n&lt;b&gt;\\x1b&amp;\n</pre>' in page


def test_a_tokenizer_without_an_end_of_documents_starts_from_a_newline() -> None:
    assert _prompt(CharacterTokenizer("\nab")) == (0, "a newline")
    assert _prompt(CharacterTokenizer("ab")) == (0, "'a'")
