"""Wall time and speed of a run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures the wall time of a run, including the time before it was resumed, and the speed of training.

    Args:
        step: steps made before the run was resumed; 0 for a new run.
        seconds: wall time of the run before it was resumed; 0 for a new run.
    """

    def __init__(self, *, step: int, seconds: float) -> None:
        self._started = time.perf_counter() - seconds
        self._lap_step, self._lap_started = step, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far."""
        return time.perf_counter() - self._started

    def lap(self, step: int) -> float:
        """Return the steps per second since the last lap ended, and start the next lap at `step`."""
        now = time.perf_counter()
        speed = (step - self._lap_step) / (now - self._lap_started)
        self._lap_step, self._lap_started = step, now
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within the context from the lap; the wall time still includes it."""
        began = time.perf_counter()
        yield
        self._lap_started += time.perf_counter() - began
