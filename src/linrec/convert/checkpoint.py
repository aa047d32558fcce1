"""A checkpoint of another library: its options, and its tensors, each to be used exactly once."""

import contextlib
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linrec.errors import nearest
from linrec.files import creating, inside, read_json, reason
from linrec.rules import COUNT
from linrec.tensor_files import check_sealed, write_sealed

__all__ = [
    "ANY",
    "ConversionError",
    "Options",
    "Tensors",
    "open_checkpoint",
    "open_options",
    "open_tensors",
    "write_checkpoint",
]

CONFIG = "config.json"
# a single file, or an index of several files; the first that exists is read
WHOLE, BIN = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
# options that are the number of layers, and the largest value of other integers
LAYERS, LARGEST = ("num_hidden_layers", "n_layer", "num_blocks"), 2**31
# a size that config.json does not imply
ANY = -1
# suffixes of files that hold tensors
TENSORS = (".safetensors", ".bin", ".pth", ".pt", ".h5", ".msgpack", ".gguf")
T = TypeVar("T")


class ConversionError(ValueError):
    """The checkpoint cannot be converted; the message is one line that a user can act on."""


class Options:
    """The options in config.json.

    Args:
        values: options by name.
        path: path of the file, for messages.

    Example:
        >>> options = Options({"hidden_size": 64, "eps": 1}, "config.json")
        >>> options.read("hidden_size", int), options.read("eps", float), options.read("bias", bool, False)
        (64, 1.0, False)
    """

    def __init__(self, values: Mapping[str, Any], path: str | Path) -> None:
        self._values, self.path = values, path

    def __contains__(self, name: str) -> bool:
        # null counts as missing
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether an option is null; a missing option is not."""
        return name in self._values and self._values[name] is None

    def read(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return an option.

        Args:
            name: name of the option.
            kind: bool, int, float, str, list or dict; an integer is accepted as a float.
            default: the value if the option is missing or null; None makes the option required. transformers
                omits options that have the same value in all of its models, and writes an architecture's own.

        Raises:
            ConversionError: the option is missing, has the wrong type, or is too large.
        """
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ConversionError(f"{self.path} has no `{name}`, which `save_pretrained` would have written.")
        if kind is float and type(value) is int:
            value = float(value)
        # not isinstance: a Python bool is also an int
        if type(value) is not kind:
            got = repr(value)[:80]
            raise ConversionError(f"{self.path}: `{name}` must be of type {kind.__name__}; got {got}.")
        size = len(value) if isinstance(value, list) else value if isinstance(value, int) else 0
        most = COUNT if isinstance(value, list) or name in LAYERS else LARGEST
        if size > most:
            raise ConversionError(f"{self.path}: `{name}` must be at most {most:,}; got {size:,}.")
        return value

    def supported(self, name: str, choices: Sequence[Any], default: Any = None) -> Any:
        """Return an option for which linrec supports only some values.

        Args:
            name: name of the option.
            choices: the supported values.
            default: the value if the option is missing; None makes the option required.

        Raises:
            ConversionError: the option is missing, or its value is not among the choices.
        """
        value = self._values.get(name, default)
        if value not in choices:
            listed = ", ".join(map(repr, choices))
            raise ConversionError(f"{self.path}: `{name}` is {value!r}; linrec supports only {listed}.")
        return value


class Tensors:
    """The tensors of a checkpoint by name; a tensor that is never taken is an error.

    Args:
        files: for each tensor, the open file that contains it: a safetensors file, or a dict of tensors.
        folder: the checkpoint, for messages.
        config: name of the source of the expected shapes, for messages.
    """

    def __init__(self, files: Mapping[str, Any], folder: Path, config: str = CONFIG) -> None:
        self._files, self._folder, self._config = files, folder, config
        self._left = dict.fromkeys(files)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __iter__(self) -> Iterator[str]:
        return iter(self._left)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that has not been taken yet.

        Raises:
            ConversionError: the tensor does not exist.
        """
        if name not in self._left:
            hint = f"; the nearest is `{nearest(name, self._left)}`" if self._left else ""
            raise ConversionError(
                f"{self._folder} has no tensor `{name}`{hint}. It must be the checkpoint of a whole causal "
                "language model."
            )
        file = self._files[name]
        return tuple(file[name].shape if isinstance(file, dict) else file.get_slice(name).get_shape())

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor, and mark it as used.

        Args:
            name: name of the tensor in the checkpoint.
            shape: shape that config.json implies; empty for a scalar. `ANY` stands for any size.

        Returns:
            The tensor, in float32 or float64.

        Raises:
            ConversionError: the tensor is missing, or has the wrong shape or an unsupported dtype.
        """
        found = self.shape(name)
        del self._left[name]
        if len(found) != len(shape) or any(a not in (b, ANY) for a, b in zip(shape, found, strict=True)):
            raise ConversionError(
                f"{self._folder}: `{name}` must have shape {shape} by {self._config}; got {found}. "
                "The configuration and the tensors belong to different checkpoints."
            )
        file = self._files[name]
        tensor: Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ConversionError(
                f"{self._folder}: `{name}` must be of float64, float32, bfloat16 or float16; "
                f"got {str(tensor.dtype).removeprefix('torch.')}. Quantised weights are not converted."
            )
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

    def take_copy(self, name: str, original: Tensor) -> None:
        """Take a tied weight, which may be stored a second time and must then equal `original`.

        Raises:
            ConversionError: the stored copy differs.
        """
        if name in self and not torch.equal(self.take(name, *original.shape), original):
            raise ConversionError(
                f"{self._folder}: `{name}` must equal the weight that {self._config} ties it to. "
                "Set `tie_word_embeddings` (`tie_embeddings` of state-spaces) to false there to keep both."
            )

    def check_all_taken(self) -> None:
        """Raise if a tensor has not been taken.

        Raises:
            ConversionError: at least one tensor is left.
        """
        if self._left:
            names = [f"`{name}`" for name in self._left]
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ConversionError(
                f"{self._folder} has tensors that its `model_type` does not use: {listed}. "
                "Dropping them would change the model."
            )


