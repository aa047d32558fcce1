"""Trained models to start a run from: models of run folders, and converted checkpoints."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from linrec.convert import ConversionError, from_hugging_face, from_rwkv_lm
from linrec.errors import ConfigError, RunFolderError, TrainError
from linrec.files import read_json, reason
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train.checkpoint import Checkpoint, save_checkpoint
from linrec.lab.train.config import TrainConfig, config_to_dict
from linrec.lab.train.provenance import provenance
from linrec.lab.train.run import CONFIG, load_run, lock_run_folder, write_json
from linrec.models import LanguageModel
from linrec.text import Tokenizer, load_tokenizer
from linrec.text.tokenizer import FILE

__all__ = ["Start", "open_start", "write_converted"]

NAME = "converted"


class Start(NamedTuple):
    """A trained language model, and its tokenizer.

    Attributes:
        model: the model, on the CPU, in evaluation mode.
        tokenizer: the folder of its tokenizer, a value for `LanguageModeling.tokenizer`; None if the folder
            has no tokenizer.
    """

    model: LanguageModel
    tokenizer: str | None


def open_start(path: str | os.PathLike[str], *, trust_code: bool = False) -> Start:
    """Return the language model of a run folder, or of a checkpoint that linrec converts.

    Args:
        path: a run folder; a checkpoint folder for `linrec.convert.from_hugging_face`; or the weight file of
            an RWKV model.
        trust_code: whether to import tasks and mixers that a run names by import path.

    Raises:
        ConfigError: the run did not train a language model, or the checkpoint cannot be converted.
        RunFolderError: the run cannot be read.

    Example:
        >>> open_start("no/such/folder")
        Traceback (most recent call last):
        linrec.errors.ConfigError: there is no folder no/such/folder; ...
    """
    folder = Path(path)
    tokenizer = str(folder) if (folder / FILE).is_file() else None
    if _is_run(folder):
        return Start(load_run(folder, trust_code=trust_code).model(), tokenizer)
    try:
        return Start((from_rwkv_lm if folder.is_file() else from_hugging_face)(folder), tokenizer)
    except ConversionError as error:
        raise ConfigError(str(error)) from error


def write_converted(start: Start, out: Path, tokenizer: Tokenizer, *, length: int, command: str) -> None:
    """Write a model to a run folder, which all commands accept like the folder of a trained run.

    Args:
        start: the model.
        out: the run folder to create.
        tokenizer: the model's tokenizer.
        length: tokens of context that the model was trained for.
        command: the command line to record.

    Raises:
        ConfigError: the tokenizer has more tokens than the model.
        RunFolderError: `out` already exists.
        TrainError: a file cannot be written.
    """
    vocab_size = start.model.config.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size:,} tokens, but the model has "
            f"{vocab_size:,}. Pass the tokenizer that the model was trained with."
        )
    task = LanguageModeling(tokenizer=str(out), length=length, vocab_size=vocab_size)
    config = TrainConfig(NAME, task, start.model.config)
    about = {"command": command, "total_steps": 0, **provenance(torch.device("cpu")), "processes": 1}
    about["tokenizer"] = tokenizer.fingerprint
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise RunFolderError(f"{out} already exists; pass another --out.") from None
    except OSError as error:
        raise RunFolderError(f"could not create the folder {out}: {reason(error)}.") from error
    tensors = {f"model.{name}": tensor for name, tensor in start.model.state_dict().items()}
    with lock_run_folder(out):
        try:
            tokenizer.save(out)
        except OSError as error:
            raise TrainError(f"could not write the tokenizer to {out}: {reason(error)}.") from error
        save_checkpoint(out, Checkpoint(tensors, {"step": 0, "seconds": 0.0}))
        # written last, because this file makes the folder a run folder
        write_json(out / CONFIG, {"recipe": NAME, **about, "config": config_to_dict(config)})


def tokenizer_for(start: Start, name: str | None) -> Tokenizer:
    """Return the tokenizer of a name or path, or the model's own tokenizer for None.

    Raises:
        ConfigError: `name` is None, and the model has no tokenizer.
        DataError: the tokenizer cannot be loaded.
    """
    chosen = name or start.tokenizer
    if chosen is None:
        raise ConfigError(
            "the checkpoint has no tokenizer.json; pass --tokenizer with the name or path of a Hugging Face "
            'tokenizer, or "bytes".'
        )
    return load_tokenizer(chosen)


def _is_run(folder: Path) -> bool:
    # Hugging Face checkpoints have a file of this name, too
    with suppress(OSError, ValueError):
        stored = read_json(folder / CONFIG)
        return isinstance(stored, dict) and {"recipe", "config"} <= stored.keys()
    return False
