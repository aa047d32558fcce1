"""Progress and result of a run."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

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
    """Reports the progress of a run to a callback.

    Args:
        tell: callback that receives the progress; None disables reports.
        step: number of steps made before.
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


class SpanCurve(TypedDict):
    """Accuracies by the memory that an answer needs, in bins of equal width; None for an empty bin."""

    width: int
    accuracy: list[float | None]
    count: list[int]


class Scores(TypedDict, total=False):
    """The scores of a split that readers rely on; tasks have further scores."""

    loss: float | None
    accuracy: float | None
    nrmse: float | None
    span_curve: SpanCurve


class StoredResult(TypedDict, total=False):
    """The types of the fields of `result.json`; results of older versions lack newer fields."""

    test: Scores
    validation: Scores
    parameters: int
    steps: int
    seconds: float
    steps_per_second: float
    probes: dict[str, Scores]
    best_step: int | None


@dataclass(frozen=True)
class Result:
    """The result of a run, as stored in `result.json` beside configuration and provenance.

    Args:
        test: scores on the test split: "loss" in nats and "accuracy", or for a regression "loss", the mean
            squared error; and further scores of the task. Empty if the split is empty.
        validation: scores on the validation split.
        parameters: number of parameters of the model.
        steps: number of steps made.
        seconds: wall time of the whole run in seconds, including evaluation and the time before a resume.
        steps_per_second: median speed of training, without evaluation.
        probes: scores on each of the task's probes, such as longer samples, by name.
        best_step: the step of the lowest validation loss, if the scores are of its model; None if the scores
            are of the last step's model.
    """

    test: dict[str, Any]
    validation: dict[str, Any]
    parameters: int
    steps: int
    seconds: float
    steps_per_second: float
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    best_step: int | None = None
