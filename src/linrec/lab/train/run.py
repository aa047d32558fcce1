"""Creating and reading run folders.

- `config.json`: configuration, command, number of steps, commit, versions, device;
- `metrics.jsonl`: a JSON object per logged window or evaluation;
- `tensorboard/`: the same records for TensorBoard;
- `checkpoint.safetensors`, `checkpoint.previous.safetensors`: see `linrec.lab.train.checkpoint`;
- `best.safetensors`: the model of the lowest validation loss, if the run keeps this model;
- `tokenizer.json`: the tokenizer of a language model, so that the model can be used without its data;
- `result.json`: the result, written at the end;
- `.lock`: locked while a process trains here; contains the process id.
"""

import dataclasses
import os
import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from linrec import files
from linrec.errors import ConfigError, RunFolderError, TrainError, UntrustedCodeError, nearest
from linrec.field_types import check_content
from linrec.files import LOCK, FolderInUseError, locked, partial_of, read_json, reason
from linrec.lab.tasks.base import TokenizedTask
from linrec.lab.tasks.language_modeling import LanguageModeling
from linrec.lab.train.checkpoint import (
    BEST,
    CURRENT,
    DAMAGED,
    PREVIOUS,
    check_weights,
    load_best,
    load_checkpoint,
)
from linrec.lab.train.config import (
    MODELS,
    TrainConfig,
    config_from_dict,
    config_to_dict,
    differences,
    make_model,
)
from linrec.lab.train.records import METRICS, About, Result, StoredResult, read_metrics
from linrec.models import ImageClassifier, LanguageModel, SequenceClassifier
from linrec.text import Tokenizer, read_tokenizer

CONFIG = "config.json"
RESULT = "result.json"
# files that a new run must not replace
VALUABLE = (RESULT, CURRENT, PREVIOUS, DAMAGED, BEST)
# as messages call a model
KINDS: dict[type, str] = {
    LanguageModel: "a language model",
    SequenceClassifier: "a sequence classifier",
    ImageClassifier: "an image classifier",
}
M = TypeVar("M", bound=torch.nn.Module)
# files left behind by a run that failed before writing its configuration
LEFT_BEHIND = {LOCK, partial_of(Path(CONFIG)).name}


@dataclass(frozen=True)
class Run:
    """A run, finished or not, as read from its folder.

    Args:
        path: the run folder.
        config: the complete configuration.
        metrics: the records of `metrics.jsonl` in order. All records have step, epoch, split, loss, accuracy
            (except for a regression) and seconds; records of split "train" also have lr, grad_norm and
            steps_per_second.
        result: the content of `result.json`; None while the run has not finished.
        about: "recipe", "command", "total_steps", "commit", "dirty", "versions" and "device" of the run; for
            a language model also "tokenizer", the fingerprint of its tokenizer. "resumed" has the step and
            the provenance of each part that another commit, device or version continued.
        extra: JSON that other commands wrote into the run folder, by name, such as the "perplexity" of
            `linrec eval`; `linrec.lab.report` reads it.
    """

    path: Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None
    about: dict[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def model(self, device: torch.device | str = "cpu") -> LanguageModel:
        """Return the best model, or else the model of the newest checkpoint, in evaluation mode.

        It is an `EncoderDecoder` if the run trained one.

        Args:
            device: device of the model.

        Raises:
            RunFolderError: the run has no checkpoint yet.
            CheckpointError: no checkpoint is usable, or the checkpoint does not match the configuration.
            ConfigError: the run trained a classifier; use `classifier` instead.
        """
        return self._loaded(LanguageModel).to(device).eval()

    def image_classifier(self, device: torch.device | str = "cpu") -> ImageClassifier:
        """Return the model of a run that trained a classifier of images; see `model`."""
        return self._loaded(ImageClassifier).to(device).eval()

    def classifier(self, device: torch.device | str = "cpu") -> SequenceClassifier:
        """Return the model of a run that trained a classifier; see `model` for arguments and errors."""
        return self._loaded(SequenceClassifier).to(device).eval()

    def _loaded(self, kind: type[M]) -> M:
        config = self.config.model
        if not issubclass(MODELS[type(config)], kind):
            trained = next(name for of, name in KINDS.items() if issubclass(MODELS[type(config)], of))
            raise ConfigError(f"{self.path} is {trained}, not {KINDS[kind]}.")
        best = load_best(self.path) if self.config.loop.keep == "best" else None
        checkpoint = best or load_checkpoint(self.path)
        if checkpoint is None:
            raise RunFolderError(f"{self.path} has no checkpoint yet; train it until its first checkpoint.")
        try:
            if not config.import_paths:
                # refuses a model that is larger than its weights before memory is allocated; mixers of users
                # may read values of parameters, which the meta device does not have
                with torch.device("meta"):
                    check_weights(checkpoint, make_model(config), self.path)
            model = make_model(config)
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"{self.path / CONFIG} cannot be used: {error}") from error
        check_weights(checkpoint, model, self.path)
        model.load_state_dict(checkpoint.part("model."))
        return typing.cast(M, model)


