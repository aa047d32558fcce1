"""The suite `streams`: learners that learn online, on every stream, with equal steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from linrec.errors import unknown
from linrec.lab.bench.jobs import Job, sizes
from linrec.lab.streams.learn import LearnConfig
from linrec.lab.train import ConfigError

__all__ = ["LEARNERS", "STREAMS", "StreamEntry", "make_stream_jobs", "stream_scores"]

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


EARLY = 1000
"""The step at which memory and speed are first given."""


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


def make_stream_jobs(
    entries: Sequence[StreamEntry], learners: Sequence[str], seeds: Sequence[int], steps: int | None = None
) -> list[Job]:
    """Return the jobs of all streams, learners and seeds, beginning with all jobs of the first seed.

    Args:
        entries: entries of the suite.
        learners: labels of learners, keys of `LEARNERS`; none is all.
        seeds: integers of at least 0.
        steps: steps of each stream; None is as the entries say.

    Raises:
        ConfigError: a label does not exist.

    Example:
        >>> from linrec.lab.bench import STREAMS
        >>> [str(job.folder) for job in make_stream_jobs(STREAMS[:1], ["rtrl"], [0, 1])]
        ['add-memory/rtrl/seed-0', 'add-memory/rtrl/seed-1']
    """
    for label in learners:
        if label not in LEARNERS:
            raise ConfigError(str(unknown("learner of the suite called", label, [*LEARNERS])))
    jobs = []
    for seed in seeds:
        for entry in entries:
            for label in dict.fromkeys(learners or LEARNERS):
                config = entry.config(label, seed)
                found = sizes(config.encoder(config.make_stream()))
                jobs.append(Job(entry.name, label, seed, config, found, steps=steps or entry.steps))
    return jobs


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
    return fmean(known) if known else None
