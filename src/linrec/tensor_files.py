"""Files of tensors with JSON metadata and a checksum, in the safetensors format; nothing is pickled.

The checksum is of the whole file, header included, with zeros in place of its own digits.
"""

import json
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linrec.files import ALGORITHM, CHECKSUM, WRONG, checksum, mapped, parse_json, replacing

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError)
"""The errors that `read_tensors` raises for a file that is missing, damaged or foreign."""

NAME = "linrec"
ZEROS = checksum().encode()
# safetensors writes its header without spaces, and escapes quotation marks within strings
MARK = f'"{CHECKSUM}":"{ALGORITHM}'.encode()
# the checksum of the tensors' bytes alone, in files of earlier versions
EARLIER = "crc32"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, name: str = NAME
) -> None:
    """Write a file of tensors; for an atomic write, call it within `linrec.files.replacing`.

    Args:
        path: the file; an existing file is overwritten.
        tensors: tensors by name, contiguous, on the CPU; no two may share memory.
        about: metadata to store, of types that JSON supports.
        name: name of the metadata in the file, which tells kinds of files apart.
    """
    write_sealed(path, tensors, {name: json.dumps(about)})


def write_sealed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with a checksum in its metadata; errors are those of `write_tensors`."""
    try:
        save_file(dict(tensors), path, metadata={**metadata, CHECKSUM: ZEROS.decode()})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with mapped(path) as content:
        place = _place(content)
        digits = checksum(content)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digits.encode())


def seal(path: Path) -> None:
    """Add a checksum to a safetensors file of another library; errors are those of `write_tensors`."""
    with safe_open(path, framework="pt") as file, replacing(path) as partial:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        write_sealed(partial, tensors, file.metadata() or {})


def read_tensors(path: Path, *, name: str = NAME) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `write_tensors` wrote; a file of an earlier version loads with a warning.

    Args:
        path: the file.
        name: name of the metadata.

    Returns:
        The tensors, on the CPU, and the metadata.
    """
    sealed = check_sealed(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = parse_json(metadata[name])
    if not sealed:
        # damage to the checksum's own name must not hide it
        if metadata.keys() - {name, EARLIER} or metadata.get(EARLIER, _crc(tensors)) != _crc(tensors):
            raise ValueError(WRONG)
        warnings.warn(
            f"{path} has no checksum of its whole content, because an earlier version of linrec wrote it.",
            stacklevel=2,
        )
    return tensors, about


def check_sealed(path: Path) -> bool:
    """Verify the checksum of a safetensors file; return whether it has one."""
    with mapped(path) as content:
        place = _place(content)
        if place < 0:
            return False
        end = place + len(ZEROS)
        if bytes(content[place:end]) != checksum(content[:place], ZEROS, content[end:]).encode():
            raise ValueError(WRONG)
    return True


def _place(content: memoryview) -> int:
    """Return where the checksum stands in the header of a safetensors file; -1 without a checksum."""
    length = int.from_bytes(content[:8], "little")
    # safetensors refuses longer headers
    found = bytes(content[: min(8 + length, 10**8)]).find(MARK)
    return found if found < 0 else found + len(MARK) - len(ALGORITHM)


def _crc(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        # flattened first: a scalar cannot be viewed as bytes
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
