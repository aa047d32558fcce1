"""The base class of tasks, which checks their fields."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from linrec.errors import unknown
from linrec.lab.tasks.base import SPLIT_NAMES, SplitName
from linrec.rules import at_least, choice

AnyTask = TypeVar("AnyTask", bound="CheckedTask")


class CheckedTask:
    """Base class of the dataclasses of tasks; a subclass defines `_splits` or `split`.

    A field that is annotated with a `Literal` of names must have one of them. A field that is annotated with
    `Path | None` may be given as a string, as a configuration that is loaded from JSON has it.
    """

    least: ClassVar[Mapping[str, int]] = {}
    """The minimum of each field that has one, beside those of base classes."""

    def __post_init__(self) -> None:
        hints: dict[str, Any] = {}
        # a task of a user may have annotations for type checkers alone
        with suppress(NameError):
            hints = get_type_hints(type(self))
        for name in (field.name for field in dataclasses.fields(self)):  # type: ignore[arg-type]
            value, hint = getattr(self, name), hints.get(name)
            if hint == Path | None and value is not None:
                object.__setattr__(self, name, Path(value).expanduser())
            elif get_origin(hint) is Literal and isinstance(get_args(hint)[0], str):
                choice(get_args(hint), **{name: value})
        least: dict[str, int] = {}
        for kind in reversed(type(self).__mro__):
            least |= vars(kind).get("least", {})
        for name, bound in least.items():
            optional = type(None) in get_args(hints.get(name))
            at_least(bound, or_none=optional, **{name: getattr(self, name)})
        self.check()

    def check(self) -> None:
        """Raise ValueError if fields do not fit each other; by default, they do."""

    def prepared(self: AnyTask) -> AnyTask:
        """Return the task itself, which does not depend on files."""
        return self

    def passing_on(self: AnyTask, *cached: str, **fields: Any) -> AnyTask:
        """Return the task with other fields and the same cached properties: files are not read again."""
        task: AnyTask = dataclasses.replace(self, **fields)  # type: ignore[type-var]
        task.__dict__.update({name: getattr(self, name) for name in cached})
        return task

    def split(self, name: SplitName) -> Any:
        """Return the sequences of a split.

        Args:
            name: "train", "validation" or "test".

        Raises:
            ValueError: the split does not exist, or a generated task has too few distinct samples.
            DataError: the files are missing, damaged, or of the wrong kind.
        """
        if name not in SPLIT_NAMES:
            raise unknown("split", name, SPLIT_NAMES)
        return self._splits[name]

    @cached_property
    def _splits(self) -> Mapping[SplitName, Any]:
        raise NotImplementedError(f"{type(self).__name__} must define `split` or `_splits`.")
