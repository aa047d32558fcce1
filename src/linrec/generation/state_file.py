"""States in files: safetensors with the tensors by name and everything else as JSON, never pickled.

    layers.N...    the state of layer N: itself, or its parts by number or field
    token          the newest token of each sequence
    reset          where there is one

Complex numbers are kept as pairs of real ones, in a last axis of 2, since not every version of safetensors
has all complex dtypes. A state belongs to the weights that made it. The file has their fingerprint.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linrec import __version__
from linrec.files import parse_json, replacing
from linrec.generation.state import GenerationState, filled, named
from linrec.models import LanguageModel

__all__ = ["StateFileError", "fingerprint", "load_state", "save_state"]

# raised when what a file holds changes its meaning
FORMAT = 1


class StateFileError(ValueError):
    """A file that holds no state, or that of another model."""


def fingerprint(model: LanguageModel) -> str:
    """Hash of a model's configuration and of the bits of its weights: 64 hexadecimal digits of SHA-256.

    Args:
        model: on any device.

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
    """Write a state into a file, whole or not at all.

    Args:
        path: the file; one that is there is replaced.
        state: of `generate` or a stream.
        model: whose state it is.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    tensors = named(state.layers, "layers") | {"token": state.token}
    if state.reset is not None:
        tensors["reset"] = state.reset
    complex_parts = [name for name, tensor in tensors.items() if tensor.is_complex()]
    tensors |= {name: torch.view_as_real(tensors[name].resolve_conj()) for name in complex_parts}
    # copies: parts of a state may share memory, which safetensors refuses
    tensors = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    about = {
        "format": FORMAT,
        "complex": complex_parts,
        "drawn": state.drawn,
        "model": fingerprint(model),
        "versions": {"linrec": __version__, "torch": str(torch.__version__)},
    }
    with replacing(path) as partial:
        partial.write_bytes(safetensors.torch.save(tensors, metadata={"generation": json.dumps(about)}))


def load_state(path: str | os.PathLike[str], model: LanguageModel) -> GenerationState:
    """Read a state that `save_state` wrote.

    Args:
        path: the file.
        model: the one that the state was saved with.

    Returns:
        The state, on the model's device.

    Raises:
        StateFileError: there is no such file, it holds no state, or one that does not fit the model.
    """
    path = Path(path)
    try:
        # safetensors says of every file that it cannot open that it is not there
        path.open("rb").close()
        with safe_open(path, framework="pt") as file:
            stored = (file.metadata() or {}).get("generation")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = None if stored is None else parse_json(stored)
    except OSError as error:
        raise StateFileError(f"the state {path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError) as error:
        raise StateFileError(f"{path} is no file that holds a state: {error}.") from error
    if not isinstance(about, dict):
        raise StateFileError(f"{path} holds no state of a generation. Pass what --save-state wrote.")
    if about.get("format") != FORMAT:
        version = about.get("versions", {}).get("linrec")
        raise StateFileError(
            f"{path} was written by linrec {version}, whose states this version, {__version__}, cannot read."
        )
    saved_by, found = str(about.get("model")), fingerprint(model)
    if saved_by != found:
        raise StateFileError(
            f"{path} was saved by another model, {saved_by[:12]}, not by this one, {found[:12]}. "
            "A state fits only the weights that made it: pass the run that saved it."
        )
    for name in about.get("complex", []):
        if name in tensors and tensors[name].is_floating_point() and tensors[name].shape[-1:] == (2,):
            tensors[name] = torch.view_as_complex(tensors[name])
    return _assembled(tensors, about.get("drawn"), model, path)


def _assembled(
    tensors: dict[str, Tensor], drawn: object, model: LanguageModel, path: Path
) -> GenerationState:
    device = next(model.parameters()).device
    if not isinstance(drawn, int) or drawn < 0:
        raise StateFileError(f"{path} is damaged: it does not say how many tokens were generated.")
    token, reset = tensors.pop("token", None), tensors.pop("reset", None)
    if token is None or token.dtype != torch.int64 or token.dim() != 1:
        raise StateFileError(f"{path} is damaged: it has no `token` of shape (b) and dtype int64.")
    if ((token < 0) | (token >= model.config.vocab_size)).any():
        raise StateFileError(f"{path} is damaged: its `token` is not in 0 .. {model.config.vocab_size - 1}.")
    if reset is not None and (reset.dtype != torch.bool or reset.shape != token.shape):
        raise StateFileError(
            f"{path} is damaged: its `reset` is not of shape {tuple(token.shape)} and dtype bool."
        )
    start = model.init_state(len(token), device="cpu")
    for name, expected in named(start, "layers").items():
        _check_part(tensors.get(name), expected, f"{path} is damaged: its part {name}")
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    layers = filled(start, "layers", moved)
    if strange := tensors.keys() - named(layers, "layers").keys():
        raise StateFileError(f"{path} is damaged: the model's state has no part {min(strange)}.")
    return GenerationState(layers, token.to(device), None if reset is None else reset.to(device), drawn)


def _check_part(tensor: Tensor | None, expected: Tensor, what: str) -> None:
    if tensor is None:
        raise StateFileError(f"{what} is missing.")
    # a cache starts with no steps and then has any number
    fits = tensor.dim() == expected.dim() and all(
        size == wanted or wanted == 0 for size, wanted in zip(tensor.shape, expected.shape, strict=True)
    )
    if not fits:
        raise StateFileError(f"{what} must have shape {tuple(expected.shape)}; it has {tuple(tensor.shape)}.")
    kinds = [(t.is_complex(), t.is_floating_point(), t.dtype == torch.bool) for t in (tensor, expected)]
    # autocast may have kept it in half precision
    if kinds[0] != kinds[1]:
        raise StateFileError(f"{what} must have a dtype like {expected.dtype}; it has {tensor.dtype}.")
