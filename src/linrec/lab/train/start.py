"""The model that a run starts with: new, or trained before in a run folder or a converted checkpoint."""

import copy
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from linrec import mixers
from linrec.convert import ConversionError, from_hugging_face, from_rwkv_lm
from linrec.errors import ConfigError, RunFolderError
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train.checkpoint import Checkpoint, save_checkpoint
from linrec.lab.train.config import TrainConfig, config_to_dict, make_model
from linrec.lab.train.records import provenance
from linrec.lab.train.run import CONFIG, is_run, load_run, lock_run_folder, write_json, writing
from linrec.models import ImageClassifier, LanguageModel, SequenceClassifier
from linrec.text import Tokenizer, load_tokenizer
from linrec.text.tokenizer import FILE

NAME = "converted"


def build_model(
    config: TrainConfig, device: torch.device, processes: int, init: nn.Module | None
) -> LanguageModel | SequenceClassifier | ImageClassifier:
    """Return the model of a run, new or with the weights of `init`, or raise ConfigError if it cannot train.

    The task of the configuration is prepared, and `init` is a model of the same configuration.
    """
    task = config.task
    names = config.model.mixer_pattern
    others = [name for name in names if not mixers.get(name).takes_dt]
    if others and task.split("train").rows(torch.tensor([0])).dt is not None:
        raise ConfigError(
            f"`with_dt` of the task needs mixers that take irregular steps; {others[0]!r} does not. Leave "
            "--task.with-dt out: the time is a feature too."
        )
    model: LanguageModel | SequenceClassifier | ImageClassifier
    try:
        model = make_model(config.model)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the model cannot be built: {error}") from error
    if init is not None:
        try:
            model.load_state_dict(init.state_dict())
        except RuntimeError as error:
            # torch's message names the class in the first line and a parameter in each further line
            why = [*str(error).splitlines(), ""][1].strip()
            raise ConfigError(
                f"the model to start from has another configuration: {why} "
                "Leave out the options of the model."
            ) from error
    _check_promises(model, device)
    if not isinstance(model, LanguageModel):
        return model
    model.recompute = config.loop.recompute
    carry_state = config.loop.carry_state
    if carry_state and processes > 1:
        raise ConfigError(
            f"`loop.carry_state` is for a single process; got {processes}. Start linrec without torchrun, or "
            "leave --loop.carry-state out."
        )
    for name, mixer in zip(names, model.mixers, strict=False):
        if isinstance(task, LanguageModeling) and not mixer.is_causal:
            raise ConfigError(
                "a language model predicts each token from the tokens before it, but with these arguments "
                f"the mixer {name!r} sees later tokens. Leave out --model.mixer-args.no-causal, or choose "
                "another mixer."
            )
        # a memory across the stack begins each segment with new states of the blocks
        if carry_state and model.memory is None and mixer.state_grows:
            raise ConfigError(
                "`loop.carry_state` needs states of constant size, but with these arguments the state of the "
                f"mixer {name!r} grows with each step. Pass a window, if the mixer has one "
                "(--model.mixer-args.window for attention), or choose another mixer."
            )
    return model


class Start(NamedTuple):
    """A trained language model in evaluation mode, and the folder of its tokenizer if it has one."""

    model: LanguageModel
    tokenizer: str | None


def open_start(path: str | os.PathLike[str], *, trust_code: bool = False) -> Start:
    """Return the language model of a run folder, or of a checkpoint that linrec converts.

    That is a checkpoint folder for `linrec.convert.from_hugging_face`, or the weight file of an RWKV model.
    """
    folder = Path(path)
    tokenizer = str(folder) if (folder / FILE).is_file() else None
    if is_run(folder):
        return Start(load_run(folder, trust_code=trust_code).model(), tokenizer)
    try:
        return Start((from_rwkv_lm if folder.is_file() else from_hugging_face)(folder), tokenizer)
    except ConversionError as error:
        raise ConfigError(str(error)) from error


def write_converted(start: Start, out: Path, tokenizer: Tokenizer, *, length: int, command: str) -> None:
    """Write a model to a new run folder, which all commands accept like the folder of a trained run.

    `length` is the number of tokens of context that the model was trained for.
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
    with writing(f"create the folder {out}", RunFolderError):
        try:
            out.mkdir(parents=True)
        except FileExistsError:
            raise RunFolderError(f"{out} already exists; pass another --out.") from None
    tensors = {f"model.{name}": tensor for name, tensor in start.model.state_dict().items()}
    with lock_run_folder(out):
        with writing(f"write the tokenizer to {out}"):
            tokenizer.save(out)
        save_checkpoint(out, Checkpoint(tensors, {"step": 0, "seconds": 0.0}))
        # written last, because this file makes the folder a run folder
        write_json(out / CONFIG, {"recipe": NAME, **about, "config": config_to_dict(config)})


def tokenizer_for(start: Start, name: str | None) -> Tokenizer:
    """Return the tokenizer of a name or path, or the model's own tokenizer for None."""
    chosen = name or start.tokenizer
    if chosen is None:
        raise ConfigError(
            "the checkpoint has no tokenizer.json; pass --tokenizer with the name or path of a Hugging Face "
            'tokenizer, or "bytes".'
        )
    return load_tokenizer(chosen)


def _check_promises(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError if a mixer from outside of linrec breaks a law that training relies on."""
    outside = {type(part): part for part in model.modules() if isinstance(part, mixers.Mixer)}
    for kind, mixer in outside.items():
        if kind.__module__.partition(".")[0] == "linrec":
            continue
        # the import takes a while, and few runs need it
        from linrec.testing import check_promises

        try:
            # in full precision, whatever the precision of the run is
            with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
                check_promises(copy.deepcopy(mixer).to(device))
        except AssertionError as error:
            raise ConfigError(
                f"the mixer {kind.__module__}:{kind.__name__} breaks the law of {str(error).splitlines()[0]} "
                "`linrec.testing.check_mixer` checks all laws."
            ) from error
        except Exception:
            # as of a kernel that takes half precision alone; if training fails too, it tells the reason
            continue