class Records(NamedTuple):
    """The content of a run folder beside its weights; `Run` documents the fields.

    `config` is JSON as it was read: parsing it may import code of others.
    """

    config: Any
    about: dict[str, Any]
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None


def load_run(path: str | os.PathLike[str], *, trust_code: bool | Collection[str] = False) -> Run:
    """Read a run folder.

    A configuration may name its task and its mixers by import paths, as in "my_package.my_module:MyMixer".
    Loading such a configuration runs their code, so `load_run` refuses import paths unless the caller trusts
    them.

    Args:
        path: a folder that `linrec train --out` wrote.
        trust_code: whether to import tasks and mixers by import path; or the import paths that are trusted.

    Returns:
        The run; its weights are loaded only when `run.model()` is called.

    Raises:
        RunFolderError: the folder does not exist, and the message gives the nearest name; or the folder is
            not a valid run.
        UntrustedCodeError: the configuration has an import path that is not trusted.

    Example:
        >>> load_run("runs/no-such-run")
        Traceback (most recent call last):
        linrec.errors.RunFolderError: there is no run folder runs/no-such-run.
    """
    folder = Path(path)
    return run_of(folder, read_records(folder), trust_code=trust_code)


def run_of(
    folder: Path,
    records: Records,
    *,
    trust_code: bool | Collection[str] = False,
    extra: Mapping[str, Any] | None = None,
) -> Run:
    """Return the run of records that were read before; see `load_run`."""
    try:
        config = config_from_dict(records.config, trust_code=trust_code)
    except UntrustedCodeError as error:
        raise UntrustedCodeError(f"{folder / CONFIG}: {error}") from error
    except ConfigError as error:
        raise RunFolderError(f"{folder / CONFIG} cannot be used: {error}") from error
    return Run(folder, config, records.metrics, records.result, records.about, extra or {})


def read_records(folder: Path) -> Records:
    """Read a run folder without parsing its configuration, so that no untrusted code can run."""
    with _one_line(folder):
        stored = _read_json(folder, CONFIG)
        result = _read_json(folder, RESULT) if (folder / RESULT).exists() else None
        try:
            metrics = read_metrics(folder)
        except ValueError as error:
            raise RunFolderError(f"the metrics of {folder} cannot be read: {error}") from error
        if result is not None and result.get("records", len(metrics)) != len(metrics):
            raise RunFolderError(
                f"{folder / METRICS} is damaged: it has {len(metrics)} records, and {RESULT} counts "
                f"{result['records']}. Restore it, or delete {RESULT} and continue with --resume {folder}."
            )
    about = {name: value for name, value in stored.items() if name != "config"}
    check_content(folder / CONFIG, about, About)
    if result is not None:
        check_content(folder / RESULT, result, StoredResult)
    return Records(stored.get("config"), about, metrics, result)


