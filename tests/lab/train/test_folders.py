"""Run folders: locked while a process trains there, and begun again where nothing of value is left."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from linrec import files
from linrec.files import LOCK, partial_of
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import (
    DivergedError,
    LoopConfig,
    RunFolderError,
    TrainConfig,
    TrainError,
    fit,
    load_run,
)
from linrec.lab.train.checkpoint import BEST, CURRENT, Checkpoint, save_best
from linrec.lab.train.config import config_to_dict
from linrec.models import ModelConfig
from tests.tiers import thorough, tiered

from .test_checkpoint import full_disk
from .test_resume import assert_same_run, crash_at

Tiny = Callable[..., TrainConfig]
DIVERGES: dict[str, Any] = {"optim": {"lr": 1e38}}

TRAIN = """
import json, sys
from linrec.lab.train import fit
from linrec.lab.train.config import config_from_dict
def wait(progress):
    # a slow step is reported before its checkpoint is written
    if progress.logged:
        print(progress.step, flush=True)
        sys.stdin.read()
fit(config_from_dict(json.loads(sys.argv[1])), sys.argv[2], progress=wait)
"""


@contextmanager
def training(config: TrainConfig, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Train in another process, which waits after its first logged step."""
    words = [sys.executable, "-c", TRAIN, json.dumps(config_to_dict(config)), str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


@thorough
@pytest.mark.parametrize("checkpoint_every", tiered([1], [100]))
def test_a_second_process_is_told_who_trains_and_a_killed_one_blocks_nobody(
    checkpoint_every: int, tiny: Tiny, tmp_path: Path
) -> None:
    config = tiny(checkpoint_every=checkpoint_every)
    fit(config, tmp_path / "straight")
    folder = tmp_path / "run"
    with training(config, folder) as process:
        before = (folder / "metrics.jsonl").read_bytes()
        with pytest.raises(RunFolderError) as caught:
            fit(config, folder, resume=True)
        told = f"{folder}: another process (pid {process.pid}) trains here; wait until it ends, or stop"
        assert str(caught.value) == f"{told} it, or pass another --out."
        # nor does the command that started it begin again
        with pytest.raises(RunFolderError, match="trains here" if checkpoint_every > 1 else "holds a run"):
            fit(config, folder)
        assert (folder / "metrics.jsonl").read_bytes() == before
        process.send_signal(signal.SIGKILL)
        process.wait()
    fit(config, folder, resume=True)
    assert_same_run(tmp_path / "straight", folder)


def test_a_run_that_failed_or_ended_holds_no_lock(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as kept:
        fit(tiny(**DIVERGES), tmp_path / "run")
    # while the error, and the frames that it came through, are still there
    assert kept.value.__traceback__ is not None
    fit(tiny(), tmp_path / "run")
    fit(tiny(), tmp_path / "run", resume=True)


@thorough
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_diverged_before_its_first_checkpoint_starts_again(
    resume: bool, tiny: Tiny, tmp_path: Path
) -> None:
    config, diverging = tiny(log_every=1), tiny(log_every=1, **DIVERGES)
    fit(config, tmp_path / "straight")
    for again in (False, resume):
        with pytest.raises(DivergedError):
            fit(diverging, tmp_path / "run", resume=again)
    assert load_run(tmp_path / "run").metrics
    # with another learning rate it is a new run, and nothing is left of the old one
    fit(config, tmp_path / "run")
    assert_same_run(tmp_path / "straight", tmp_path / "run")


@thorough
@pytest.mark.parametrize("resume", tiered([False], [True]))
def test_a_disk_that_is_full_at_the_start_leaves_a_folder_that_goes_on(
    resume: bool, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    fit(config, tmp_path / "straight")
    writes = [0]

    def full_after(times: int) -> Callable[..., int]:
        writes[0] = 0
        really = os.open

        def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_CREAT and str(path).startswith(str(tmp_path / "run")):
                writes[0] += 1
                if writes[0] > times:
                    full_disk()
            return really(path, flags, *rest, **named)

        return opened

    reached = set()
    for times in range(5):
        folder = tmp_path / f"run-{times}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", full_after(times))
            with pytest.raises((TrainError, RunFolderError), match="No space left on device"):
                fit(config, folder)
        has_config = (folder / "config.json").exists()
        reached.add(has_config)
        if resume and not has_config:
            with pytest.raises(RunFolderError, match=r"no config\.json\. Start the run again"):
                fit(config, folder, resume=True)
        else:
            fit(config, folder, resume=resume)
            assert_same_run(tmp_path / "straight", folder)
    assert reached == {False, True}


def test_a_tokenizer_that_could_not_be_written_is_written_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a rose is a rose is a rose. " * 40)
    task = LanguageModeling(
        path=tmp_path / "text", tokenizer="characters", length=8, cache=tmp_path / "cache"
    )
    model = ModelConfig(vocab_size=1, d_model=8, n_layers=1)
    config = TrainConfig("text", task, model, loop=LoopConfig(steps=2, batch_size=2, device="cpu"))
    write = files.write_json
    for resume in (False, True):
        folder = tmp_path / f"run-{resume}"

        def fails(path: Path, content: dict[str, Any], folder: Path = folder) -> None:
            if path.parent == folder:
                full_disk()
            write(path, content)

        failing = mock.patch("linrec.text.tokenizer.write_json", fails)
        with failing, pytest.raises(TrainError, match=r"could not write the tokenizer .*No space left"):
            fit(config, folder)
        fit(config, folder, resume=resume)
        assert (folder / "tokenizer.json").exists()


@thorough
def test_the_best_model_of_an_earlier_start_is_forgotten(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(keep="best", eval_every=2)
    straight = fit(config, tmp_path / "straight")
    with pytest.raises(DivergedError):
        fit(tiny(keep="best", eval_every=2, **DIVERGES), tmp_path / "other")
    crash = mock.patch("linrec.lab.train.loop.save_checkpoint", full_disk)
    with crash, pytest.raises(OSError, match="No space left"):
        fit(config, tmp_path / "run")
    assert (tmp_path / "run" / BEST).exists() and not (tmp_path / "run" / CURRENT).exists()
    # one that no step of the new start is as good as
    save_best(tmp_path / "run", Checkpoint({"model.x": torch.zeros(1)}, {"step": 2, "loss": 0.0}))
    with pytest.raises(RunFolderError, match="already holds a run"):
        fit(config, tmp_path / "run")
    assert fit(config, tmp_path / "run", resume=True).best_step == straight.best_step


@pytest.mark.parametrize("name", ["result.json", CURRENT, BEST, "checkpoint.previous.safetensors"])
def test_what_is_of_value_is_not_overwritten(name: str, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        fit(tiny(**DIVERGES), tmp_path)
    (tmp_path / name).write_text("{}")
    with pytest.raises(RunFolderError, match="already holds a run; continue it with --resume"):
        fit(tiny(), tmp_path)


def test_a_step_size_that_underflows_while_it_is_learned_is_divergence(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(optim={"lr": 100.0, "transition_lr": 1000.0})
    model = dataclasses.replace(config.model, mixer="lssl", mixer_args={"d_state": 4})
    with pytest.raises(DivergedError, match=r"`step` must be positive times.*A smaller --optim\.lr"):
        fit(dataclasses.replace(config, model=model), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"config.json": '{"model_type": "mamba"}', "model.safetensors": ""},
        {"tokenizer.json": "{}"},
        {"notes": ""},
    ],
)
def test_folders_of_other_programs_are_left_alone(
    content: dict[str, str], tiny: Tiny, tmp_path: Path
) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RunFolderError, match="is not an empty folder"):
        fit(tiny(), tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == content


def test_what_a_killed_start_leaves_is_no_obstacle(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("123456789\n")
    partial_of(tmp_path / "config.json").write_text('{"rec')
    assert fit(tiny(), tmp_path).steps == 15


def test_no_file_of_a_resumed_run_is_written_through_a_link(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(keep="best", checkpoint_every=4)
    precious, folder = tmp_path / "precious", tmp_path / "run"
    with pytest.raises(RuntimeError):
        fit(config, folder, progress=crash_at(10))
    precious.write_bytes(before := (folder / "metrics.jsonl").read_bytes())
    written = ["config.json", "metrics.jsonl", "result.json", CURRENT, BEST]
    replaced = ["metrics.jsonl", "checkpoint.previous.safetensors", *(f"{name}.partial" for name in written)]
    for name in replaced:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(precious)
    fit(config, folder, resume=True)
    assert precious.read_bytes() == before
    assert not [path for path in folder.iterdir() if path.is_symlink() and path.name != "config.json.partial"]


@pytest.mark.parametrize("name", ["tensorboard", LOCK])
def test_what_cannot_be_replaced_is_refused_where_it_is_a_link(name: str, tiny: Tiny, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(RuntimeError):
        fit(tiny(), folder, progress=crash_at(4))
    (folder / name).rename(tmp_path / "aside")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(TrainError, match="is a symbolic link, which is not followed; remove it"):
        fit(tiny(), folder, resume=True)
    assert not any(elsewhere.iterdir())


def test_a_run_folder_may_itself_be_a_link(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    fit(tiny(), tmp_path / "run")
    assert load_run(tmp_path / "disk").result is not None
