"""A file cache for samples that are expensive to generate, indexed by a hash of everything they depend on."""

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from linrec.files import reason, replacing
from linrec.lab.corpora import default_cache
from linrec.tensor_files import UNREADABLE, read_tensors, write_tensors

FOLDER = "tasks"


def kept(
    name: str,
    about: Mapping[str, Any],
    draw: Callable[[], dict[str, Tensor]],
    *,
    cache: Path | None = None,
) -> dict[str, Tensor]:
    """Return tensors from the cache, or generate and cache them.

    Files are written atomically. A file that is damaged, or whose content does not match its name, is
    generated again, with a warning. If the cache cannot be written, for example because the disk is full, the
    tensors are returned with a single warning.

    Args:
        name: prefix of the file's name.
        about: everything that the tensors depend on, including the generator's version, as JSON values.
        draw: generates the tensors, contiguous and on the CPU.
        cache: the cache folder; None is `linrec/tasks` in the user's cache folder.

    Example:
        >>> import tempfile, torch
        >>> folder = Path(tempfile.mkdtemp())
        >>> for _ in range(2):
        ...     kept("dice", {"version": 1}, lambda: print("drawn") or {"x": torch.ones(2)}, cache=folder)
        drawn
        {'x': tensor([1., 1.])}
        {'x': tensor([1., 1.])}
    """
    known = json.dumps(about, sort_keys=True)
    folder = default_cache() / FOLDER if cache is None else cache.expanduser()
    path = folder / f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:24]}.safetensors"
    try:
        tensors, stored = read_tensors(path)
        if stored != json.loads(known):
            raise ValueError("its content does not match its name")
        return tensors
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UNREADABLE as error:
        warnings.warn(f"{path} is not usable ({reason(error)}); it is generated again.", stacklevel=2)
    tensors = draw()
    _keep(path, tensors, about)
    return tensors


def _keep(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # several processes may write the same file
        with replacing(path, shared=True) as partial:
            write_tensors(partial, tensors, about)
    except OSError as error:
        _warn_once(path.parent, reason(error))


@functools.cache
def _warn_once(folder: Path, why: str) -> None:
    warnings.warn(
        f"samples cannot be cached in {folder} ({why}); they are generated again each time. Make room, or "
        "pass another folder with --task.cache or --data.cache.",
        RuntimeWarning,
        stacklevel=4,
    )