def read_result(folder: Path) -> Result:
    """Return the result of a run that has finished."""
    stored = check_content(folder / RESULT, _read_json(folder, RESULT), StoredResult)
    try:
        return Result(
            **{
                field.name: stored[field.name]
                for field in dataclasses.fields(Result)
                # results of older versions lack newer fields, which have defaults
                if field.name in stored or field.default is field.default_factory is dataclasses.MISSING
            }
        )
    except KeyError as error:
        raise RunFolderError(f"{folder / RESULT} cannot be used: it has no {error}.") from error


def open_run_folder(
    folder: Path, config: TrainConfig, about: dict[str, Any], held: ExitStack, *, resume: bool
) -> str | None:
    """Create the folder of a new run, or check the folder of a run to resume, and lock it.

    A run without a checkpoint and a result starts from the beginning, with or without `resume`.

    Args:
        about: command, steps and provenance, for `config.json`.
        held: exit stack that holds the lock until it is closed.

    Returns:
        The command that started the run.
    """
    tokenizer = config.task.tokenizer_object() if isinstance(config.task, TokenizedTask) else None
    if resume:
        # the code that `config` names is trusted, because the caller has already imported them
        run = load_run(folder, trust_code=config.import_paths)
        held.enter_context(lock_run_folder(folder))
        changed = differences(run.config, config)
        # these may change, because the number of processes may change
        for name in ("loop.strategy", "loop.time_parallel"):
            changed.pop(name, None)
        for name, (stored, given) in changed.items():
            raise RunFolderError(
                f"{folder} was started with {name} = {stored}, not {given}; "
                "a resumed run keeps its configuration: leave the option out, or start a new run with --out."
            )
        about = {**about, "command": run.about.get("command")}
        if _valuable(folder):
            if tokenizer is not None and read_tokenizer(folder).fingerprint != tokenizer.fingerprint:
                raise RunFolderError(
                    f"{folder} was trained with another version of the tokenizer {tokenizer.name!r}; "
                    "restore the text and the tokenizer of the run, or start a new run with --out."
                )
            return about["command"]
    else:
        try:
            str(folder).encode()
        except UnicodeEncodeError as error:
            # checkpoints cannot be written to such a path
            raise RunFolderError(
                f"the name of the run folder {folder} must be UTF-8: choose another."
            ) from error
        # checked before locking, too: no lock file may be left in a folder that is not a run
        _check_unused(folder)
        with writing(f"create the folder {folder}", RunFolderError):
            folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(lock_run_folder(folder))
        _check_unused(folder)
    if tokenizer is not None:
        about = {**about, "tokenizer": tokenizer.fingerprint}
    # written first, because this file makes the run resumable
    write_json(folder / CONFIG, {"recipe": config.name, **about, "config": config_to_dict(config)})
    if tokenizer is not None:
        with writing(f"write the tokenizer to {folder}"):
            tokenizer.save(folder)
    return about["command"]


def note_resumed(folder: Path, step: int, origin: dict[str, Any]) -> None:
    """Add the provenance of a resumed run to `config.json` if it differs from that of the part before."""
    stored = _read_json(folder, CONFIG)
    # a part that was killed before its first checkpoint left nothing
    parts = [part for part in stored.get("resumed", ()) if part["step"] < step]
    before = parts[-1] if parts else stored
    if any(before.get(name) != value for name, value in origin.items()):
        parts.append({"step": step, **origin})
    if parts != stored.get("resumed", []):
        config = stored.pop("config")
        write_json(folder / CONFIG, {**stored, "resumed": parts, "config": config})


