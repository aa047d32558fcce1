"""Generation states in safetensors files: tensors by name, everything else as JSON, never pickled.

    layers.N...    the state of layer N: a tensor, or its parts by tuple index or field name; of rows in
                   groups, layers.rows.G the rows of group G, and layers.states.G.N the state of layer N
    token          the newest token of each sequence
    reset          the reset of the newest token, if the state has a reset

Complex tensors are stored as real tensors with a last axis of size 2, because some versions of safetensors
lack complex dtypes. A state is valid only for the weights that produced it, so the file stores a fingerprint
of the weights. Loading verifies a checksum of the whole file.
"""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from linrec import __version__
from linrec.files import reason, replacing
from linrec.generation.state import GenerationState, filled, named
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.ragged import RaggedState
from linrec.tensor_files import read_tensors, write_tensors

__all__ = ["StateFileError", "fingerprint", "load_state", "save_state"]

# version of the file format, increased when the meaning of the content changes; files of 1 have no checksum
FORMAT = 2
READABLE = (1, FORMAT)
NAME = "generation"
CURE = "Pass a file that --save-state wrote, or make the state again from its prompt."


class StateFileError(ValueError):
    """A file that does not hold a generation state, or holds the state of another model."""


def fingerprint(model: LanguageModel) -> str:
    """Return the SHA-256 hash of a model's configuration and weights, as 64 hexadecimal digits.

    Args:
        model: a model on any device.

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1))
        >>> before = fingerprint(model)
        >>> _ = torch.nn.init.zeros_(model.head.bias)
        >>> fingerprint(model) == before
        False
    """
    described = json.dumps(dataclasses.asdict(model.config), sort_keys=True)
    digest = hashlib.sha256(described.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_state(path: str | os.PathLike[str], state: GenerationState, model: LanguageModel) -> None:
    """Write a generation state to a file, atomically.

    Args:
        path: the file; an existing file is replaced.
        state: state from `generate` or from a stream.
        model: the model that produced the state.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = named(state.layers, "layers") | {"token": state.token}
    if state.reset is not None:
        tensors["reset"] = state.reset
    write_parts(Path(path), tensors, {"drawn": state.drawn}, fingerprint(model))


def write_parts(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object], model: str) -> None:
    """Write the tensors of a state and JSON values `about` the state, with the fingerprint `model`."""
    tensors = dict(tensors)
    complex_parts = [name for name, tensor in tensors.items() if tensor.is_complex()]
    tensors |= {name: torch.view_as_real(tensors[name].resolve_conj()) for name in complex_parts}
    # copies, because parts of a state may share memory, which safetensors refuses
    tensors = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    said = {
        "format": FORMAT,
        "complex": complex_parts,
        "model": model,
        "versions": {"linrec": __version__, "torch": str(torch.__version__)},
        **about,
    }
    with replacing(path) as partial:
        write_tensors(partial, tensors, said, name=NAME)


def load_state(path: str | os.PathLike[str], model: LanguageModel) -> GenerationState:
    """Read a generation state that `save_state` wrote.

    Args:
        path: the file.
        model: the model that the state was saved with.

    Returns:
        The state, on the model's device.

    Raises:
        StateFileError: the file does not exist, does not hold a state, or its state does not fit the model.
    """
    path = Path(path)
    tensors, about = read_parts(path, fingerprint(model))
    return _assembled(tensors, about.get("drawn"), model, path)


def read_parts(path: Path, model: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what `write_parts` wrote; raise StateFileError if the file is damaged or of another model."""
    try:
        tensors, about = read_tensors(path, name=NAME)
    except OSError as error:
        raise StateFileError(f"the state {path} cannot be read: {reason(error)}.") from error
    except KeyError as error:
        raise StateFileError(f"{path} holds no generation state. {CURE}") from error
    except (SafetensorError, ValueError) as error:
        raise StateFileError(f"{path} is not a state file: {error}. {CURE}") from error
    if not isinstance(about, dict):
        raise StateFileError(f"{path} holds no generation state. {CURE}")
    if about.get("format") not in READABLE:
        version = about.get("versions", {}).get("linrec")
        raise StateFileError(
            f"{path} was written by linrec {version}; linrec {__version__} cannot read its format."
        )
    saved_by = str(about.get("model"))
    if saved_by != model:
        raise StateFileError(
            f"{path} was saved by another model, {saved_by[:12]}, not by this one, {model[:12]}. "
            "A state fits only the weights that made it: pass the run that saved it."
        )
    for name in about.get("complex", []):
        if name in tensors and tensors[name].is_floating_point() and tensors[name].shape[-1:] == (2,):
            tensors[name] = torch.view_as_complex(tensors[name])
    return tensors, about


def _assembled(
    tensors: dict[str, Tensor], drawn: object, model: LanguageModel, path: Path
) -> GenerationState:
    device = next(model.parameters()).device
    if not isinstance(drawn, int) or drawn < 0:
        raise StateFileError(f"{path} is damaged: it lacks the number of generated tokens.")
    token, reset = tensors.pop("token", None), tensors.pop("reset", None)
    if token is None or token.dtype != torch.int64 or token.dim() != 1:
        raise StateFileError(f"{path} is damaged: it has no `token` of shape (b) and dtype int64.")
    if ((token < 0) | (token >= model.config.vocab_size)).any():
        raise StateFileError(f"{path} is damaged: its `token` is not in 0 .. {model.config.vocab_size - 1}.")
    if reset is not None and (reset.dtype != torch.bool or reset.shape != token.shape):
        raise StateFileError(
            f"{path} is damaged: its `reset` is not of shape {tuple(token.shape)} and dtype bool."
        )
    layers = state_of(tensors, len(token), model, path)
    return GenerationState(layers, token.to(device), None if reset is None else reset.to(device), drawn)


def state_of(tensors: Mapping[str, Tensor], batch: int, model: LanguageModel, path: Path) -> State:
    """Return the state of the model that these tensors of a file are, on the model's device."""
    device = next(model.parameters()).device
    start = _first_state(model, batch, tensors, path)
    for name, expected in named(start, "layers").items():
        _check_part(tensors.get(name), expected, f"{path} is damaged: its part {name}")
    layers = filled(start, "layers", {name: tensor.to(device) for name, tensor in tensors.items()})
    if strange := tensors.keys() - named(layers, "layers").keys():
        raise StateFileError(f"{path} is damaged: the model's state has no part {min(strange)}.")
    return layers


def _first_state(model: LanguageModel, batch: int, tensors: Mapping[str, Tensor], path: Path) -> State:
    """Return the initial state with the structure of the file's: rows in groups, if the file has groups."""
    names = itertools.takewhile(tensors.__contains__, map("layers.rows.{}".format, itertools.count()))
    rows = tuple(tensors[name].reshape(-1) for name in names)
    if not rows:
        return model.init_state(batch, device="cpu")
    found = torch.cat(rows)
    if found.dtype != torch.int64 or not torch.equal(found.sort().values, torch.arange(batch)):
        raise StateFileError(f"{path} is damaged: its groups do not hold each of {batch} rows once.")
    return RaggedState(rows, tuple(model.init_state(len(part), device="cpu") for part in rows))


def _check_part(tensor: Tensor | None, expected: Tensor, what: str) -> None:
    if tensor is None:
        raise StateFileError(f"{what} is missing.")
    # a cache starts with 0 steps and may then have any number of steps
    fits = tensor.dim() == expected.dim() and all(
        size == wanted or wanted == 0 for size, wanted in zip(tensor.shape, expected.shape, strict=True)
    )
    if not fits:
        raise StateFileError(f"{what} must have shape {tuple(expected.shape)}; it has {tuple(tensor.shape)}.")
    kinds = [(t.is_complex(), t.is_floating_point(), t.dtype == torch.bool) for t in (tensor, expected)]
    # only the kind of dtype must agree, because autocast may have produced a state in half precision
    if kinds[0] != kinds[1]:
        raise StateFileError(f"{what} must have a dtype like {expected.dtype}; it has {tensor.dtype}.")
