"""Suites of tasks that compare models with equal parameters, equal steps and several seeds.

A suite is a list of entries; an entry is a task with its training configuration. Every combination of entry,
mixer and seed is a job. A job runs in its own process and writes its own folder, so a failed job does not
affect other jobs, and an interrupted suite resumes with the remaining jobs.
"""

from linrec.lab.bench.jobs import Job, make_jobs, make_stream_jobs
from linrec.lab.bench.page import write_page
from linrec.lab.bench.rows import make_rows, write_rows
from linrec.lab.bench.schedule import run_jobs
from linrec.lab.bench.suites import LEARNERS, STREAMS, SUITES, Entry, StreamEntry, get_suite
from linrec.lab.bench.variants import Variant, parse_variant

__all__ = [
    "LEARNERS",
    "STREAMS",
    "SUITES",
    "Entry",
    "Job",
    "StreamEntry",
    "Variant",
    "get_suite",
    "make_jobs",
    "make_rows",
    "make_stream_jobs",
    "parse_variant",
    "run_jobs",
    "write_page",
    "write_rows",
]
