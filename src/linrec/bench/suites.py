"""The suites: which tasks, how large, how long."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linrec.errors import unknown
from linrec.train import TrainConfig, get_recipe

__all__ = ["SUITES", "Entry", "get_suite"]


@dataclass(frozen=True)
class Entry:
    """A task of a suite, and how models are trained on it: a recipe, and what differs from it.

    Args:
        name: unique in a suite; a folder of its jobs is called so.
        recipe: one of `linrec.train.recipe_names()`.
        task: fields of the task that differ.
        model: fields of the model that differ; a job sets mixer and width.
        optim: fields of the optimiser that differ.
        loop: fields of the loop that differ.

    Example:
        >>> Entry("copy", "copying", task={"length": 20}).config().task.length
        20
    """

    name: str
    recipe: str
    task: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)

    def reading(self, path: Path) -> "Entry":
        """Return the entry with data from local files.

        Args:
            path: as the task's field of that name says.

        Raises:
            ValueError: the task has no files.

        Example:
            >>> (entry,) = (entry for entry in get_suite("lm") if entry.name == "wikitext103")
            >>> entry.config().task.dataset, entry.reading(Path("texts")).config().task.dataset
            ('Salesforce/wikitext', None)
        """
        fields = {field.name for field in dataclasses.fields(get_recipe(self.recipe).task)}  # type: ignore[arg-type]
        if "path" not in fields:
            raise ValueError(f"`path` is of tasks that have files; {self.name} draws its samples.")
        # one place alone
        elsewhere: dict[str, Any] = {name: None for name in ("dataset", "dataset_config") if name in fields}
        return dataclasses.replace(self, task={**self.task, **elsewhere, "path": path})

    def config(self) -> TrainConfig:
        """Return the configuration that jobs start from."""
        recipe = get_recipe(self.recipe)
        return TrainConfig(
            name=recipe.name,
            task=dataclasses.replace(recipe.task, **self.task),  # type: ignore[type-var]
            model=dataclasses.replace(recipe.model, **self.model),
            optim=dataclasses.replace(recipe.optim, **self.optim),
            loop=dataclasses.replace(recipe.loop, **self.loop),
        )


def _smoke(name: str, **task: Any) -> Entry:
    # enough to see that all of it runs, and that what should be learned begins to be
    return Entry(
        name,
        name,
        task={"n_train": 2000, "n_validation": 200, "n_test": 200, **task},
        model={"d_model": 32, "d_channel_mixing": 64},
        optim={"lr": 0.005, "warmup_steps": 20},
        loop={"steps": 150, "batch_size": 32, "eval_every": 25, "log_every": 25, "compile": "off"},
    )


def _as_it_is(*recipes: str) -> tuple[Entry, ...]:
    return tuple(Entry(recipe, recipe) for recipe in recipes)


def _longer(*recipes: str) -> tuple[Entry, ...]:
    # trained up to length 40, as in the survey of the Chomsky hierarchy, and probed far beyond
    lengths = (80, 160, 320)
    return tuple(Entry(recipe, recipe, task={"test_lengths": lengths}) for recipe in recipes)


def _shakespeare(recipe: str) -> Entry:
    # the same nine tenths train; half of what validates there is for testing
    return Entry(recipe, recipe, task={"validation_share": 0.05, "test_share": 0.05})


SUITES: Mapping[str, tuple[Entry, ...]] = {
    "smoke": (
        _smoke("copying", length=5, n_copied=4, test_lengths=(5, 10, 20)),
        _smoke("selective-copying", length=16, n_copied=4, n_symbols=8),
        _smoke("adding", length=20),
    ),
    "recall": (
        *_as_it_is("associative-recall", "mqar", "phonebook", "selective-copying"),
        # from few pairs, which attention learns first, to more than small states can hold
        Entry(
            "mqar-mixed",
            "mqar",
            task={
                "mix": ((64, 4, 1), (64, 8, 1), (64, 16, 1), (128, 32, 1)),
                **{"length": 128, "n_pairs": 32, "n_tokens": 256},
            },
            loop={"steps": 4000, "batch_size": 128},
        ),
        Entry("induction-heads", "induction-heads", task={"test_lengths": (64, 256, 1024, 4096)}),
        *_longer("reversing"),
    ),
    "state-tracking": (
        *_longer("parity", "even-pairs", "cycle-navigation", "modular-arithmetic", "word-problem"),
        Entry("modulo-3", "parity", task={"modulus": 3, "test_lengths": (80, 160, 320)}),
        *_as_it_is("flip-flop"),
    ),
    "memory": (
        *_as_it_is("copying", "adding"),
        # the batches of Martin and Cundy, and not quite twice their updates
        Entry("lstm-task-2b", "lstm-task-2b", optim={"lr": 0.003}, loop={"steps": 1000, "batch_size": 8}),
        Entry("memory-horizon", "memory-horizon-tuned", loop={"steps": 5000}),
    ),
    "lra": _as_it_is(
        *("lra-listops", "lra-text", "lra-retrieval", "lra-image", "lra-pathfinder", "lra-path-x")
    ),
    "lm": (
        _shakespeare("shakespeare-char-cpu"),
        _shakespeare("shakespeare-char"),
        Entry("wikitext103", "wikitext103-hgrn"),
    ),
    "signals": (
        *_as_it_is("mackey-glass", "pendulum", "ett", "bouncing-digits", "speech-commands"),
        Entry("eigenworms", "uea"),
    ),
    "mad": _as_it_is(
        *("compression", "in-context-recall", "noisy-recall", "fuzzy-recall", "memorization"),
        "selective-copying",
    ),
}


def get_suite(name: str) -> tuple[Entry, ...]:
    """Return the entries of a suite; "all" has those of every other.

    Args:
        name: a key of `SUITES`, or "all".

    Raises:
        ValueError: there is no such suite; the message gives the nearest one.

    Example:
        >>> [entry.name for entry in get_suite("smoke")]
        ['copying', 'selective-copying', 'adding']
    """
    if name == "all":
        return tuple({entry.name: entry for suite in SUITES.values() for entry in suite}.values())
    if name not in SUITES:
        raise unknown("suite", name, [*SUITES, "all"])
    return SUITES[name]
