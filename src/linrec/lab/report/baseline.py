"""Comparison of runs with earlier runs of the same configuration, to find regressions."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from linrec.field_types import check_types
from linrec.files import parse_json
from linrec.lab.report.arms import Arm, arm_key, group_runs
from linrec.lab.report.over_seeds import mean_and_spread
from linrec.lab.report.scores import better, score_of
from linrec.lab.report.stored import read_runs, read_stored
from linrec.lab.report.tables import ROWS, has_table
from linrec.lab.tasks import judged_by
from linrec.lab.train import ConfigError, RunFolderError, UntrustedCodeError
from linrec.lab.train.config import config_from_dict
from linrec.lab.train.records import Scores

__all__ = ["Comparison", "compare_arms", "compare_runs"]

LEAST = 0.01
"""A change by less than this share of the baseline never counts, however close its seeds are."""


@dataclass(frozen=True)
class Comparison:
    """An arm beside the runs of its configuration in a baseline.

        spread = max(standard deviation of the baseline's seeds, 0.01 |mean of the baseline|)

    Attributes:
        label: label of the arm.
        metric: "accuracy", "mse" or "perplexity".
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
        baseline: `rows.jsonl` of a suite, `result.json` of runs, or any of `run_dirs`; several together are
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
        metric = judged_by(arm.runs[0].config.task)
        scores = [scored[0] for result in arm.results if (scored := score_of(metric, result)) is not None]
        if scores and key in known:
            found.append(Comparison(arm.label, metric, tuple(scores), tuple(known[key])))
    return found


def _scores(file: Path, trusted: Collection[str]) -> list[tuple[str, float]]:
    """Return the key of the arm, and the score, of every run of a file that has ended."""
    try:
        stored = _rows(file)
        ended = [row for row in stored if row.get("status", "done") == "done"]
        return [scored for row in ended if (scored := _scored(row, trusted)) is not None]
    except RunFolderError as error:
        raise ConfigError(f"the baseline {file} cannot be used: {error}") from error
    except OSError as error:
        raise ConfigError(f"the baseline {file} cannot be read: {error.strerror or error}.") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the baseline {file} must be rows.jsonl of linrec bench, or result.json of a run; it cannot be "
            f"used: {type(error).__name__}: {error}."
        ) from error


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a baseline, which have a configuration and scores."""
    folder = file.parent if file.name == ROWS and has_table(file.parent) else file
    if folder.suffix not in (".json", ".jsonl"):
        return [
            {**(run.outcome or {}), "config": run.records.config, **run.records.result}
            for run in read_stored([folder])
            if run.records is not None and run.records.result is not None
        ]
    text = file.read_text(encoding="utf-8")
    # a result in many lines, or a row in each line
    return (
        [parse_json(text, verify=text.endswith("\n"))]
        if file.suffix == ".json"
        else [*map(parse_json, text.splitlines())]
    )


def _scored(row: Mapping[str, Any], trusted: Collection[str]) -> tuple[str, float] | None:
    try:
        config = config_from_dict(row["config"], trust_code=trusted)
    except UntrustedCodeError:
        # the code of no run that is compared
        return None
    check_types({"test": Scores, "validation": Scores}, row)
    scored = score_of(judged_by(config.task), row)
    return None if scored is None else (arm_key(config), scored[0])
