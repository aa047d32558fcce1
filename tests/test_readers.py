"""Files of runs with values of any type: each command ends well or in one line, never in a traceback."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linrec.cli import main
from linrec.errors import DataError, TrainError
from linrec.lab.bench import get_suite, make_jobs
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.worker import run_job
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.models import ModelConfig
from tests.tiers import thorough

MISSING: Any = object()
WRONG = (None, "x", [], {}, -1, 1.5, float("inf"), float("nan"), True, 10**400, [None], {"a": None}, MISSING)
TASKS = {
    "scores": {"toy": {"acc,none": 0.5}},
    "shots": {"toy": 0},
    "command": "linrec eval",
    "lm_eval": "0.4",
}
SCORE = {"length": 8, "perplexity": 2.0, "word_perplexity": 8.0, "byte_perplexity": 2.0, "bits_per_byte": 1.0}
PERPLEXITY = {
    "data": "text",
    "split": "test",
    "trained_length": 8,
    "scores": [SCORE],
    "command": "linrec eval",
}
# of every file, the commands that read it
READERS = {
    "result.json": ["publish", "report", "resume"],
    "metrics.jsonl": ["report", "resume"],
    "perplexity.json": ["publish", "report"],
    "tasks.json": ["publish"],
    "tokenizer.json": ["publish", "generate"],
}
WORDS = {
    "generate": ["generate", "run", "--prompt", "a", "--tokens", "2", "--device", "cpu"],
    "publish": ["publish", "run", "published"],
    "report": ["report", "run", "--out", "page"],
    "resume": ["train", "--resume", "run"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a language model."""
    place = tmp_path_factory.mktemp("made")
    (place / "text").write_text("a rose is a rose is a rose. " * 40)
    task = LanguageModeling(place / "text", tokenizer="characters", length=8, cache=place / "cache")
    model = ModelConfig(vocab_size=1, d_model=8, n_layers=1, mixer="min_gru")
    loop = LoopConfig(steps=2, batch_size=2, log_every=1, device="cpu")
    fit(TrainConfig("text", task, model, loop=loop), place / "run", command="linrec train text")
    (place / "run/perplexity.json").write_text(json.dumps(PERPLEXITY))
    (place / "run/tasks.json").write_text(json.dumps(TASKS))
    return place / "run"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a suite of one job."""
    place = tmp_path_factory.mktemp("made")
    (job,) = make_jobs(get_suite("smoke")[:1], ["min_gru"], [0])
    assert run_job(write_job(job, place, {"command": "linrec bench smoke"})) == "done"
    return place


def wrong(path: Path, number: int) -> Iterator[tuple[tuple[Any, ...], Any, str]]:
    """Yield changed texts of a file of JSON: of every key, in its last line, some wrong values."""
    text = path.read_text()
    before, line = text.strip().rsplit("\n", 1) if path.suffix == ".jsonl" else ("", text)
    stored, draw = json.loads(line), random.Random(0)
    for at in places(stored):
        for value in draw.sample(WRONG, number):
            if at or value is not MISSING:
                changed = json.dumps(replaced(stored, at, value))
                yield at, value, f"{before}\n{changed}\n" if before else f"{changed}\n"


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = (
        value.items()
        if isinstance(value, dict)
        else [*enumerate(value)][:1]
        if isinstance(value, list)
        else ()
    )
    for key, inside in inner:
        yield from places(inside, (*at, key))


def replaced(stored: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    changed = inside = copy.deepcopy(stored)
    for key in at[:-1]:
        inside = inside[key]
    if value is MISSING:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return changed


def ends_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    status = main(words)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("linrec: ")]
    # a warning may come before the error
    return status == 0 or len(said) in (1, 2)


@pytest.mark.parametrize("number", [1, pytest.param(len(WRONG), marks=thorough)])
def test_a_configuration_of_any_types_is_read_or_refused(number: int, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    for at, value, text in wrong(trained / "config.json", number):
        (tmp_path / "run/config.json").write_text(text)
        try:
            load_run(tmp_path / "run")
        except (TrainError, DataError) as error:
            assert "run/config.json" in str(error) and "\n" not in str(error), (at, value)


@thorough
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_a_run_of_any_types_is_used_or_refused(
    name: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for at, value, text in wrong(trained / name, 1):
        for command in READERS[name]:
            shutil.rmtree("published", ignore_errors=True)
            shutil.rmtree("run", ignore_errors=True)
            shutil.copytree(trained, "run")
            (Path("run") / name).write_text(text)
            assert ends_well(WORDS[command], capsys), (at, value, command)


@thorough
@pytest.mark.parametrize("name", ["job.json", "outcome.json", "run/result.json", "run/config.json"])
def test_a_file_of_a_suite_of_any_types_is_used_or_refused(
    name: str,
    suite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(suite, "suite")
    (folder,) = (path.parent for path in Path("suite").rglob("job.json"))
    for at, value, text in wrong(folder / name, 1):
        if "config" not in at[:-2]:
            before = (folder / name).read_text()
            (folder / name).write_text(text)
            assert ends_well(["report", "suite", "--out", "page"], capsys), (at, value)
            (folder / name).write_text(before)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"kind": "characters"}', r"`characters` must be a text"),
        ("tokenizer.json", '{"kind": "characters", "characters": 3}', r"`characters` must be a text"),
        ("tokenizer.json", "[]", r"tokenizer\.json"),
        ("result.json", '{"test": {"loss": "low"}}', r"`test\.loss` must be a number or null; got 'low'"),
        ("result.json", '{"test": {"loss": [1]}}', r"`test\.loss` must be a number or null; got \[1\]"),
        ("tasks.json", "{}", r"tasks\.json cannot be used: it has no 'scores'. Delete it"),
        ("tasks.json", '{"scores": {"toy": 1}}', r"tasks\.json cannot be used: it has no 'shots'"),
        ("perplexity.json", '{"data": 1}', r"perplexity\.json cannot be used: it has no 'trained_length'"),
    ],
)
def test_the_file_and_the_field_are_named(
    name: str, content: str, message: str, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    pytest.importorskip("transformers")
    from linrec.lab.publishing.publish import publish

    with pytest.raises((TrainError, DataError), match=message):
        publish(load_run(tmp_path / "run"), tmp_path / "published")


@pytest.mark.parametrize(
    ("versions", "said"), [(None, "must be an object; got None"), ({"torch": 2}, "torch` must be")]
)
def test_versions_of_another_type_are_one_line(
    versions: Any, said: str, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    stored = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps(stored | {"versions": versions}))
    with pytest.raises(TrainError, match=rf"config\.json cannot be used: `versions.*{said}"):
        load_run(tmp_path / "run")
