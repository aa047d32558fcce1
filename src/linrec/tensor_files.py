"""Files of tensors with JSON metadata and a checksum, in the safetensors format; nothing is pickled."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linrec.files import parse_json

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError)
"""The errors that `read_tensors` raises for a file that is missing, damaged or foreign."""
UNWRITABLE = (OSError, SafetensorError)
"""The errors that `write_tensors` raises, for example when the disk is full."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a file of tensors; for an atomic write, call it within `linrec.files.replacing`.

    Args:
        path: the file; an existing file is overwritten.
        tensors: tensors by name, contiguous, on the CPU; no two may share memory.
        about: metadata to store, of types that JSON supports.

    Raises:
        OSError, SafetensorError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "numbers.safetensors"
        >>> write_tensors(path, {"x": torch.arange(3)}, {"name": "three"})
        >>> read_tensors(path)
        ({'x': tensor([0, 1, 2])}, {'name': 'three'})
    """
    metadata = {"linrec": json.dumps(about), "crc32": _checksum(tensors)}
    save_file(dict(tensors), path, metadata=metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `write_tensors` wrote.

    Args:
        path: the file.

    Returns:
        The tensors, on the CPU, and the metadata.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError, SafetensorError, ValueError, KeyError: the file is damaged, or another program wrote it.
    """
    # safetensors reports every file that it cannot open as missing
    path.open("rb").close()
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = parse_json(metadata["linrec"])
    if metadata["crc32"] != _checksum(tensors):
        raise ValueError("its checksum is wrong")
    return tensors, about


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        # flattened first: a scalar cannot be viewed as bytes
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
