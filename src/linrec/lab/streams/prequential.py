"""Prequential scores: every step is predicted before its target is learnt from."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.lab.streams.base import Regime

__all__ = ["Prequential", "forgotten", "recoveries"]

# the curve has at most this number of points; then pairs of points become one
POINTS = 4000


class Prequential:
    """Running scores of a stream: mean loss, fading loss, and a curve of means over windows.

        S_T = sum l_t / T,    F_t = (l_t + a F_{t-1} n_{t-1}) / n_t,  n_t = 1 + a n_{t-1},  a = 1 - 1 / window

    A step's loss is the mean over the rows that have a target.

    Args:
        window: steps of the fading loss, and of a point of the curve at first.

    Example:
        >>> scores = Prequential(window=2)
        >>> scores.add(torch.tensor([[1.0, 0.0, 3.0, 4.0]]))
        >>> scores.mean, scores.curve
        (2.0, [0.5, 3.5])
    """

    def __init__(self, window: int = 1000) -> None:
        self.window = self.width = window
        self.curve: list[float] = []
        self._sum = self._n = self._faded = self._weight = self._part = self._part_n = 0.0
        self._steps = 0

    @property
    def mean(self) -> float:
        """The mean loss of all steps."""
        return self._sum / self._n if self._n else math.nan

    @property
    def fading(self) -> float:
        """The fading loss."""
        return self._faded / self._weight if self._weight else math.nan

    def add(self, loss: Tensor, counts: Tensor | None = None) -> None:
        """Add the losses (b, t) of the next steps; `counts` (b, t) is false at steps without a target."""
        counts = torch.ones_like(loss, dtype=torch.bool) if counts is None else counts
        n = counts.double().sum(0)
        sums = torch.where(counts, loss.double(), 0).sum(0)
        for total, number in zip((sums / n.clamp(min=1)).tolist(), n.tolist(), strict=True):
            self._add(total if number else None)

    def _add(self, loss: float | None) -> None:
        self._steps += 1
        if loss is not None:
            kept = 1 - 1 / self.window
            self._sum, self._n = self._sum + loss, self._n + 1
            self._faded, self._weight = loss + kept * self._faded, 1 + kept * self._weight
            self._part, self._part_n = self._part + loss, self._part_n + 1
        if self._steps % self.width == 0:
            self.curve.append(self._part / self._part_n if self._part_n else math.nan)
            self._part = self._part_n = 0.0
            if len(self.curve) == POINTS:
                self.curve = [(a + b) / 2 for a, b in zip(self.curve[::2], self.curve[1::2], strict=True)]
                self.width *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return all numbers, as plain values."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers of another run."""
        vars(self).update({name: state[name] for name in vars(self)})


def recoveries(curve: Sequence[float], width: int, regimes: Sequence[Regime]) -> list[dict[str, Any]]:
    """Return for each drift how many steps pass until the loss is within a tenth of where the regime ends.

    Args:
        curve: mean losses of windows.
        width: steps of a window.
        regimes: the regimes of the stream.

    Returns:
        For each regime after the first that the curve covers: "start", "regime", "end", the loss of its last
        window, and "steps", a multiple of `width`.
    """
    found = []
    for regime, part in _parts(curve, width, regimes)[1:]:
        end = part[-1]
        steps = next(i for i, loss in enumerate(part) if loss <= 1.1 * end or i == len(part) - 1)
        found.append({"start": regime.start, "regime": regime.name, "end": end, "steps": steps * width})
    return found


def forgotten(
    curve: Sequence[float], width: int, regimes: Sequence[Regime], untrained: float
) -> list[dict[str, Any]]:
    """Return the loss of memory of each regime that returns.

    Args:
        curve: mean losses of windows.
        width: steps of a window.
        regimes: the regimes of the stream.
        untrained: loss of an untrained learner on the stream.

    Returns:
        For each return: "start", "regime", "loss", the loss of the first window minus that of the last window
        before, and "retained", 1 - loss / (untrained - last): 1 if nothing was forgotten, None if nothing was
        learnt.
    """
    found, last = [], dict[str, float]()
    for regime, part in _parts(curve, width, regimes):
        if regime.name in last:
            loss, room = part[0] - last[regime.name], untrained - last[regime.name]
            retained = 1 - loss / room if room > 0 else None
            found.append({"start": regime.start, "regime": regime.name, "loss": loss, "retained": retained})
        last[regime.name] = part[-1]
    return found


def _parts(
    curve: Sequence[float], width: int, regimes: Sequence[Regime]
) -> list[tuple[Regime, Sequence[float]]]:
    """Return the windows that lie within each regime."""
    stops = [regime.start for regime in regimes[1:]] + [len(curve) * width]
    parts = ((r, curve[-(-r.start // width) : stop // width]) for r, stop in zip(regimes, stops, strict=True))
    return [(regime, part) for regime, part in parts if part]
