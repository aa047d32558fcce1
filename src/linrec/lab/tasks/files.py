"""Base class of tasks whose data are read from files."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from linrec.errors import unknown
from linrec.lab.tasks.base import SPLIT_NAMES, Source, SplitName
from linrec.text import DataError

OfFiles = TypeVar("OfFiles", bound="FileTask")


@dataclass(frozen=True, kw_only=True)
class FileTask(abc.ABC):
    """Base class of tasks whose data are read from files; a subclass defines `read`.

    Args:
        path: path of the files.
    """

    path: Path | None = None
    section: ClassVar[str] = "data"
    wanted: ClassVar[str]
    """Sentences for error messages: the required files, their source, and the option to pass them."""

    def __post_init__(self) -> None:
        # a configuration that is loaded from JSON has a string
        object.__setattr__(self, "path", None if self.path is None else Path(self.path).expanduser())

    @abc.abstractmethod
    def read(self) -> Mapping[SplitName, Source]:
        """Read the files, and return all splits."""

    def prepared(self: OfFiles) -> OfFiles:
        """Read the files, and return the task itself.

        Raises:
            DataError: the files are missing, damaged, or of the wrong kind.
        """
        self.split("train")
        return self

    def split(self, name: SplitName) -> Any:
        """Return the sequences of a split.

        Args:
            name: "train", "validation" or "test".

        Raises:
            ValueError: the split does not exist.
            DataError: the files are missing, damaged, or of the wrong kind.
        """
        if name not in SPLIT_NAMES:
            raise unknown("split", name, SPLIT_NAMES)
        return self._splits[name]

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
