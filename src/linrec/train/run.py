"""The run folder: making one, and reading one back.

config.json       configuration, command, number of steps, commit, versions, device
metrics.jsonl     one JSON object per logged window or evaluation
tensorboard/      the same for TensorBoard
checkpoint.safetensors, checkpoint.previous.safetensors
best.safetensors  the model of the lowest validation loss, where it is kept
tokenizer.json    of a language model: what its tokens mean, so that the data need not be there to use it
result.json       written at the end
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linrec.errors import nearest
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, SequenceClassifierConfig
from linrec.tasks.language_modeling import LanguageModeling
from linrec.text import read_tokenizer
from linrec.train.checkpoint import load_best, load_checkpoint
from linrec.train.config import TrainConfig, config_from_dict, config_to_dict, differences
from linrec.train.errors import ConfigError, RunFolderError, TrainError
from linrec.train.metrics import read_metrics
from linrec.train.result import Result

CONFIG = "config.json"
RESULT = "result.json"


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it, finished or not.

    Args:
        path: the run folder.
        config: the configuration, complete.
        metrics: the records of `metrics.jsonl` in order. All have step, epoch, split, loss, accuracy (but of
            a regression) and seconds; those of split "train" also lr, grad_norm and steps_per_second.
        result: what `result.json` holds; None while the run has not finished.
        about: "recipe", "command", "total_steps", "commit", "dirty", "versions" and "device" of the run, and
            "tokenizer", the fingerprint of a language model's.
    """

    path: Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None
    about: dict[str, Any]

    def model(self, device: torch.device | str = "cpu") -> LanguageModel:
        """Rebuild the best model where it is kept, else that of the newest checkpoint, in evaluation mode.

        Args:
            device: where to put it.

        Raises:
            RunFolderError: there is no checkpoint yet.
            CheckpointError: no checkpoint is usable.
            ConfigError: the run trained a classifier, which `classifier` rebuilds.
        """
        if not isinstance(self.config.model, ModelConfig):
            raise ConfigError(f"{self.path} is a classifier of sequences, not a model over tokens.")
        model = LanguageModel(self.config.model)
        model.load_state_dict(self._weights())
        return model.to(device).eval()

    def classifier(self, device: torch.device | str = "cpu") -> SequenceClassifier:
        """Rebuild the model of a run that trained a classifier; arguments and errors are those of `model`."""
        if not isinstance(self.config.model, SequenceClassifierConfig):
            raise ConfigError(f"{self.path} is a model over tokens, not a classifier of sequences.")
        model = SequenceClassifier(self.config.model)
        model.load_state_dict(self._weights())
        return model.to(device).eval()

    def _weights(self) -> dict[str, torch.Tensor]:
        best = load_best(self.path) if self.config.loop.keep == "best" else None
        checkpoint = best or load_checkpoint(self.path)
        if checkpoint is None:
            raise RunFolderError(f"{self.path} has no checkpoint yet; train it to its first one.")
        return checkpoint.part("model.")


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run folder.

    Args:
        path: the folder that `linrec train --out` made.

    Returns:
        The run; its model is rebuilt only when `run.model()` is called.

    Raises:
        RunFolderError: there is no such folder, or it is no run; the message says which, and what is near.

    Example:
        >>> load_run("runs/no-such-run")
        Traceback (most recent call last):
        linrec.train.errors.RunFolderError: there is no run folder runs/no-such-run.
    """
    folder = Path(path)
    with _one_line(folder):
        return _load_run(folder)


def _load_run(folder: Path) -> Run:
    stored = _read_json(folder, CONFIG)
    try:
        config = config_from_dict(stored["config"])
    except (ConfigError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder / CONFIG} cannot be used: {error}") from error
    result = _read_json(folder, RESULT) if (folder / RESULT).exists() else None
    about = {name: value for name, value in stored.items() if name != "config"}
    try:
        return Run(folder, config, read_metrics(folder), result, about)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"the metrics of {folder} cannot be read: {error}") from error


def read_result(folder: Path) -> Result:
    """Return the result of a run that has finished.

    Raises:
        RunFolderError: `result.json` is not there, or damaged.
    """
    stored = _read_json(folder, RESULT)
    try:
        return Result(
            **{
                field.name: stored[field.name]
                for field in dataclasses.fields(Result)
                # what newer results have, older ones do without
                if field.name in stored or field.default is field.default_factory is dataclasses.MISSING
            }
        )
    except KeyError as error:
        raise RunFolderError(f"{folder / RESULT} cannot be used: it has no {error}.") from error


def open_run_folder(folder: Path, config: TrainConfig, about: dict[str, Any], *, resume: bool) -> str | None:
    """Make the folder of a new run, or check that it is the one to resume.

    Args:
        folder: the run folder.
        config: the configuration of the run.
        about: command, steps and provenance, for `config.json`.
        resume: whether to go on with the run that is there.

    Returns:
        The command that the run was started with.

    Raises:
        RunFolderError: a new run would overwrite something, or the run to resume is another one.
    """
    tokenizer = config.task.tokenizer_object() if isinstance(config.task, LanguageModeling) else None
    if resume:
        run = load_run(folder)
        changed = differences(run.config, config)
        # another number of processes may need another one
        changed.pop("loop.strategy", None)
        for name, (stored, given) in changed.items():
            raise RunFolderError(
                f"{folder} was started with {name} = {stored}, not {given}; "
                "a resumed run keeps its configuration: leave the option out, or start a new run with --out."
            )
        if tokenizer is not None and read_tokenizer(folder).fingerprint != tokenizer.fingerprint:
            raise RunFolderError(
                f"{folder} was trained on the tokens of another tokenizer than {tokenizer.name!r} is now; "
                "put the text and the tokenizer back as they were, or start a new run with --out."
            )
        return run.about.get("command")
    with _one_line(folder):
        _check_unused(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"could not make the folder {folder}: {error.strerror}.") from error
    if tokenizer is not None:
        tokenizer.save(folder)
        about = {**about, "tokenizer": tokenizer.fingerprint}
    write_json(folder / CONFIG, {"recipe": config.name, **about, "config": config_to_dict(config)})
    command: str | None = about["command"]
    return command


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    # even asking whether a file exists fails where the folder may not be entered
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read: {error.strerror or error}.") from error


def _check_unused(folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise RunFolderError(
            f"{folder} holds a run already; continue it with --resume {folder}, or pass another --out."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is not an empty folder; pass another --out.")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all.

    Raises:
        TrainError: the disk is full, say.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise TrainError(f"could not write {path}: {error.strerror}.") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        beside = folder.parent
        try:
            # of os.path: a neighbour that may not be entered is no candidate, and no error
            others = [name for name in os.listdir(beside) if os.path.exists(beside / name / CONFIG)]
        except OSError:
            others = []
        hint = f"; did you mean {beside / nearest(folder.name, others)}?" if others else "."
        raise RunFolderError(f"there is no run folder {folder}{hint}")
    if not (folder / name).exists():
        raise RunFolderError(f"{folder} is not a run folder: it has no {name}.")
    try:
        content = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder / name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{folder / name} cannot be used: it holds no JSON object.")
    return content
