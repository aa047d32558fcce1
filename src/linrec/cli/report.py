"""`linrec report RUN...`: pictures and tables of trained models."""

import os
from pathlib import Path

from linrec.cli.options import ReportOptions
from linrec.cli.output import say
from linrec.cli.parsing import parse
from linrec.report import compare_runs, write_report
from linrec.report.over_seeds import format_mean_and_spread
from linrec.train import ConfigError, load_run


def run(words: list[str]) -> int:
    """Run `linrec report`."""
    options = parse(ReportOptions, words, "linrec report")
    if not options.runs:
        raise ConfigError("name at least one run folder: linrec report RUN ...")
    for run in options.runs:
        _refuse_suite(run)
        load_run(run, trust_code=options.trust_code)
    together = Path(os.path.commonpath([run.absolute().parent for run in options.runs]))
    out = options.out or (options.runs[0] if len(options.runs) == 1 else together)
    baseline, trust_code = options.baseline, options.trust_code
    say(f"wrote {write_report(options.runs, out, baseline=baseline, trust_code=trust_code)}")
    compared = compare_runs(options.runs, baseline, trust_code=trust_code)
    worse = [found for found in compared if found.verdict == "regression"]
    for found in worse:
        scores, before = (format_mean_and_spread(of, ",.4f") for of in (found.scores, found.baseline))
        say(f"regression: {found.label}: {found.metric} {scores} against {before} of the baseline")
    return int(bool(worse))


def _refuse_suite(folder: Path) -> None:
    """A suite and its jobs are no runs, but have some; `load_run` would name the file that is missing."""
    for below in ("run", "*/*/*/run"):
        if not (folder / "config.json").exists() and any(folder.glob(f"{below}/config.json")):
            runs = f"linrec report {folder / below}"
            raise ConfigError(f"{folder} is a folder of linrec bench; give the runs below it: {runs}.")
