"""Benchmark tasks, a file for each task; the file's name is the task's name."""

import importlib
import pkgutil
from typing import Any

from linrec.errors import unknown
from linrec.lab.tasks.base import (
    NO_TARGET,
    Batch,
    ObjectiveName,
    PairedTask,
    ProbedTask,
    ResizableTask,
    ScoredTask,
    Source,
    Split,
    SplitName,
    Task,
    has_target,
    judged_by,
)
from linrec.lab.tasks.images import SequentialSplit
from linrec.lab.tasks.labelled import LabelledTask, LabelledTokens
from linrec.lab.tasks.language_modeling import LanguageModeling, TokenSplit
from linrec.lab.tasks.memory_horizon import MemoryHorizon
from linrec.lab.tasks.regression import RegressionTask
from linrec.lab.tasks.sequential_images import SequentialImages
from linrec.lab.tasks.synthetic import DrawnTask, SyntheticTask

__all__ = [
    "NO_TARGET",
    "Batch",
    "DrawnTask",
    "LabelledTask",
    "LabelledTokens",
    "LanguageModeling",
    "MemoryHorizon",
    "ObjectiveName",
    "PairedTask",
    "ProbedTask",
    "RegressionTask",
    "ResizableTask",
    "ScoredTask",
    "SequentialImages",
    "SequentialSplit",
    "Source",
    "Split",
    "SplitName",
    "SyntheticTask",
    "Task",
    "TokenSplit",
    "get",
    "has_target",
    "judged_by",
    "names",
]


SHARED = (
    "base",
    "byte_texts",
    "cache",
    "cifar_files",
    "classification",
    "distinct",
    "drawing",
    "files",
    "images",
    "labelled",
    "labelled_series",
    "listops_kernels",
    "pathfinder_kernels",
    "recall",
    "regression",
    "state_tracking",
    "synthetic",
    "ts_archive",
    "ts_files",
)
"""Modules that are not tasks: shared code and compiled kernels."""


def names() -> list[str]:
    """Return the names of all tasks, sorted.

    Example:
        >>> "memory_horizon" in names()
        True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED)


def get(name: str) -> type[Any]:
    """Return the class of a task by its name; hyphens and underscores are equivalent.

    Args:
        name: a name from `names()`, such as "memory-horizon".

    Returns:
        The task's dataclass, whose fields are the task's configuration; read its data with `split`.

    Raises:
        ValueError: the task does not exist; the message gives the nearest match.

    Example:
        >>> get("memory-horizon")().vocab_size
        6
    """
    module_name = name.replace("-", "_")
    if module_name not in names():
        raise unknown("task", name, names())
    module = importlib.import_module(f"{__name__}.{module_name}")
    # by convention, the first name that a task's module exports is the task's class
    task: type[Any] = getattr(module, module.__all__[0])
    return task
