"""Tasks whose sequences are in files: where the files are, and the splits that are read from them."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from linrec.errors import unknown
from linrec.tasks.base import SPLIT_NAMES, Source, SplitName
from linrec.text import DataError

OfFiles = TypeVar("OfFiles", bound="FileTask")


@dataclass(frozen=True, kw_only=True)
class FileTask(abc.ABC):
    """Base class of tasks whose sequences are in files; a subclass says how they are read.

    Args:
        path: where the files are.
    """

    path: Path | None = None
    section: ClassVar[str] = "data"
    wanted: ClassVar[str]
    """A sentence that says which files there must be, where to get them, and how to pass them."""

    def __post_init__(self) -> None:
        # a configuration that was stored as JSON has strings
        object.__setattr__(self, "path", None if self.path is None else Path(self.path).expanduser())

    @abc.abstractmethod
    def read(self) -> Mapping[SplitName, Source]:
        """Read the files, and return all splits."""

    def prepared(self: OfFiles) -> OfFiles:
        """Return the task itself, once its files are read.

        Raises:
            DataError: the files are missing, damaged, or something else than they should be.
        """
        self.split("train")
        return self

    def split(self, name: SplitName) -> Any:
        """Return the sequences of one split.

        Args:
            name: "train", "validation" or "test".

        Raises:
            ValueError: there is no such split.
            DataError: what `prepared` raises.
        """
        if name not in SPLIT_NAMES:
            raise unknown("split", name, SPLIT_NAMES)
        return self._splits[name]

    def existing(self) -> Path:
        """Return the path, which leads to something.

        Raises:
            DataError: it does not, or there is none.
        """
        if self.path is None:
            raise DataError(f"`path` must say where the files are; got none. {self.wanted}")
        if not self.path.exists():
            raise DataError(f"there is nothing at {self.path}. {self.wanted}")
        return self.path

    def folder(self) -> Path:
        """Return the path, which is a folder.

        Raises:
            DataError: it is none, or nothing is there.
        """
        path = self.existing()
        if not path.is_dir():
            raise DataError(f"{path} is no folder. {self.wanted}")
        return path

    @cached_property
    def _splits(self) -> Mapping[SplitName, Source]:
        return self.read()
