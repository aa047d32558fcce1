"""Benchmark tasks, in files by family; `TASKS` is the table of their names."""

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from linrec.discovery import imported
from linrec.errors import ConfigError, unknown
from linrec.lab.tasks.base import (
    NO_TARGET,
    Batch,
    GeneratedTask,
    ImagesTask,
    ObjectiveName,
    OrderedSource,
    PairedTask,
    ProbedTask,
    ResizableTask,
    ScoredTask,
    Source,
    SourcedTask,
    Split,
    SplitName,
    Task,
    TokenizedTask,
    WeightedTask,
    has_target,
    judged_by,
)
from linrec.lab.tasks.images import SequentialImages, SequentialSplit
from linrec.lab.tasks.labelled import LabelledTask, LabelledTokens
from linrec.lab.tasks.language_modeling import LanguageModeling, TokenSplit
from linrec.lab.tasks.memory_horizon import MemoryHorizon
from linrec.lab.tasks.synthetic import DrawnTask, RegressionTask, SyntheticTask

__all__ = [
    "NO_TARGET",
    "Batch",
    "DrawnTask",
    "GeneratedTask",
    "ImagesTask",
    "LabelledTask",
    "LabelledTokens",
    "LanguageModeling",
    "MemoryHorizon",
    "ObjectiveName",
    "OrderedSource",
    "PairedTask",
    "ProbedTask",
    "RegressionTask",
    "ResizableTask",
    "ScoredTask",
    "SequentialImages",
    "SequentialSplit",
    "Source",
    "SourcedTask",
    "Split",
    "SplitName",
    "SyntheticTask",
    "Task",
    "TokenSplit",
    "TokenizedTask",
    "WeightedTask",
    "get",
    "has_target",
    "judged_by",
    "names",
]


TASKS: Mapping[str, str] = {
    "aan": "texts:AAN",
    "adding": "dynamics:Adding",
    "associative_recall": "recall:AssociativeRecall",
    "babyai": "babyai:BabyAI",
    "bouncing_digits": "bouncing_digits:BouncingDigits",
    "compression": "copying:Compression",
    "copying": "copying:Copying",
    "counter_language": "languages:CounterLanguage",
    "cycle_navigation": "automata:CycleNavigation",
    "dyck": "languages:Dyck",
    "ett": "ett:Ett",
    "even_pairs": "automata:EvenPairs",
    "event_xor": "automata:EventXor",
    "fact_retrieval": "needles:FactRetrieval",
    "fitzhugh_nagumo": "dynamics:FitzHughNagumo",
    "flip_flop": "lookup:FlipFlop",
    "forecast": "ett:Forecast",
    "fuzzy_recall": "recall:FuzzyRecall",
    "har2": "har2:Har2",
    "image_generation": "pixels:ImageGeneration",
    "image_folders": "photos:ImageFolders",
    "imdb": "texts:IMDb",
    "in_context_recall": "recall:InContextRecall",
    "induction_heads": "recall:InductionHeads",
    "irregular_sines": "dynamics:IrregularSines",
    "language_modeling": "language_modeling:LanguageModeling",
    "listops": "arena:ListOps",
    "lstm_task_2b": "copying:LstmTask2b",
    "mackey_glass": "dynamics:MackeyGlass",
    "memorization": "copying:Memorization",
    "memory_horizon": "memory_horizon:MemoryHorizon",
    "modular_arithmetic": "stacks:ModularArithmetic",
    "mqar": "lookup:MQAR",
    "noise_padded_cifar": "cifar:NoisePaddedCIFAR",
    "noisy_recall": "recall:NoisyRecall",
    "parity": "automata:Parity",
    "passkey": "needles:Passkey",
    "pathfinder": "arena:Pathfinder",
    "pendulum": "dynamics:Pendulum",
    "phonebook": "lookup:Phonebook",
    "recordings": "recordings:Recordings",
    "reversing": "stacks:Reversing",
    "sc09": "signals:Sc09",
    "segment_copy": "copying:SegmentCopy",
    "selective_copying": "copying:SelectiveCopying",
    "sepsis": "sepsis:Sepsis",
    "sequential_cifar": "cifar:SequentialCIFAR",
    "sequential_images": "images:SequentialImages",
    "speech_commands": "signals:SpeechCommands",
    "string_copy": "languages:StringCopy",
    "translation": "translation:Translation",
    "tser": "archives:Tser",
    "uea": "archives:Uea",
    "word_problem": "automata:WordProblem",
}
"""The module and the class of every task, by the name that users type."""


def names() -> list[str]:
    """Return the names of all tasks, sorted.

    Example:
        >>> "memory_horizon" in names()
        True
    """
    return sorted(TASKS)


def get(name: str) -> type[Any]:
    """Return the class of a task by its name; hyphens and underscores are equivalent.

    Args:
        name: a name from `names()`, such as "memory-horizon"; or the import path of a task of your own, as in
            "my_package.my_module:MyTask", a dataclass with the interface of `Task`. The import runs the
            module's code.

    Returns:
        The task's dataclass, whose fields are the task's configuration; read its data with `split`.

    Raises:
        ValueError: the task does not exist; the message gives the nearest match.

    Example:
        >>> get("memory-horizon")().vocab_size
        6
    """
    if ":" in name:
        kind = "a task, a dataclass with the interface of `linrec.lab.tasks.Task`"
        return imported(name, "task", kind, _is_task)
    key = name.replace("-", "_")
    if key not in TASKS:
        raise unknown("task", name, names())
    module, _, task = TASKS[key].partition(":")
    found: type[Any] = getattr(importlib.import_module(f"{__name__}.{module}"), task)
    return found


def name_of(task: type[Any]) -> str:
    """Return the name by which `get` finds a task: a name from `names()`, or an import path."""
    module, name = task.__module__, task.__qualname__
    inside = f"{module.removeprefix(f'{__name__}.')}:{name}"
    known = next((key for key, place in TASKS.items() if place == inside), None)
    if known is not None:
        return known
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not task:
        raise ConfigError(
            f"`task` must be a task of linrec, {', '.join(names())}; got {task.__name__}. Or define it at "
            "the top of a module that Python can import, because a run folder stores its import path."
        )
    return f"{module}:{name}"


def _is_task(value: Any) -> bool:
    if not (isinstance(value, type) and dataclasses.is_dataclass(value)):
        return False
    # of the interface, what no task has as a field
    return {"section", "per_sequence", "objective", "prepared", "split"} <= {*dir(value)}