def lock_run_folder(folder: Path) -> ExitStack:
    """Return a context that holds the lock of a run folder."""
    held = ExitStack()
    try:
        held.enter_context(locked(folder))
    except FolderInUseError as error:
        raise RunFolderError(
            f"{folder}: {error.process} trains here; wait until it ends, or stop it, or pass another --out."
        ) from error
    except OSError as error:
        raise RunFolderError(f"{folder / LOCK} cannot be locked: {reason(error)}.") from error
    return held


def is_run(folder: Path) -> bool:
    """Return whether a folder has the configuration of a run; other programs also write config.json."""
    with suppress(OSError, ValueError):
        stored = read_json(folder / CONFIG)
        return isinstance(stored, dict) and {"recipe", "config"} <= stored.keys()
    return False


def never_began(folder: Path) -> bool:
    """Return whether a folder contains only files of a run that failed before writing its configuration."""
    return set(os.listdir(folder)) <= LEFT_BEHIND


def _valuable(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in VALUABLE)


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    # without permission to enter the folder, even checking for a file raises an error
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{error.filename or folder} cannot be read: {reason(error)}.") from error


def _check_unused(folder: Path) -> None:
    """Raise RunFolderError if a new run may not write to the folder."""
    with _one_line(folder):
        if not folder.exists():
            return
        names = set(os.listdir(folder)) - LEFT_BEHIND if folder.is_dir() else {folder.name}
        if names and not is_run(folder):
            raise RunFolderError(f"{folder} is not an empty folder; pass another --out.")
        if _valuable(folder):
            raise RunFolderError(
                f"{folder} already holds a run; continue it with --resume {folder}, or pass another --out."
            )


@contextmanager
def writing(what: str, kind: type[TrainError] = TrainError) -> Iterator[None]:
    """Turn an OSError within the context, such as a full disk, into an error that says what failed."""
    try:
        yield
    except OSError as error:
        raise kind(f"could not {what}: {reason(error)}.") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as `linrec.files.write_json` does; an OSError becomes a TrainError."""
    with writing(f"write {path}"):
        files.write_json(path, content)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        beside = folder.parent
        try:
            # os.path.exists returns False for a neighbouring folder without permission, Path.exists raises
            others = [name for name in os.listdir(beside) if os.path.exists(beside / name / CONFIG)]
        except OSError:
            others = []
        hint = f"; did you mean {beside / nearest(folder.name, others)}?" if others else "."
        raise RunFolderError(f"there is no run folder {folder}{hint}")
    if not (folder / name).exists():
        cure = " Start the run again with the command that made it." if never_began(folder) else ""
        raise RunFolderError(f"{folder} is not a run folder: it has no {name}.{cure}")
    try:
        content = read_json(folder / name)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder / name} cannot be read: {reason(error)}.") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{folder / name} cannot be used: it is not a JSON object.")
    return content


def language_task(run: Run) -> LanguageModeling:
    """Return the task of a run that trained a language model; any other run is a ConfigError."""
    task = run.config.task
    if not isinstance(task, LanguageModeling):
        raise ConfigError(f"{run.path} is not a language model: it was trained on {type(task).__name__}.")
    return task


def tokenizer_of(run: Run) -> Tokenizer:
    """Return the tokenizer stored in a run folder; any other than that of training is a ConfigError."""
    tokenizer, vocab_size = read_tokenizer(run.path), run.config.sequence_model.vocab_size
    if vocab_size is None:
        raise ConfigError(f"{run.path} is not a language model: its model does not take tokens.")
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {run.path} has {tokenizer.vocab_size:,} tokens, but its model has "
            f"{vocab_size:,}. Restore the tokenizer that the run was trained with."
        )
    trained_with = run.about.get("tokenizer", tokenizer.fingerprint)
    if tokenizer.fingerprint != trained_with:
        raise ConfigError(
            f"the tokenizer in {run.path} has the fingerprint {tokenizer.fingerprint}, but the run was "
            f"trained with the fingerprint {trained_with}. "
            "Restore the tokenizer that the run was trained with."
        )
    return tokenizer