@contextlib.contextmanager
def open_checkpoint(folder: Path) -> Iterator[tuple[Options, Tensors]]:
    """Open a checkpoint folder as `save_pretrained` writes it.

    Args:
        folder: contains config.json, and model.safetensors or pytorch_model.bin, or an index of several such
            files. A .bin file is read by `torch.load(..., weights_only=True)`, which runs no code.

    Returns:
        A context of the options and the tensors. Tensors are read when they are taken, within the context.
    """
    options = open_options(folder)
    whole = next((n for n in (WHOLE, BIN) if _is_there(folder, n) or _is_there(folder, n + INDEX)), WHOLE)
    places = _places(folder / (whole + INDEX)) if _is_there(folder, whole + INDEX) else None
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(_open(_own(folder / name)))
            for name in ([whole] if places is None else sorted(set(places.values())))
        }
        held = {tensor: file for name, file in opened.items() for tensor in file.keys()}  # noqa: SIM118
        for tensor, name in ({} if places is None else places).items():
            if tensor not in held:
                raise ConversionError(
                    f"{folder / (whole + INDEX)} says that {name} has `{tensor}`, but the file lacks it."
                )
        yield options, Tensors(held, folder)


def open_options(folder: Path) -> Options:
    """Return the options in the config.json of a checkpoint folder."""
    if not folder.is_dir():
        raise ConversionError(f"there is no folder {folder}; pass one that `save_pretrained` has written.")
    return Options(_json(folder / CONFIG), folder / CONFIG)


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], like: Path) -> None:
    """Write a checkpoint folder with these tensors, and with the other files of a checkpoint.

    Args:
        folder: the folder to create. It appears once all of its files are on disk.
        tensors: tensors by name, contiguous, on the CPU.
        like: a checkpoint folder, whose files are copied, except tensors and folders.
    """
    if folder.exists():
        raise ConversionError(f"{folder} already exists; choose another folder, or remove it.")
    try:
        others = [
            _own(path)
            for path in sorted(like.iterdir())
            if path.is_file() and path.suffix not in TENSORS and not path.name.endswith(INDEX)
        ]
        with creating(folder) as partial:
            for path in others:
                shutil.copyfile(path, partial / path.name)
            write_sealed(partial / WHOLE, tensors, {"format": "pt"})
    except OSError as error:
        raise ConversionError(f"{folder} cannot be written: {reason(error)}.") from error


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Tensors]:
    """Open a single file of tensors, written by safetensors or by `torch.save`."""
    with _open(path) as file:
        yield Tensors(dict.fromkeys(file.keys(), file), path, "the other tensors")


def _own(path: Path) -> Path:
    """Return the path of a file of a checkpoint; refuse a symbolic link that leaves the checkpoint."""
    try:
        return inside(path)
    except OSError as error:
        raise ConversionError(f"{path} cannot be used: it {reason(error)}.") from error


def _is_there(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _places(index: Path) -> dict[str, str]:
    """Return the file name of each tensor, from the index of a checkpoint in several files."""
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in places.values()
    ):
        raise ConversionError(
            f"{index} must have a `weight_map`, from names of tensors to names of files beside it."
        )
    return places


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, object_hook=_number)
    except FileNotFoundError:
        raise ConversionError(
            f"there is no {path}; a checkpoint is a folder with {CONFIG} and {WHOLE} (or {WHOLE + INDEX} and "
            "the files it lists)."
        ) from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} must hold a JSON object; got {type(content).__name__}.")
    return content


def _number(content: dict[str, Any]) -> Any:
    # transformers 5 writes infinity, which JSON lacks, as {"__float__": "Infinity"}
    return float(content["__float__"]) if content.keys() == {"__float__"} else content


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file of tensors: safetensors by its suffix, else a dict written by `torch.save`."""
    kind = "safetensors" if path.suffix == ".safetensors" else "torch.save"
    opened: contextlib.AbstractContextManager[Any]
    try:
        if kind == "safetensors":
            # checkpoints that linrec wrote have a checksum
            check_sealed(path)
            opened = safe_open(path, framework="pt")
        else:
            opened = contextlib.nullcontext(_unpickled(path))
    except FileNotFoundError:
        raise ConversionError(f"there is no {path}; download or copy the whole checkpoint.") from None
    except (OSError, SafetensorError, RuntimeError, ValueError, UnpicklingError, EOFError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{path} cannot be read as tensors of {kind}: {why}") from error
    with opened as file:
        yield file


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a `torch.save` file; `weights_only=True` runs no code."""
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError("it must hold a dict of tensors by name.")
    return found
