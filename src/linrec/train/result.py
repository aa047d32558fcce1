"""What a run tells while it goes and when it ends."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far a run is, told at every logged step.

    Args:
        step: steps made.
        total_steps: steps of the whole run.
        loss: training loss, in nats or as a mean squared error, averaged over the latest window.
        accuracy: training accuracy, likewise; None of a regression.
        steps_per_second: speed in the latest window.

    Example:
        >>> Progress(step=10, total_steps=30, loss=1.0, accuracy=0.5, steps_per_second=2.0).seconds_left
        10.0
    """

    step: int
    total_steps: int
    loss: float
    accuracy: float | None
    steps_per_second: float

    @property
    def seconds_left(self) -> float:
        """Time to the end at the present speed."""
        return (self.total_steps - self.step) / self.steps_per_second


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
