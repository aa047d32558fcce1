"""Base class of tasks whose data are read from files, and a cache of samples that are slow to make."""

import abc
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from linrec.files import reason, replacing
from linrec.lab.corpora import default_cache
from linrec.lab.tasks.base import Source, SplitName
from linrec.lab.tasks.fields import CheckedTask
from linrec.tensor_files import UNREADABLE, read_tensors, write_tensors
from linrec.text import DataError

OfFiles = TypeVar("OfFiles", bound="FileTask")


@dataclass(frozen=True, kw_only=True)
class FileTask(CheckedTask, abc.ABC):
    """Base class of tasks whose data are read from files; a subclass defines `read`.

    Args:
        path: path of the files.

    Raises:
        ValueError: a field is out of range.
        DataError: the files are missing, damaged, or of the wrong kind, when they are read.
    """

    path: Path | None = None
    section: ClassVar[str] = "data"
    content_in: ClassVar[tuple[str, ...]] = ()
    """Cached properties that `sizes` reads."""
    wanted: ClassVar[str]
    """Sentences for error messages: the required files, their source, and the option to pass them."""

    @abc.abstractmethod
    def read(self) -> Mapping[SplitName, Source]:
        """Read the files, and return all splits."""

    def sizes(self) -> Mapping[str, int]:
        """Read the files, and return the fields whose values are in the files; by default, none."""
        return {}

    def prepared(self: OfFiles) -> OfFiles:
        """Read the files, and return the task with all fields set whose values are in the files.

        Raises:
            DataError: the files are missing, damaged, or of the wrong kind.
            ValueError: a field has another value than the files.
        """
        sizes = self.sizes()
        for name, number in sizes.items():
            if getattr(self, name) not in (None, number):
                raise ValueError(
                    f"`{name}` must be {number}, as in {self.path}; got {getattr(self, name)}. Leave it out."
                )
        self.split("train")
        return self.passing_on("_splits", *self.content_in, **sizes) if sizes else self

    def existing(self) -> Path:
        """Return the path after checking that it exists.

        Raises:
            DataError: `path` is None or does not exist.
        """
        if self.path is None:
            raise DataError(f"`path` must be the path of the files; got None. {self.wanted}")
        if not self.path.exists():
            raise DataError(f"{self.path} does not exist. {self.wanted}")
        return self.path

    def folder(self) -> Path:
        """Return the path after checking that it is a folder.

        Raises:
            DataError: `path` is None, does not exist, or is not a folder.
        """
        path = self.existing()
        if not path.is_dir():
            raise DataError(f"{path} is not a folder. {self.wanted}")
        return path

    @cached_property
    def _splits(self) -> Mapping[SplitName, Source]:
        return self.read()


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
    """
    known = json.dumps(about, sort_keys=True)
    folder = default_cache() / "tasks" if cache is None else cache.expanduser()
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
