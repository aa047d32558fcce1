"""Suites of tasks: models compared with equal parameters, equal steps and several seeds.

A suite has entries, each a task with its training; entry, mixer and seed make a job. A job runs in a process
of its own and leaves a folder behind, so that one that fails takes nothing else with it and a suite that was
stopped goes on where it was.
"""

from linrec.bench.jobs import Job, make_jobs
from linrec.bench.page import write_page
from linrec.bench.rows import make_rows, write_rows
from linrec.bench.schedule import run_jobs
from linrec.bench.suites import SUITES, Entry, get_suite
from linrec.bench.variants import Variant, parse_variant

__all__ = [
    "SUITES",
    "Entry",
    "Job",
    "Variant",
    "get_suite",
    "make_jobs",
    "make_rows",
    "parse_variant",
    "run_jobs",
    "write_page",
    "write_rows",
]
