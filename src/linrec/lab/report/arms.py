"""Arms: groups of runs with the same configuration, which differ in nothing but their seed."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linrec.lab.report.markup import without_folders
from linrec.lab.train import Run, TrainConfig
from linrec.lab.train.config import config_to_dict, flattened
from linrec.models.config import spelled

# settings of logging and hardware, which do not change the training
IGNORED = frozenset(
    f"loop.{name}" for name in ("device", "compile", "log_every", "eval_every", "checkpoint_every")
)


@dataclass(frozen=True)
class Arm:
    """Runs of one configuration, which differ only in their seed.

    Attributes:
        label: the settings that differ from the other arms, in as few words as possible.
        slug: the label as a part of a file's name.
        settings: value of every configuration field in which any two arms differ, by dotted name.
        runs: the runs, in the order in which they were given.
    """

    label: str
    slug: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def results(self) -> list[dict[str, Any]]:
        """The content of `result.json` of each run that has finished."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def seeds(self) -> list[int]:
        """The seed of each run that has finished."""
        return [run.config.loop.seed for run in self.runs if run.result is not None]


def group_runs(runs: Iterable[Run]) -> list[Arm]:
    """Group runs into arms: runs whose configurations differ only in the seeds.

    Fields of logging and hardware make no difference: `loop.device`, `loop.compile` and the intervals of
    logging, evaluation and checkpoints. The label of an arm names the smallest set of fields that tells all
    arms apart, earlier fields of the configuration first. That set may have more than three fields, as when
    each arm lacks another part of one model. Then the label names the fields in which the arm differs from
    more than half of the arms, or is "baseline" if no field differs.

    Args:
        runs: runs as `linrec.lab.train.load_run` reads them.

    Returns:
        The arms, in the order of their first run.

    Example:
        >>> import dataclasses
        >>> from pathlib import Path
        >>> from linrec.lab.train import get_recipe
        >>> config = get_recipe("memory-horizon")
        >>> wide = dataclasses.replace(config, model=dataclasses.replace(config.model, d_channel_mixing=256))
        >>> runs = [Run(Path(name), c, [], None, {}) for name, c in (("a", config), ("b", wide), ("c", wide))]
        >>> [(arm.label, len(arm.runs)) for arm in group_runs(runs)]
        [('d_channel_mixing: 128', 1), ('d_channel_mixing: 256', 2)]
    """
    grouped: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run in runs:
        grouped.setdefault(arm_key(run.config), (_fields(run.config), []))[1].append(run)

    configs = [fields for fields, _ in grouped.values()]
    differing = [
        name for name in _names(configs) if any(c.get(name) != configs[0].get(name) for c in configs)
    ]
    telling = _telling(configs, differing)
    usual = {} if telling is not None else _usual(configs, differing)
    arms: list[Arm] = []
    for fields, members in grouped.values():
        names = [n for n in differing if fields.get(n) != usual.get(n, ...)] if telling is None else telling
        told = [(_short(name), _words(fields.get(name))) for name in names]
        if not told:
            told = [("name", fields["name"] if telling is not None else "baseline")]
        label = ", ".join(str(value) if name == "name" else f"{name}: {value}" for name, value in told)
        if label in (arm.label for arm in arms):
            label = f"{label} ({len(arms) + 1})"
        # a lone word says enough in a file's name
        named = told[0][1] if len(told) == 1 and isinstance(told[0][1], str) else label
        slug = re.sub(r"[^a-z0-9]+", "-", named.lower()).strip("-")
        if not slug or slug in (arm.slug for arm in arms):
            slug = f"{slug or 'arm'}-{len(arms) + 1}"
        settings = {name: fields.get(name) for name in differing}
        arms.append(Arm(label, slug, settings, tuple(members)))
    return arms


def arm_key(config: TrainConfig) -> str:
    """Return a text that runs of an arm share, and runs of other arms do not."""
    return json.dumps(_fields(config), sort_keys=True)


def _fields(config: TrainConfig) -> dict[str, Any]:
    """Return the fields that set arms apart, by dotted name."""
    return {
        name: value
        for name, value in flattened(config_to_dict(config)).items()
        if name not in IGNORED and name.rpartition(".")[2] != "seed"
    }


def _short(name: str) -> str:
    """Return the last part of a dotted name; an argument of a hybrid keeps the name of its mixer."""
    return name.partition(".mixer_args.")[2] or name.rpartition(".")[2]


def _words(value: Any) -> Any:
    """Return names of a pattern as they are typed, and any other value as it is."""
    if isinstance(value, tuple) and value and all(isinstance(word, str) for word in value):
        return spelled(value)
    # pages and pictures are passed on
    return without_folders(value) if isinstance(value, str) else value


def _names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for config in configs for name in config))


def _usual(configs: Sequence[Mapping[str, Any]], differing: Sequence[str]) -> dict[str, Any]:
    """Return, by field, the value that more than half of the arms have; other fields are left out."""
    usual = {}
    for name in differing:
        values = [config.get(name) for config in configs]
        commonest = max(values, key=values.count)
        if 2 * values.count(commonest) > len(values):
            usual[name] = commonest
    return usual


def _telling(configs: Sequence[Mapping[str, Any]], differing: Sequence[str]) -> tuple[str, ...] | None:
    # three fields name any comparison that a reader can keep in mind
    for size in range(min(3, len(differing)) + 1):
        for names in itertools.combinations(differing, size):
            if len({repr([config.get(name) for name in names]) for config in configs}) == len(configs):
                return names
    return None
