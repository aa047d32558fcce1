"""Wall time of a run, and its speed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts the seconds of a run over all its pieces, and the speed of training between two laps.

    Args:
        step: steps made before this piece of the run.
        seconds: wall time of the pieces before.
    """

    def __init__(self, *, step: int, seconds: float) -> None:
        self._started = time.perf_counter() - seconds
        self._lap_step, self._lap_started = step, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far."""
        return time.perf_counter() - self._started

    def lap(self, step: int) -> float:
        """End a lap at a step and start the next: returns steps per second since the lap before."""
        now = time.perf_counter()
        speed = (step - self._lap_step) / (now - self._lap_started)
        self._lap_step, self._lap_started = step, now
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the lap, though not out of the wall time."""
        began = time.perf_counter()
        yield
        self._lap_started += time.perf_counter() - began
