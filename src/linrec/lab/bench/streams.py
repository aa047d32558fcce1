"""The suite `streams`: learners that learn online, on every stream, with equal steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from linrec.lab.streams.learn import LearnConfig

__all__ = ["LEARNERS", "STREAMS", "StreamEntry", "stream_scores"]

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
    "window": 500,
    "checkpoint_every": 4000,
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
    steps: int = 12_000

    def config(self, learner: str, seed: int) -> LearnConfig:
        """Return the configuration of `linrec learn` for a learner, a key of `LEARNERS`."""
        given = {"stream": self.name, "stream_args": dict(self.stream_args), "seed": seed}
        return LearnConfig(**{**COMMON, **given, **LEARNERS[learner]})


STREAMS = (
    # three regimes each; the first returns where the stream allows
    StreamEntry("add-memory", {"every": 4000}),
    StreamEntry("delay-copy", {"every": 4000, "delays": (10, 20)}),
    StreamEntry("text", {"every": 4000}),
    StreamEntry("sines", {"every": 4000}),
    StreamEntry("mackey-glass", {"every": 4000}),
    StreamEntry("trace-patterning"),
    # 20 frames a film
    StreamEntry("bouncing-digits", {"films": 150}),
)


def stream_scores(
    config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the scores of a run of `linrec learn`, without its curve.

    Added are "at": memory in bytes and microseconds per step in the first window after step 1,000, and in the
    last window.
    """
    windows = [
        {
            "step": before["step"],
            "memory_bytes": after["memory_bytes"],
            "microseconds_per_step": 1e6
            * (after["seconds"] - before["seconds"])
            / (after["step"] - before["step"]),
        }
        for before, after in pairwise(metrics)
    ]
    early = next((place for place, window in enumerate(windows) if window["step"] >= EARLY), None)
    at = [] if early is None else [windows[early], windows[-1]]
    return {name: value for name, value in result.items() if name != "curve"} | {"at": at}
