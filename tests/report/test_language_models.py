"""Reports of language models: perplexities for accuracies, and no need of the text."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from linrec.evaluation import choose_text, evaluate_run
from linrec.models import ModelConfig
from linrec.report import write_report
from linrec.tasks import LanguageModeling
from linrec.train import LoopConfig, TrainConfig, fit, load_run
from tests.report.test_write import Page


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


def test_perplexities_take_the_place_of_accuracies(made: Path, tmp_path: Path) -> None:
    page = Page(write_report([made / "one", made / "two", made / "tested"], tmp_path))
    losses = {name: result(made / name)["validation"]["loss"] for name in ("one", "two", "tested")}
    tested = result(made / "tested")["test"]["loss"]
    rows = {row[0]: row for row in reversed(page.rows)}
    assert rows["arm"][1:4] == ["test perplexity", "validation perplexity", "validation loss"]
    first, second = math.exp(losses["one"]), math.exp(losses["two"])
    spread = f"{(first + second) / 2:.2f} ± {abs(first - second) / 2**0.5:.2f}"
    assert rows["test_share: 0.0"][1:3] == ["–", spread]
    assert rows["test_share: 0.2"][1:4] == [
        f"{math.exp(tested):.2f}",
        f"{math.exp(losses['tested']):.2f}",
        f"{losses['tested']:.4f}",
    ]
    # a uniform guess among 257 bytes; what the most frequent token scores is in the text alone
    assert rows["chance"][1:4] == ["", "257", ""] and "always the most frequent answer" not in rows
    by_folder = {row[0]: row for row in page.rows}
    assert by_folder["tested"][2:4] == [f"{tested:.4f} nats", f"{losses['tested']:.4f} nats"]
    assert not page.text.count("What is missing")
    assert [path.name for path in tmp_path.glob("*.png")] == ["learning_curves.png"]


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
