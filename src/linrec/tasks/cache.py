"""What takes long to draw is kept in files: later calls find it by a hash of all that it depends on."""

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from linrec.files import reason, replacing
from linrec.tensor_files import UNREADABLE, UNWRITABLE, read_tensors, write_tensors
from linrec.text import default_cache

FOLDER = "tasks"


def kept(
    name: str,
    about: Mapping[str, Any],
    draw: Callable[[], dict[str, Tensor]],
    *,
    cache: Path | None = None,
) -> dict[str, Tensor]:
    """Return tensors that were drawn before, or draw them and keep them.

    Files are whole or not there. One that is damaged, or has another content than its name says, is made
    again, with a warning. Where nothing can be written, as on a full disk, a warning says so once, and the
    tensors are returned all the same.

    Args:
        name: what the file's name begins with.
        about: everything that the tensors depend on, the version of what draws them included, as JSON holds
            it.
        draw: makes the tensors: contiguous, on the CPU.
        cache: the folder; None is `linrec/tasks` in the user's folder for caches.

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
            raise ValueError("it holds something else than its name says")
        return tensors
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UNREADABLE as error:
        warnings.warn(f"{path} is not usable ({reason(error)}); it is drawn again.", stacklevel=2)
    tensors = draw()
    _keep(path, tensors, about)
    return tensors


def _keep(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # several processes may draw the same
        with replacing(path, shared=True) as partial:
            write_tensors(partial, tensors, about)
    except UNWRITABLE as error:
        _warn_once(path.parent, reason(error))


@functools.cache
def _warn_once(folder: Path, why: str) -> None:
    warnings.warn(
        f"what was drawn cannot be kept in {folder} ({why}); it will be drawn again each time. Make room, or "
        "name another folder: --task.cache, or --data.cache.",
        RuntimeWarning,
        stacklevel=4,
    )
