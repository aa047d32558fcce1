"""What a run tells while it goes and when it ends."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Doing: TypeAlias = Literal["training", "evaluating", "stopping"]

# seconds between two reports of a run that logs less often
PAUSE = 1.0


@dataclass(frozen=True)
class Progress:
    """The progress of a run, reported at every logged step and at least once a second.

    Args:
        step: steps made.
        total_steps: steps of the whole run.
        loss: training loss, in nats or as a mean squared error, averaged over the latest window; None before
            the first window ends.
        accuracy: training accuracy, likewise; None for a regression too.
        steps_per_second: speed in the latest window; None before the first window ends.
        doing: what the run does; "stopping" means that the run ends after this step.
        logged: whether the window ends here.

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
        """Time to the end at the present speed; None before the speed is known."""
        return (self.total_steps - self.step) / self.steps_per_second if self.steps_per_second else None


class Reporter:
    """Tells someone how far a run is.

    Args:
        tell: is called with the progress; None tells nobody.
        step: steps made before.
        total_steps: steps of the whole run.

    Example:
        >>> reporter = Reporter(lambda progress: print(progress.step, progress.doing), 0, 10)
        >>> reporter.step(1)
        >>> with reporter.evaluating():
        ...     reporter.log(2, loss=1.0, accuracy=None, steps_per_second=5.0)
        1 evaluating
        2 evaluating
    """

    def __init__(self, tell: Callable[[Progress], None] | None, step: int, total_steps: int) -> None:
        self._tell = tell
        self._last = Progress(step, total_steps, logged=False)
        self._step, self._told = step, time.monotonic()

    def step(self, step: int) -> None:
        """Report a step if the last report is a second old."""
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
        self._report(logged=False, doing="evaluating")
        yield
        self._last = dataclasses.replace(self._last, doing="training")

    def stop(self) -> None:
        """Report that the run ends after this step."""
        self._report(logged=False, doing="stopping")

    def _report(self, **changes: Any) -> None:
        self._last = dataclasses.replace(self._last, step=self._step, **changes)
        self._told = time.monotonic()
        if self._tell is not None:
            self._tell(self._last)


@dataclass(frozen=True)
class Result:
    """What `result.json` holds beside configuration and provenance.

    Args:
        test: "loss" in nats and "accuracy" on the test split, or "loss", the mean squared error, of a
            regression; and what else the task's score says. Empty where there is no such split.
        validation: the same for the validation split.
        parameters: number of parameters of the model.
        steps: steps made.
        seconds: wall time, evaluation included, of all pieces of a resumed run.
        steps_per_second: median speed of training alone.
        probes: the same for each of the task's probes, such as longer samples, by name.
        best_step: the step of the lowest validation loss, whose model the scores are of; None where that of
            the last step is kept.
    """

    test: dict[str, Any]
    validation: dict[str, Any]
    parameters: int
    steps: int
    seconds: float
    steps_per_second: float
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    best_step: int | None = None
