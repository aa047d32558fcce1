"""The suites: their tasks or streams, with the sizes of data and models and the number of steps."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linrec.errors import unknown
from linrec.lab.streams.learn import LearnConfig
from linrec.lab.train import TrainConfig, get_recipe

__all__ = ["LEARNERS", "STREAMS", "SUITES", "Entry", "StreamEntry", "get_suite"]


@dataclass(frozen=True)
class Entry:
    """A task of a suite and its training: a recipe, and changes to the recipe's fields.

    Args:
        name: unique name in the suite; also the name of the folder of its jobs.
        recipe: a name from `linrec.lab.train.recipe_names()`.
        task: changed fields of the task.
        model: changed fields of the model; a job sets mixer and width.
        optim: changed fields of the optimiser.
        loop: changed fields of the training loop.

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
        """Return a copy of the entry that reads its data from local files.

        Args:
            path: value of the task's field `path`.

        Raises:
            ValueError: the task has no files.

        Example:
            >>> (entry,) = (entry for entry in get_suite("lm") if entry.name == "wikitext103")
            >>> entry.config().task.dataset, entry.reading(Path("texts")).config().task.dataset
            ('Salesforce/wikitext', None)
        """
        fields = {field.name for field in dataclasses.fields(get_recipe(self.recipe).task)}  # type: ignore[arg-type]
        if "path" not in fields:
            raise ValueError(f"`path` is for tasks that read files; {self.name} generates its samples.")
        # a task takes its data from `path` or from `dataset`, not from both
        elsewhere: dict[str, Any] = {name: None for name in ("dataset", "dataset_config") if name in fields}
        return dataclasses.replace(self, task={**self.task, **elsewhere, "path": path})

    def config(self) -> TrainConfig:
        """Return the training configuration of the entry, before a job sets mixer, width and seed."""
        recipe = get_recipe(self.recipe)
        return TrainConfig(
            name=recipe.name,
            task=dataclasses.replace(recipe.task, **self.task),  # type: ignore[type-var]
            model=dataclasses.replace(recipe.model, **self.model),
            optim=dataclasses.replace(recipe.optim, **self.optim),
            loop=dataclasses.replace(recipe.loop, **self.loop),
        )


def _smoke(name: str, **task: Any) -> Entry:
    # long enough to see that everything runs and that learning has started
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
    # trained up to length 40, as in the survey of the Chomsky hierarchy, and tested on much longer strings
    return tuple(_probed(recipe, recipe, 80, 160, 320) for recipe in recipes)


def _probed(name: str, recipe: str, *test_lengths: int, **task: Any) -> Entry:
    return Entry(name, recipe, task={"test_lengths": test_lengths, **task})


def _shakespeare(recipe: str) -> Entry:
    # the same 90 % as in the recipe are for training; half of the recipe's validation text is for testing
    return Entry(recipe, recipe, task={"validation_share": 0.05, "test_share": 0.05})


