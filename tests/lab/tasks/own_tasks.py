"""Tasks that a user might bring, by import path."""

from dataclasses import dataclass

from linrec.lab.tasks import MemoryHorizon


@dataclass(frozen=True)
class Shifted(MemoryHorizon):
    """Memory Horizon with another seed."""

    seed: int = 7


@dataclass(frozen=True)
class Unfinished:
    """A dataclass that is no task."""

    length: int = 4
