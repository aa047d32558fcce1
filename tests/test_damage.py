"""Every file that linrec writes and reads again: a damaged file loads equal, or gives one clear error."""

import functools
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from linrec import tensor_files
from linrec.errors import TrainError
from linrec.generation import generate, load_state, save_state
from linrec.lab.bench import get_suite, make_jobs
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.schedule import outcome_of
from linrec.lab.corpora import Shards
from linrec.lab.report import Arm, collect_runs, group_runs
from linrec.lab.report.arms import compare_arms
from linrec.lab.report.records import read_stored
from linrec.lab.tasks import LanguageModeling
from linrec.lab.tasks.files import kept
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.lab.train.checkpoint import load_best, load_checkpoint
from linrec.lab.train.run import read_records, write_json
from linrec.models import LanguageModel, ModelConfig
from linrec.text import HuggingFaceTokenizer, read_tokenizer
from tests.tiers import tiered

# written beside the files, and never read
UNREAD = ("text/", "run/.lock", "run/tensorboard/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of every kind."""
    pytest.importorskip("tokenizers", reason='the extra "text" is not installed')
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("files")
    (folder / "text").mkdir()
    for number in range(3):
        (folder / "text" / f"{number}.txt").write_text("a rose is a rose is a rose. " * 4)
    task = LanguageModeling(
        folder / "text", tokenizer="characters", documents=True, length=8, cache=folder / "cache"
    )
    small = ModelConfig(vocab_size=1, d_model=4, n_layers=1, mixer="lru", d_channel_mixing=4)
    loop = LoopConfig(steps=2, batch_size=2, log_every=1, eval_every=1, keep="best", device="cpu")
    with torch.random.fork_rng():
        fit(TrainConfig("text", task, small, loop=loop), folder / "run")
    run = load_run(folder / "run")
    assert run.result is not None
    (folder / "cache").rename(folder / "tokens")
    next((folder / "tokens").iterdir()).rename(folder / "shards")
    (folder / "tokens").rmdir()
    model = run.model()
    save_state(folder / "state", generate(model, torch.tensor([[1, 2]]), n_tokens=2).state, model)
    backend = Tokenizer(models.WordLevel({"a": 0, "rose": 1, "[UNK]": 2}, unk_token="[UNK]"))
    (folder / "words").mkdir()
    HuggingFaceTokenizer(backend, name="words").save(folder / "words")
    read_samples(folder)
    (job,) = make_jobs(get_suite("smoke")[:1], ["min_gru"], [0])
    write_job(job, folder / "suite", {"command": "linrec bench"}).rename(folder / "job")
    write_json(folder / "job" / "outcome.json", {"status": "failed", "message": "no", "peak_bytes": None})
    collect_runs([folder / "run", folder / "job"], folder / "table")
    (folder / "baseline").mkdir()
    shutil.copy(folder / "table" / "rows.jsonl", folder / "baseline")
    return folder


@functools.cache
def model_of(folder: Path) -> LanguageModel:
    return load_run(folder / "run").model()


@functools.cache
def arms_of(folder: Path) -> list[Arm]:
    return group_runs([load_run(folder / "run")])


def read_shards(folder: Path) -> Any:
    shards = Shards(folder / "shards")
    return (
        shards.tokens("train"),
        shards.starts("train"),
        shards.counts("train"),
        shards.tokenizer.fingerprint,
    )


def read_samples(folder: Path) -> Any:
    # drawn again if the file is damaged
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*dice-.* is not usable .*; it is generated again")
        return kept("dice", {"version": 1}, lambda: {"x": torch.arange(3.0)}, cache=folder / "samples")


SAMPLES = "samples/dice-c3aa9744214caf6eb993d6f8.safetensors"
READERS: dict[str, Callable[[Path], Any]] = {
    "run/checkpoint.safetensors": lambda folder: load_checkpoint(folder / "run"),
    "run/best.safetensors": lambda folder: load_best(folder / "run"),
    "run/config.json": lambda folder: read_records(folder / "run"),
    "run/result.json": lambda folder: read_records(folder / "run"),
    "run/metrics.jsonl": lambda folder: read_records(folder / "run"),
    "run/tokenizer.json": lambda folder: read_tokenizer(folder / "run").fingerprint,
    "state": lambda folder: load_state(folder / "state", model_of(folder)),
    "shards/train.ids": read_shards,
    "shards/train.starts": read_shards,
    "shards/validation.ids": read_shards,
    "shards/validation.starts": read_shards,
    "shards/index.json": read_shards,
    "shards/tokenizer.json": read_shards,
    "words/tokenizer.json": lambda folder: read_tokenizer(folder / "words").fingerprint,
    "words/tokenizer_config.json": lambda folder: read_tokenizer(folder / "words").name,
    SAMPLES: read_samples,
    "job/job.json": lambda folder: read_stored([folder / "job"])[0].job,
    "job/outcome.json": lambda folder: outcome_of(folder / "job"),
    "table/rows.jsonl": lambda folder: read_stored([folder / "table"]),
    "table/curves.jsonl": lambda folder: read_stored([folder / "table"]),
    "baseline/rows.jsonl": lambda folder: compare_arms(arms_of(folder), [folder / "baseline" / "rows.jsonl"]),
}


def plain(value: Any) -> Any:
    """Return a value that compares by content, tensors included."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    parts = vars(value).values() if hasattr(value, "__dict__") else value
    return [plain(part) for part in parts] if isinstance(value, list | tuple) or parts is not value else value


def damages(content: bytes, n: int) -> Iterator[bytes]:
    """Yield the content with each bit flipped, and cut to each length; of many, n of both kinds."""
    draw = random.Random(0)
    bits, lengths = range(8 * len(content)), range(len(content))
    for bit in draw.sample(bits, min(n, len(bits))):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
    for length in draw.sample(lengths, min(n, len(lengths))):
        yield content[:length]


def test_every_file_is_read_by_a_reader(folder: Path) -> None:
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {name for name in written if not name.startswith(UNREAD)} == READERS.keys()


@pytest.mark.parametrize("n", tiered([20], [], [1000]))
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_loads_equal_or_is_one_line(name: str, n: int, folder: Path) -> None:
    path, read = folder / name, READERS[name]
    content, whole = path.read_bytes(), plain(read(folder))
    try:
        for damaged in damages(content, n):
            path.write_bytes(damaged)
            try:
                found = plain(read(folder))
            except (TrainError, ValueError) as error:
                said = str(error)
                assert str(path.parent) in said and "\n" not in said, said
            else:
                assert found == whole, damaged
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "run/checkpoint.safetensors",
        "run/best.safetensors",
        "state",
        "samples/dice-c3aa9744214caf6eb993d6f8.safetensors",
    ],
)
def test_tensors_of_earlier_versions_load_with_one_line(name: str, folder: Path) -> None:
    path, read = folder / name, READERS[name]
    content, whole = path.read_bytes(), plain(read(folder))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118
    del metadata["checksum"]
    if name == "state":
        metadata["generation"] = json.dumps({**json.loads(metadata["generation"]), "format": 1})
    else:
        metadata["crc32"] = tensor_files._crc(tensors)
    try:
        save_file(tensors, path, metadata=metadata)
        with pytest.warns(UserWarning, match=f"{path} has no checksum of its whole content") as caught:
            assert plain(read(folder)) == whole
        assert len(caught) == 1
    finally:
        path.write_bytes(content)
