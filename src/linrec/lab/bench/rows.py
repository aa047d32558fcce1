"""Rows: a flat view of the record of each job; and standings: the rows of a task and a mixer, over seeds."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from linrec.field_types import check_content
from linrec.files import replacing
from linrec.lab.bench.jobs import NAMED
from linrec.lab.report.records import Learnt, Stored, learns, read_job, write_table
from linrec.lab.style import score_of
from linrec.lab.tasks.images import NOISES
from linrec.lab.train.run import writing

PARQUET = "rows.parquet"
MEASURED = ("chance", "trivial_score", "state_elements", "speed_by_length")
"""The fields that a worker measures after training."""
EARLY = 1000
"""The step at which memory and speed of a stream are first given."""
# levels of probes: steps, or a share
LEVEL = re.compile(r"[0-9]{1,15}(\.[0-9]+)?")


def make_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each job, in the order of the folders; jobs yet to run have the status "not run".

    Args:
        folders: folders of jobs.
    """
    return [make_row(read_job(folder)) for folder in folders]


def write_rows(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write the jobs as a table of runs, and their rows as Parquet if pyarrow is installed; return the files.

    The table is `rows.jsonl` and `curves.jsonl`; see `linrec.lab.report.collect_runs`. The Parquet file has
    the rows of `make_rows`, with nested values as JSON text.

    Args:
        folders: folders of jobs, below `out`.
        out: folder of the suite.

    Raises:
        TrainError: a file cannot be written, for example because the disk is full.
    """
    jobs = [read_job(folder) for folder in folders]
    names = [folder.relative_to(out).as_posix() for folder in folders]
    with writing(f"write the rows to {out}"):
        files = [*write_table(list(zip(names, jobs, strict=True)), out)]
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            return files
        rows = [make_row(job) for job in jobs]
        # rows of unfinished jobs lack some columns; Parquet needs the same columns in every row
        columns = dict.fromkeys(name for row in rows for name in row)
        flat = [{name: _plain(row.get(name)) for name in columns} for row in rows]
        with replacing(out / PARQUET) as partial:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), partial)
    return [*files, out / PARQUET]


def make_row(stored: Stored) -> dict[str, Any]:
    """Return the row of a job, read from its folder or from a table of runs."""
    assert stored.job is not None
    job = stored.job
    outcome = stored.outcome or {"status": "not run", "message": "", "peak_bytes": None}
    config = job["config"]
    model = config if learns(config) else config["model"]
    row = {
        **{name: job[name] for name in NAMED},
        "status": outcome["status"],
        "message": outcome["message"],
        "mixer_args": model["mixer_args"],
        "d_model": model["d_model"],
        "lr": (config if learns(config) else config["optim"])["lr"],
        "peak_bytes": outcome["peak_bytes"],
        **{name: outcome.get(name) for name in MEASURED},
        "folder": str(stored.folder),
        "command": job["command"],
        "config": config,
    }
    if stored.records is None:
        return row | _lost(row, stored.problem)
    _, about, metrics, result = stored.records
    shown, given = ("stream", "stream") if learns(config) else ("train", "validation")
    trained = [record for record in metrics if record["split"] == shown]
    speed = [record["tokens_per_second"] for record in trained if "tokens_per_second" in record]
    row |= {
        "steps": trained[-1]["step"] if trained else 0,
        "tokens_per_second": statistics.median(speed) if speed else None,
        "curve": [
            [record["step"], record["loss"], record.get("accuracy")]
            for record in metrics
            if record["split"] == given and "loss" in record
        ],
        **{name: about.get(name) for name in ("commit", "device", "versions")},
    }
    # a job that is not done has no scores, even if a result file exists
    if outcome["status"] != "done":
        return row
    if result is None:
        row |= _lost(row, f"{stored.path} has no result; run the job again.")
    else:
        scores = {name: result.get(name, {}) for name in ("test", "validation")}
        if learns(config):
            check_content(stored.path, result, Learnt)
            row |= {"stream": (of_stream := stream_scores(metrics, result))}
            row["tokens_per_second"] = 1e6 * config["rows"] / of_stream["microseconds_per_step"]
            # each step is predicted before it is learnt, so its loss is a test
            scores = {split: {"loss": of_stream["loss"], "fading": of_stream["fading"]} for split in scores}
        row |= {"seconds": result.get("seconds"), **scores, "probes": result.get("probes", {})}
        scored = score_of(row["metric"], scores)
        if scored is None:
            message = "there is neither a test split nor a validation split to score."
            return row | {"status": "failed", "message": message}
        row |= dict(zip(("score", "scored_on"), scored, strict=True))
    return row


def stream_scores(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of a run of `linrec learn`, without its curve.

    Added are "at", memory in bytes and microseconds per step in the first window after step 1,000, and in the
    last window; "recovery", the mean number of steps after a drift; and "retained", the mean over regimes
    that return. A mean of nothing is None.
    """
    windows = [
        {
            "step": before["step"],
            "memory_bytes": after["memory_bytes"],
            "microseconds_per_step": 1e6
            * (after["seconds"] - before["seconds"])
            / (after["step"] - before["step"]),
        }
        for before, after in pairwise(record for record in metrics if "memory_bytes" in record)
    ]
    early = next((place for place, window in enumerate(windows) if window["step"] >= EARLY), None)
    at = [] if early is None else [windows[early], windows[-1]]
    kept = {name: value for name, value in result.items() if name != "curve"}
    return kept | {
        "at": at,
        "recovery": _mean([found["steps"] for found in result["recoveries"]]),
        "retained": _mean([found["retained"] for found in result["forgotten"]]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class Standing:
    """The rows of a mixer on a task: of finished jobs at the chosen learning rate, and of failed jobs."""

    task: str
    mixer: str
    rows: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...] = ()

    @property
    def metric(self) -> str:
        """Name of the score: "accuracy", "mse" or "perplexity"."""
        metric: str = (self.rows or self.failed)[0]["metric"]
        return metric

    @property
    def scores(self) -> list[float]:
        """The score of every seed on the test split."""
        return [row["score"] for row in self.rows]

    @property
    def probes(self) -> dict[str, dict[float, list[float]]]:
        """The scores of every seed by kind of probe and by level, ascending.

        The level of the kind "length" is the number of steps. A kind of noise has the levels in the names of
        probes, such as 0.2 in "noise 0.2", and the scores on the test split at level 0. Probes that some
        seed lacks are left out.
        """
        if not self.rows:
            return {}
        key = "accuracy" if self.metric == "accuracy" else "loss"
        found: dict[str, dict[float, list[float]]] = {}
        for name in set.intersection(*({*row["probes"]} for row in self.rows)):
            kind, _, level = name.rpartition(" ")
            scores = [row["probes"][name].get(key) for row in self.rows]
            if None in scores:
                continue
            if kind in NOISES and LEVEL.fullmatch(level):
                found.setdefault(kind, {0: self.scores})[float(level)] = scores
            elif LEVEL.fullmatch(name) and name.isdecimal():
                found.setdefault("length", {})[int(name)] = scores
        return {kind: dict(sorted(by_level.items())) for kind, by_level in found.items()}

    @property
    def seeds(self) -> int:
        """The number of seeds, failed seeds included."""
        return len({row["seed"] for row in (*self.rows, *self.failed)})

    @property
    def parameters(self) -> int | None:
        """The number of parameters of the model; None if the model cannot be built."""
        parameters: int | None = (self.rows or self.failed)[0]["parameters"]
        return parameters

    @property
    def state(self) -> int:
        """The number of state elements after a sequence; until it is measured, the model's own count."""
        first = (self.rows or self.failed)[0]
        return first["state_size"] if first.get("state_elements") is None else first["state_elements"]


def standings(rows: Sequence[dict[str, Any]]) -> list[Standing]:
    """Group rows by task and mixer, keeping the learning rate with the lowest validation loss."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["task"], row["mixer"]), []).append(row)
    found = []
    for (task, mixer), of_both in grouped.items():
        done = [row for row in of_both if row["status"] == "done"]
        # the learning rates were tried with a single seed
        tried = [row for row in done if row["seed"] == done[0]["seed"]]
        losses = {row["lr"]: validation_loss(row) for row in tried}
        rate = min(losses, key=lambda lr: losses[lr]) if tried else None
        failed = tuple(row for row in of_both if row["status"] != "done")
        found.append(Standing(task, mixer, tuple(row for row in done if row["lr"] == rate), failed))
    return found


def validation_loss(row: dict[str, Any]) -> float:
    """Return the validation loss by which learning rates are chosen; infinity if it is missing or NaN."""
    loss: float | None = row["validation"].get("loss")
    return math.inf if loss is None or math.isnan(loss) else loss


def level(rows: Sequence[dict[str, Any]], task: str, name: str) -> float | None:
    """Return a task's baseline score, "chance" or "trivial_score", or None if no job has computed it."""
    known = (row.get(name) for row in rows if row["task"] == task)
    return next((value for value in known if value is not None), None)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def _lost(row: dict[str, Any], message: str) -> dict[str, Any]:
    """Return the row's fields for a job that was done but whose run cannot be read."""
    return {"status": "failed", "message": message} if row["status"] == "done" else {}
