"""Streams of real numbers: drifting sines, Mackey-Glass, trace patterning, and bouncing digits."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
from numba import njit
from typing_extensions import override

from linrec.lab.streams.base import Arrays, Drawn, Regime, Stream, spans
from linrec.lab.streams.glyphs import glyphs
from linrec.rules import at_least, require

__all__ = ["BouncingGlyphs", "MackeyGlassDrift", "Sines", "TracePatterning"]

SUBSTEPS = 10
Predictor: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function of inputs (t, f) and targets (t, m) that returns predictions (t, m)."""


@dataclass(kw_only=True)
class Sines(Stream):
    """Predict the next value of a sum of sines whose frequencies drift, and jump.

        u_t = sum_k sin(phi_k(t)) / n,    phi_k(t + 1) = phi_k(t) + 2 pi f_k(t),    y_t = u_{t+1}

    At each jump, every frequency is drawn log-uniformly between 1/100 and 1/10 per step, and so is where it
    moves to, in a straight line, until the next jump.

    Args:
        sines: number n of sines.
        every: steps between jumps.
    """

    sines: int = 3
    every: int = 10_000
    name: ClassVar[str] = "sines"
    n_features: ClassVar[int | None] = 1
    n_outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, every=self.every, sines=self.sines)

    @cached_property
    @override
    def bounds(self) -> Mapping[str, float]:
        return measured_bounds(self, FORECASTS)

    @override
    def regimes(self, steps: int) -> list[Regime]:
        return [Regime(start, f"frequencies {i + 1}") for i, start, _ in spans(0, steps, self.every)]

    @override
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        shape = (self.rows, self.sines)
        phases = carried.get("phases", random.uniform(0, 2 * math.pi, shape))
        # the first value of the next block too
        values = np.empty((self.rows, self.block + 1))
        values[:, 0] = np.sin(phases).mean(1)
        for i, begin, end in spans(start, start + self.block, self.every):
            first, last = np.exp(self.random(i, 1).uniform(math.log(0.01), math.log(0.1), (2, *shape)))
            share = (np.arange(begin, end) - i * self.every) / self.every
            moves = 2 * math.pi * (first[:, None] + share[:, None] * (last - first)[:, None])
            path = phases[:, None] + moves.cumsum(1)
            phases = path[:, -1] % (2 * math.pi)
            values[:, begin - start + 1 : end - start + 1] = np.sin(path).mean(2)
        series = values.astype(np.float32)[:, :, None]
        return Drawn(series[:, :-1], series[:, 1:]), {"phases": phases}


@dataclass(kw_only=True)
class MackeyGlassDrift(Stream):
    """Forecast a chaotic series, 1 and 10 steps ahead, whose delay drifts from 17 to 30 and back.

        dx/ds = 0.2 x(s - tau) / (1 + x(s - tau)^10) - 0.1 x(s)      by Euler's method with steps of 0.1
        u_t = tanh(x(t) - 1),    y_t = (u_{t+1}, u_{t+10})

    Args:
        tau: smallest and largest delay, in steps.
        every: steps from the smallest delay to the largest.
        ahead: numbers of steps that are forecast, in rising order.

    Source: Mackey and Glass (1977).
    """

    tau: tuple[float, float] = (17.0, 30.0)
    every: int = 50_000
    ahead: tuple[int, ...] = (1, 10)
    name: ClassVar[str] = "mackey-glass"
    n_features: ClassVar[int | None] = 1

    @property
    def n_outputs(self) -> int:  # type: ignore[override]
        """The number of forecasts."""
        return len(self.ahead)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            min(self.ahead, default=0) > 0 and sorted(self.ahead) == [*self.ahead],
            f"`ahead` must be numbers of steps from 1 in rising order; got {self.ahead}.",
        )
        at_least(1, every=self.every, tau=min(self.tau))
        require(self.tau[0] <= self.tau[1], f"`tau` must be (smallest, largest); got {self.tau}.")

    @cached_property
    @override
    def bounds(self) -> Mapping[str, float]:
        return measured_bounds(self, FORECASTS)

    @override
    def regimes(self, steps: int) -> list[Regime]:
        return [
            Regime(start, "longer" if i % 2 == 0 else "shorter")
            for i, start, _ in spans(0, steps, self.every)
        ]

    @override
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        longest = int(self.tau[1] * SUBSTEPS) + 1
        if not carried:
            past = 1.1 + 0.2 * random.random((self.rows, longest))
            past, values = _mackey_glass(past, np.full(200 * SUBSTEPS, int(self.tau[0] * SUBSTEPS)))
            carried = {"past": past, "values": values[:, -self.ahead[-1] :]}
        # the values of a block are those of its targets
        places = (start + np.arange(self.block)) / self.every % 2
        tau = self.tau[0] + (self.tau[1] - self.tau[0]) * (1 - np.abs(places - 1))
        past, values = _mackey_glass(carried["past"], np.repeat((tau * SUBSTEPS).astype(np.int64), SUBSTEPS))
        series = np.concatenate([carried["values"], values], 1)
        squashed = np.tanh(series - 1).astype(np.float32)
        targets = np.stack([squashed[:, n : n + self.block] for n in self.ahead], 2)
        return Drawn(squashed[:, : self.block, None], targets), {
            "past": past,
            "values": series[:, -self.ahead[-1] :],
        }


