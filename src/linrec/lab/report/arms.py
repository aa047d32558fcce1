"""Arms: runs of one configuration, which differ only in the seed; and their comparison with earlier runs."""

import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from linrec.field_types import check_content
from linrec.files import read_json
from linrec.lab.pages import without_folders
from linrec.lab.report.records import read_runs, read_stored
from linrec.lab.style import better, mean_and_spread, score_of
from linrec.lab.tasks import judged_by
from linrec.lab.train import ConfigError, Run, RunFolderError, TrainConfig, UntrustedCodeError
from linrec.lab.train.config import config_from_dict, config_to_dict, flattened
from linrec.lab.train.records import StoredResult
from linrec.models.config import spelled

# settings of logging and hardware, which do not change the training
IGNORED = frozenset(
    f"loop.{name}" for name in ("device", "compile", "log_every", "eval_every", "checkpoint_every")
)
LEAST = 0.01
"""A change by less than this share of the baseline never counts, however close its seeds are."""


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

    @property
    def metric(self) -> str:
        """Name of the score: "accuracy", "mse" or "perplexity"."""
        return judged_by(self.runs[0].config.task)

    @property
    def scores(self) -> list[tuple[float, str]]:
        """The score of each run that has one, and the split of that score."""
        found = (score_of(self.metric, result) for result in self.results)
        return [score for score in found if score is not None]


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


@dataclass(frozen=True)
class Comparison:
    """An arm beside the runs of its configuration in a baseline.

        spread = max(standard deviation of the baseline's seeds, 0.01 |mean of the baseline|)

    Attributes:
        label: label of the arm.
        metric: "accuracy", "auc", "mse" or "perplexity".
        scores: scores of the arm's seeds.
        baseline: scores of the baseline's seeds.
    """

    label: str
    metric: str
    scores: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Largest difference of the means that does not count."""
        mean, spread = mean_and_spread(self.baseline)
        return max(spread or 0.0, LEAST * abs(mean))

    @property
    def verdict(self) -> Literal["regression", "better", "as before"]:
        """Whether the mean is worse, or better, than the baseline's by more than the spread.

        Example:
            >>> Comparison("gla", "accuracy", (0.7, 0.8), (0.9, 0.94)).verdict
            'regression'
            >>> Comparison("gla", "mse", (0.0105,), (0.01, 0.011)).verdict
            'as before'
        """
        mean, before = mean_and_spread(self.scores).mean, mean_and_spread(self.baseline).mean
        # NaN is a regression
        if not abs(mean - before) > self.spread and mean == mean:
            return "as before"
        return "better" if better(self.metric, mean, before) else "regression"


def compare_runs(
    run_dirs: Iterable[str | os.PathLike[str]],
    baseline: Sequence[str | os.PathLike[str]],
    *,
    trust_code: bool = False,
) -> list[Comparison]:
    """Compare finished runs with the runs of a baseline that differ only in their seed.

    Args:
        run_dirs: run folders of `linrec train`, jobs of `linrec bench`, or tables of `collect_runs`.
        baseline: `result.json` of runs, `rows.jsonl` of a table, or any of `run_dirs`; several together are
            one baseline.
        trust_code: whether to import tasks and mixers that the runs name by import paths; see `load_run`.

    Returns:
        A comparison for every arm that has results and a baseline.

    Raises:
        ConfigError: a file of the baseline cannot be read, or its runs have other configurations.
        RunFolderError: one of `run_dirs` is no run.
    """
    return compare_arms(group_runs(read_runs(run_dirs, trust_code=trust_code)), baseline)


def compare_arms(arms: Sequence[Arm], baseline: Sequence[str | os.PathLike[str]]) -> list[Comparison]:
    """Compare arms as `group_runs` makes them; arguments, result and errors are those of `compare_runs`."""
    known: dict[str, list[float]] = {}
    # the runs name this code too, and the caller trusts them
    trusted = {path for arm in arms for path in arm.runs[0].config.import_paths}
    for file in baseline:
        for key, score in _scores(Path(file), trusted):
            known.setdefault(key, []).append(score)
    keys = [arm_key(arm.runs[0].config) for arm in arms]
    if baseline and not known.keys() & set(keys):
        raise ConfigError(
            "no run of the baseline has the configuration of one of these: all settings of task, model, "
            "optimiser and loop must be equal, seeds aside. Give the rows or results of the same recipe; got "
            f"{', '.join(map(str, baseline))}."
        )
    found = []
    for arm, key in zip(arms, keys, strict=True):
        if arm.scores and key in known:
            scores = tuple(score for score, _ in arm.scores)
            found.append(Comparison(arm.label, arm.metric, scores, tuple(known[key])))
    return found


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


def _scores(file: Path, trusted: Collection[str]) -> list[tuple[str, float]]:
    """Return the key of the arm, and the score, of every run of a baseline that has ended."""
    try:
        if file.suffix == ".json":
            content = check_content(file, read_json(file), StoredResult)
            ended = [(content["config"], content)]
        else:
            ended = [
                (run.records.config, run.records.result)
                for run in read_stored([file])
                if run.records is not None and run.records.result is not None
                # a job that is not done has no scores
                if (run.outcome or {}).get("status", "done") == "done"
            ]
        return [scored for row in ended if (scored := _scored(*row, trusted)) is not None]
    except RunFolderError as error:
        raise ConfigError(f"the baseline {file} cannot be used: {error}") from error
    except OSError as error:
        raise ConfigError(f"the baseline {file} cannot be read: {error.strerror or error}.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the baseline {file} must be rows.jsonl of a table, or result.json of a run; it cannot be used: "
            f"{type(error).__name__}: {error}."
        ) from error


def _scored(config: Any, result: Mapping[str, Any], trusted: Collection[str]) -> tuple[str, float] | None:
    try:
        parsed = config_from_dict(config, trust_code=trusted)
    except UntrustedCodeError:
        # the code of no run that is compared
        return None
    scored = score_of(judged_by(parsed.task), result)
    return None if scored is None else (arm_key(parsed), scored[0])
