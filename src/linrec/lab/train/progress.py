"""The progress, the wall time and the interruption of a run."""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, TypeAlias

from linrec.lab.train.fabric import is_lost

Doing: TypeAlias = Literal["training", "evaluating", "stopping"]

# seconds between two reports of a run that logs less often
PAUSE = 1.0


@dataclass(frozen=True)
class Progress:
    """The progress of a run, reported at every logged step and at least once a second.

    Args:
        step: number of steps made so far.
        total_steps: steps of the whole run.
        loss: training loss, in nats or as a mean squared error, averaged over the latest logging window; None
            before the first window ends.
        accuracy: training accuracy, averaged over the latest window; None before the first window ends, and
            for a regression.
        steps_per_second: speed in the latest window; None before the first window ends.
        doing: current activity; "stopping" means that the run ends after this step.
        logged: whether this step is logged, which ends a window.

    Example:
        >>> Progress(step=10, total_steps=30, loss=1.0, accuracy=0.5, steps_per_second=2.0).seconds_left
        10.0
    """

    step: int
    total_steps: int
    loss: float | None = None
    accuracy: float | None = None
    steps_per_second: float | None = None
    doing: Doing = "training"
    logged: bool = True

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the current speed; None before the speed is known."""
        return (self.total_steps - self.step) / self.steps_per_second if self.steps_per_second else None


class Reporter:
    """Reports the progress of a run, which has made `step` steps before, to a callback, if any."""

    def __init__(self, tell: Callable[[Progress], None] | None, step: int, total_steps: int) -> None:
        self._tell = tell
        self._last = Progress(step, total_steps, logged=False)
        self._step, self._told = step, time.monotonic()
        self._doing: Doing = "training"
        self._stopping = False

    def start(self) -> None:
        """Report that the steps begin."""
        self._report(logged=False)

    def step(self, step: int) -> None:
        """Report a step if the last report is at least a second old."""
        self._step = step
        if time.monotonic() - self._told >= PAUSE:
            self._report(logged=False)

    def log(self, step: int, *, loss: float, accuracy: float | None, steps_per_second: float) -> None:
        """Report the end of a window."""
        self._step = step
        self._report(logged=True, loss=loss, accuracy=accuracy, steps_per_second=steps_per_second)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Report that the run evaluates, within the context."""
        self._doing = "evaluating"
        self._report(logged=False)
        yield
        self._doing = "training"

    def stop(self) -> None:
        """Report that the run ends after this step; called by a signal handler."""
        self._stopping = True
        self._report(logged=False)

    def _report(self, **changes: Any) -> None:
        doing = "stopping" if self._stopping else self._doing
        self._last = dataclasses.replace(self._last, step=self._step, doing=doing, **changes)
        self._told = time.monotonic()
        if self._tell is not None:
            self._tell(self._last)


class Clock:
    """Measures the wall time of a run, which took `seconds` for `step` steps before, and its speed."""

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


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request to stop; a context manager.

    Within the context, `requested` becomes true at the first signal. A second SIGINT goes to the handler from
    before the context, which raises KeyboardInterrupt by default. So does the first SIGINT while `waits` is
    false. Outside the main thread, Python does not allow signal handlers, and `requested` stays false.

    Args:
        told: called at the first signal.
        waits: whether a request to stop waits for the end of a step; this attribute may change.
    """

    def __init__(self, told: Callable[[], None] | None = None, *, waits: bool = True) -> None:
        self.requested, self.waits, self._told = False, waits, told
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                self._before[name] = signal.signal(name, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)  # type: ignore[arg-type]
        if self._before and error is not None and is_lost(error):
            # torchrun ends the processes that are left, which first say how to continue
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self.requested or not self.waits):
            before = self._before[signal.SIGINT]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt
        # torchrun forwards a signal and then sends another signal, so call back only once
        if not self.requested and self._told is not None:
            self._told()
        self.requested = True