SUITES: Mapping[str, tuple[Entry, ...]] = {
    "smoke": (
        _smoke("copying", length=5, n_copied=4, test_lengths=(5, 10, 20)),
        _smoke("selective-copying", length=16, n_copied=4, n_symbols=8),
        _smoke("adding", length=20),
    ),
    "recall": (
        *_as_it_is("associative-recall", "mqar", "phonebook", "selective-copying"),
        # from few pairs, which attention learns first, to more pairs than small states can hold
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
    "languages": (
        _probed("string-copy", "string-copy", 100, 200, 400),
        _probed("dyck", "dyck", 100, 200),
        _probed("dyck-depth-5", "dyck", 100, 200, n_kinds=8, depth=5, ask="closings"),
        _probed("shuffled-brackets", "dyck", 100, 200, shuffled=True),
        _probed("equal-counts-2", "counter-language", 100, 200),
        _probed("equal-counts-3", "counter-language", 100, 200, n_letters=3),
    ),
    "needles": (
        _probed("passkey", "passkey", 1024, 4096, filler="repeated"),
        _probed("passkey-of-8", "passkey", 1024, 4096, n_keys=8),
        _probed("facts-memorized", "fact-retrieval", 1024, 4096, first=True),
        _probed("facts-detected", "fact-retrieval", 1024, 4096),
        _probed("facts-related", "fact-retrieval", 1024, 4096, facts="directions", n_facts=2),
    ),
    "memory": (
        *_as_it_is("copying", "adding"),
        # the batch size of Martin and Cundy, and not quite twice their updates
        Entry("lstm-task-2b", "lstm-task-2b", optim={"lr": 0.003}, loop={"steps": 1000, "batch_size": 8}),
        Entry("memory-horizon", "memory-horizon-tuned", loop={"steps": 5000}),
    ),
    "segments": (
        # three segments of 24 steps: symbols, noise, answers
        *(
            Entry(f"segment-{kind}", "segment-copy", task={"kind": kind})
            for kind in ("copy", "reverse", "associative")
        ),
        # more segments of noise
        *(Entry(f"segment-copy-{n}", "segment-copy", task={"length": 24 * n}) for n in (5, 9)),
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
    "dynamics": (
        *_as_it_is("fitzhugh-nagumo", "irregular-sines"),
        # an eighth of the updates of the papers, and a tenth for Penn Treebank
        Entry("event-xor", "event-xor", loop={"steps": 20_000}),
        Entry("event-xor-dense", "event-xor", task={"dense": True}, loop={"steps": 20_000}),
        # for mixers that take irregular steps
        Entry("event-xor-dt", "event-xor", task={"with_dt": True}, loop={"steps": 20_000}),
        # the layer, rates, batches and updates of expRNN, which has neither norms nor weight decay
        Entry(
            "copying-1000",
            "copying",
            task={"length": 1000},
            model={"n_layers": 1, "d_model": 190, "channel_mixing": "none", "norm": "none"},
            optim={"lr": 0.0002, "transition_lr": 0.00002, "weight_decay": 0.0},
            loop={"steps": 4000, "batch_size": 128},
        ),
        # the layer and batches of LEM and coRNN, which have neither norms nor weight decay; epochs are short,
        # because a sequence takes 8 bytes per step
        *(
            Entry(
                f"adding-{length}",
                "adding",
                task={"length": length, "n_train": 1000},
                model={"n_layers": 1, "channel_mixing": "none", "norm": "none"},
                optim={"weight_decay": 0.0},
                loop={"steps": 1200, "batch_size": 50},
            )
            for length in (2000, 5000)
        ),
        # fewer layers and epochs than in the recipe, because some cells run step by step
        Entry(
            "permuted-fashion-mnist",
            "sequential-fashion-mnist",
            task={
                "permuted": True,
                # noise as in the tests of NoisyRNN
                "test_noise": (0.1, 0.2, 0.3),
                "test_salt_and_pepper": (0.03, 0.05, 0.1, 0.2),
            },
            model={"n_layers": 2},
            loop={"epochs": 6, "batch_size": 128},
        ),
        *_as_it_is("har2"),
        Entry("bidmc-hr", "bidmc"),
        Entry("bidmc-rr", "bidmc"),
        Entry("penn-treebank-char", "penn-treebank-char", loop={"steps": 20_000}),
    ),
    "mad": _as_it_is(
        *("compression", "in-context-recall", "noisy-recall", "fuzzy-recall", "memorization"),
        "selective-copying",
    ),
}


LEARNERS: Mapping[str, Mapping[str, Any]] = {
    "tbptt(window=1)": {"learner": "tbptt", "learner_args": {"window": 1}},
    "tbptt(window=10)": {"learner": "tbptt", "learner_args": {"window": 10}},
    # a chunk holds at least a window
    "tbptt(window=50)": {"learner": "tbptt", "learner_args": {"window": 50}, "chunk": 50},
    "rtrl": {"learner": "rtrl"},
    "frozen_rls": {"learner": "frozen_rls"},
    # about the memory of rtrl
    "frozen_rls(d_model=128)": {"learner": "frozen_rls", "d_model": 128},
}
"""The learners that the suite compares, by label: fields of `LearnConfig`."""

COMMON: Mapping[str, Any] = {
    "mixer": "lru",
    "mixer_args": {"r_min": 0.9, "r_max": 0.999},
    "chunk": 10,
    "rows": 8,
    "window": 250,
    "checkpoint_every": 2000,
}


@dataclass(frozen=True)
class StreamEntry:
    """A stream of the suite.

    Args:
        name: name of the stream; also the name of the folder of its jobs.
        stream_args: arguments of the stream.
        steps: steps that every learner learns from.

    Example:
        >>> StreamEntry("sines").config("tbptt(window=10)", seed=1).learner
        'tbptt'
    """

    name: str
    stream_args: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 6000

    def config(self, learner: str, seed: int) -> LearnConfig:
        """Return the configuration of `linrec learn` for a learner, a key of `LEARNERS`."""
        given = {"stream": self.name, "stream_args": dict(self.stream_args), "seed": seed}
        return LearnConfig(**{**COMMON, **given, **LEARNERS[learner]})


STREAMS = (
    # three regimes each, where the stream has regimes
    StreamEntry("add-memory", {"every": 2000}),
    StreamEntry("delay-copy", {"every": 2000, "delays": (10, 20)}),
    StreamEntry("text", {"every": 2000}),
    StreamEntry("sines", {"every": 2000}),
    StreamEntry("mackey-glass", {"every": 2000}),
    StreamEntry("trace-patterning"),
    # 1500 frames of each set
    StreamEntry("bouncing-digits", {"films": 75}),
)


def get_suite(name: str) -> tuple[Entry, ...]:
    """Return the entries of a suite; "all" has the entries of all suites.

    The entries of suite "streams" are `STREAMS`, because they do not train on tasks.

    Args:
        name: a key of `SUITES`, or "all".

    Raises:
        ValueError: the suite does not exist; the message gives the nearest name.

    Example:
        >>> [entry.name for entry in get_suite("smoke")]
        ['copying', 'selective-copying', 'adding']
    """
    if name == "all":
        return tuple({entry.name: entry for suite in SUITES.values() for entry in suite}.values())
    if name not in SUITES:
        raise unknown("suite", name, [*SUITES, "streams", "all"])
    return SUITES[name]
