"""`linrec report RUN...`: write pictures and tables of trained models."""

import os
from collections.abc import Sequence
from pathlib import Path

from linrec.cli.options import ReportOptions
from linrec.cli.output import say
from linrec.lab.bench.page import write_page
from linrec.lab.bench.rows import make_row
from linrec.lab.report import collect_runs, compare_runs, write_report
from linrec.lab.report.records import Stored, read_stored
from linrec.lab.style import FORMATS, format_mean_and_spread
from linrec.lab.train import ConfigError, RunFolderError
from linrec.lab.train.run import writing


def run(options: ReportOptions, words: Sequence[str]) -> int:
    """Run `linrec report`."""
    if not options.runs:
        raise ConfigError("name at least one run folder: linrec report RUN ...")
    baseline, trust_code = options.baseline, options.trust_code
    if options.collect:
        if options.out is None or baseline:
            raise ConfigError("--collect needs --out FOLDER, and takes no --baseline.")
        rows, curves = collect_runs(options.runs, options.out, trust_code=trust_code)
        say(f"wrote {rows} and {curves.name}")
        return 0
    stored = read_stored(options.runs)
    together = Path(os.path.commonpath([run.absolute().parent for run in options.runs]))
    out = options.out or (options.runs[0] if len(options.runs) == 1 else together)
    if not baseline and all(run.job is not None for run in stored):
        say(f"wrote {_write_suite(stored, out)}")
        return 0
    say(f"wrote {write_report(options.runs, out, baseline=baseline, trust_code=trust_code)}")
    compared = compare_runs(options.runs, baseline, trust_code=trust_code)
    worse = [found for found in compared if found.verdict == "regression"]
    for found in worse:
        form = FORMATS[found.metric]
        scores, before = (format_mean_and_spread(of, form) for of in (found.scores, found.baseline))
        say(f"regression: {found.label}: {found.metric} {scores}, baseline {before}")
    return int(bool(worse))


def _write_suite(jobs: Sequence[Stored], out: Path) -> Path:
    """Write the page of `linrec bench` from the jobs."""
    with writing(f"write the report to {out}", RunFolderError):
        return write_page([make_row(job) for job in jobs], out, title=_title(jobs))


def _title(jobs: Sequence[Stored]) -> str:
    """Return the title that `linrec bench` gives: the suites in the commands of the jobs."""
    suites: list[str] = []
    for job in jobs:
        _, found, options = (job.job or {})["command"].partition(" bench ")
        suites += options.split()[:1] if found else []
    return " ".join(["linrec bench", *dict.fromkeys(suites)])
