"""Rows of a suite, a row for each job: configuration, outcome, scores, speed and memory."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linrec.files import json_line, reason, replacing, write_text
from linrec.lab.bench.jobs import NAMED
from linrec.lab.report.scores import score_of
from linrec.lab.report.stored import read_job
from linrec.lab.report.tables import Stored
from linrec.lab.train import TrainError

__all__ = ["make_row", "make_rows", "write_rows"]

ROWS = "rows.jsonl"
PARQUET = "rows.parquet"

MEASURED = ("chance", "trivial_score", "state_elements", "speed_by_length")
"""The fields that a worker measures after training."""


def make_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each job, in the order of the folders; jobs yet to run have the status "not run".

    Args:
        folders: folders of jobs.
    """
    return [make_row(read_job(folder)) for folder in folders]


def write_rows(rows: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """Write rows as JSON lines, and as Parquet if pyarrow is installed; return the files.

    The Parquet file stores nested values as JSON text.

    Raises:
        TrainError: a file cannot be written, for example because the disk is full.
    """
    lines = "".join(json_line(row) for row in rows)
    try:
        write_text(out / ROWS, lines)
    except OSError as error:
        raise TrainError(f"could not write {out / ROWS}: {reason(error)}.") from error
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return [out / ROWS]
    # rows of unfinished jobs lack some columns; Parquet needs the same columns in every row
    names = dict.fromkeys(name for row in rows for name in row)
    flat = [{name: _plain(row.get(name)) for name in names} for row in rows]
    try:
        with replacing(out / PARQUET) as partial:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), partial)
    except OSError as error:
        raise TrainError(f"could not write {out / PARQUET}: {reason(error)}.") from error
    return [out / ROWS, out / PARQUET]


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def make_row(stored: Stored) -> dict[str, Any]:
    """Return the row of a job, read from its folder or from a table of runs."""
    assert stored.job is not None
    job = stored.job
    outcome = stored.outcome or {"status": "not run", "message": "", "peak_bytes": None}
    row = {
        **{name: job[name] for name in NAMED},
        "status": outcome["status"],
        "message": outcome["message"],
        "mixer_args": job["config"]["model"]["mixer_args"],
        "d_model": job["config"]["model"]["d_model"],
        "lr": job["config"]["optim"]["lr"],
        "peak_bytes": outcome["peak_bytes"],
        **{name: outcome.get(name) for name in MEASURED},
        "folder": str(stored.folder),
        "command": job["command"],
        "config": job["config"],
    }
    if stored.records is None:
        return row | _lost(row, stored.problem)
    _, about, metrics, result = stored.records
    trained = [record for record in metrics if record["split"] == "train"]
    speed = [record["tokens_per_second"] for record in trained if "tokens_per_second" in record]
    row |= {
        "steps": trained[-1]["step"] if trained else 0,
        "tokens_per_second": statistics.median(speed) if speed else None,
        "curve": [
            [record["step"], record["loss"], record.get("accuracy")]
            for record in metrics
            if record["split"] == "validation" and "loss" in record
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
        row |= {"seconds": result.get("seconds"), **scores, "probes": result.get("probes", {})}
        scored = score_of(row["metric"], scores)
        if scored is None:
            message = "there is neither a test split nor a validation split to score."
            return row | {"status": "failed", "message": message}
        row |= dict(zip(("score", "scored_on"), scored, strict=True))
    return row


def _lost(row: dict[str, Any], message: str) -> dict[str, Any]:
    """Return the row's fields for a job that was done but whose run cannot be read."""
    return {"status": "failed", "message": message} if row["status"] == "done" else {}