@njit(cache=True)
def _mackey_glass(past: np.ndarray, delays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the latest values, oldest first, and x after every ten substeps; each substep has its delay."""
    rows, longest = past.shape
    values = np.empty((rows, len(delays) // SUBSTEPS))
    kept = np.empty_like(past)
    for row in range(rows):
        ring = past[row].copy()
        for s in range(len(delays)):
            x, delayed = ring[(s - 1) % longest], ring[(s - delays[s]) % longest]
            x += (0.2 * delayed / (1 + delayed**10) - 0.1 * x) / SUBSTEPS
            ring[s % longest] = x
            if s % SUBSTEPS == SUBSTEPS - 1:
                values[row, s // SUBSTEPS] = x
        for i in range(longest):
            kept[row, i] = ring[(len(delays) + i) % longest]
    return kept, values


@dataclass(kw_only=True)
class TracePatterning(Stream):
    """Predict a reward that follows some patterns after a pause, among distractors.

    A trial shows a pattern of 3 ones among 6 bits for a step. 10 of the 20 patterns are valid: after them,
    the reward bit is 1 once, `pause` steps later. `rest` steps follow. Five further bits come at rates 1/10,
    1/20, .. 1/50. The target is the return, discount^(steps to the reward - 1), and 0 without a reward ahead
    in the trial.

    Args:
        pause: smallest and largest number of steps from a pattern to its reward.
        rest: smallest and largest number of steps from there to the next trial.
        discount: factor of a reward per step.

    Source: Javed, Shah, Sutton and White, Scalable Real-Time Recurrent Learning Using Columnar-Constructive
    Networks (2023): `pause=(24, 36), rest=(80, 120)`, discount 0.9. The defaults here fit into minutes.
    """

    pause: tuple[int, int] = (4, 6)
    rest: tuple[int, int] = (5, 8)
    discount: float = 0.9
    name: ClassVar[str] = "trace-patterning"
    n_features: ClassVar[int | None] = 12
    n_outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, pause=min(self.pause), rest=min(self.rest))
        require(0 < self.discount < 1, f"`discount` must be in (0, 1); got {self.discount}.")

    @cached_property
    @override
    def bounds(self) -> Mapping[str, float]:
        return measured_bounds(self, {"best constant": _constant})

    @override
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        of_stream = self.random(0, 1)
        patterns = np.array([[i >> bit & 1 for bit in range(6)] for i in range(64) if i.bit_count() == 3])
        valid = np.isin(np.arange(20), of_stream.permutation(20)[:10])
        inputs = np.zeros((self.rows, self.block, 12), np.float32)
        targets = np.zeros((self.rows, self.block, 1), np.float32)
        rates = 1 / np.arange(10, 60, 10)
        inputs[:, :, 6:11] = random.random((self.rows, self.block, 5)) < rates
        # a trial that began before: when its reward comes, and when the next trial begins
        reward, following = (
            carried.get(name, np.full(self.rows, of)) for name, of in (("reward", -1), ("next", 0))
        )
        reward, following = reward.copy(), following.copy()
        for row in range(self.rows):
            begin = 0
            while begin < self.block:
                end = min(int(following[row]), self.block)
                self._reward(inputs[row], targets[row], begin, end, int(reward[row]))
                if end == self.block:
                    break
                chosen = int(random.integers(20))
                inputs[row, end, :6] = patterns[chosen]
                pause = int(random.integers(self.pause[0], self.pause[1] + 1))
                reward[row] = end + pause if valid[chosen] else -1
                begin, following[row] = (
                    end,
                    end + pause + int(random.integers(self.rest[0], self.rest[1] + 1)),
                )
        return Drawn(inputs, targets), {
            "reward": np.where(reward < self.block, -1, reward - self.block),
            "next": following - self.block,
        }

    def _reward(self, inputs: np.ndarray, targets: np.ndarray, begin: int, end: int, reward: int) -> None:
        """Write a trial's reward, and its returns, between two steps."""
        if reward < 0:
            return
        steps = np.arange(begin, min(end, reward))
        targets[steps, 0] = self.discount ** (reward - steps - 1)
        if begin <= reward < end:
            inputs[reward, 11] = 1


@dataclass(kw_only=True)
class BouncingGlyphs(Stream):
    """Predict the next frame of films of two bouncing glyphs: digits, then letters, then shapes.

        frame_t = max over the glyphs at their positions,    y_t = frame_{t+1}

    Frames have 16 x 16 pixels, glyphs 8 x 8. A film has 20 frames; a glyph moves 0.8 pixels a frame, in a
    direction of its own. Inputs are pixels. The last step of a film has no target.

    Args:
        films: films of each set of glyphs, again and again.

    Source: after Srivastava, Mansimov and Salakhutdinov (2015), and Ororbia and others (2020) for the order
    of sets.
    """

    films: int = 2000
    name: ClassVar[str] = "bouncing-digits"
    n_features: ClassVar[int | None] = 256
    n_outputs: ClassVar[int] = 256
    block: ClassVar[int] = 1000
    size: ClassVar[int] = 16
    frames: ClassVar[int] = 20
    speed: ClassVar[float] = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, films=self.films)

    @cached_property
    @override
    def bounds(self) -> Mapping[str, float]:
        return measured_bounds(self, {"last frame": _last_value})

    @override
    def regimes(self, steps: int) -> list[Regime]:
        every = self.films * self.frames
        return [
            Regime(start, ("digits", "letters", "shapes")[i % 3]) for i, start, _ in spans(0, steps, every)
        ]

    @override
    def draw(self, start: int, random: np.random.Generator, carried: Arrays) -> tuple[Drawn, Arrays]:
        n = self.block // self.frames
        numbers = start // self.frames + np.arange(n)
        drawn = np.stack(
            [self._film(random, int(i) // self.films % 3) for _ in range(self.rows) for i in numbers]
        )
        frames = drawn.reshape(self.rows, self.block, -1)
        targets = np.concatenate([drawn[:, 1:], np.full_like(drawn[:, :1], np.nan)], 1)
        return Drawn(frames, targets.reshape(frames.shape)), {}

    def held_out(self, kind: int, n: int = 100) -> Drawn:
        """Return films that the stream does not draw, of one set of glyphs."""
        random = self.random(kind, 2)
        films = np.stack([self._film(random, kind) for _ in range(n)]).reshape(n, self.frames, -1)
        return Drawn(films[:, :-1], films[:, 1:])

    def _film(self, random: np.random.Generator, kind: int) -> np.ndarray:
        chosen = glyphs(kind)[random.integers(0, 10, 2)]
        free = self.size - chosen.shape[-1]
        place = random.uniform(0, free, (2, 2))
        angle = random.uniform(0, 2 * math.pi, 2)
        velocity = self.speed * np.stack([np.sin(angle), np.cos(angle)], 1)
        film = np.zeros((self.frames, self.size, self.size), np.float32)
        for frame in film:
            for glyph, (top, left) in zip(chosen, place.round().astype(int), strict=True):
                part = frame[top : top + len(glyph), left : left + len(glyph)]
                np.maximum(part, glyph, out=part)
            place = place + velocity
            velocity = np.where((place < 0) | (place > free), -velocity, velocity)
            place = place.clip(0, free)
        return film


def measured_bounds(stream: Stream, ways: Mapping[str, Predictor]) -> dict[str, float]:
    """Return mean squared errors of simple predictors, on the first 20,000 steps of one row."""
    piece = dataclasses.replace(stream, rows=1).read(20_000)
    inputs, targets = piece.inputs[0].double().numpy(), piece.targets[0].double().numpy()
    kept = ~np.isnan(targets[:, 0])
    return {
        name: float(np.mean((way(inputs, targets)[kept] - targets[kept]) ** 2)) for name, way in ways.items()
    }


def _last_value(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.broadcast_to(inputs[:, : targets.shape[1]] if inputs.shape[1] > 1 else inputs, targets.shape)


def _constant(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.broadcast_to(targets.mean(0), targets.shape)


def _autoregression(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Predict from the last 16 values by recursive least squares that forget within a thousand steps."""
    order, forgetting = 16, 0.999
    P, w = np.eye(order + 1) * 1e3, np.zeros((order + 1, targets.shape[1]))
    found = np.zeros_like(targets)
    padded = np.concatenate([np.zeros(order - 1), inputs[:, 0]])
    for t, y in enumerate(targets):
        x = np.append(padded[t : t + order], 1.0)
        found[t] = x @ w
        k = P @ x / (forgetting + x @ P @ x)
        w += np.outer(k, y - found[t])
        P = (P - np.outer(k, x @ P)) / forgetting
        P = (P + P.T) / 2
    return found


FORECASTS: Mapping[str, Predictor] = {
    "last value": _last_value,
    "16 values by least squares": _autoregression,
}
