"""Time per element against length, beside peers: the recurrence is linear in time, and should stay so."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from perf.check import check
from perf.operations import OPERATIONS, make
from perf.ops import measure_peer
from perf.peers import Peer, reason, torch_calls
from perf.rows import PASSES, Row
from perf.timing import Budget, measure

SHORTEST = 512
FACTOR = 4
CHANNELS = 64
LINREC = "linrec"


def lengths(longest: int) -> list[int]:
    """Return the lengths that are measured: from 512 by factors of 4, up to `longest`.

    Example:
        >>> lengths(10_000)
        [512, 2048, 8192]
    """
    found = []
    length = SHORTEST
    while length <= longest:
        found.append(length)
        length *= FACTOR
    return found


def measure_growth(
    device: torch.device, budget: Budget, peers: Sequence[Peer], longest: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time scan, float32, batch 1, at growing lengths.

    Returns:
        What JSON holds of it: "points", each with length, implementation, pass and "ms" or "missing";
        "error" where an output was wrong.
    """
    result: dict[str, Any] = {"batch": 1, "channels": CHANNELS, "dtype": "float32", "points": []}
    run = OPERATIONS["scan"].run
    for length in lengths(longest):
        row = Row("scan", (1, length, CHANNELS), "f32", (None, None))
        say(row.name)
        inputs, dy = make(row, device)
        try:
            check("scan", run, inputs, dy)
        except Exception as error:
            return result | {"error": f"{row.name}: {reason(error)}"}
        linrec = torch_calls(run, inputs, dy)
        measured = {
            LINREC: {
                name: {"ms": dataclasses.asdict(measure(call, device, budget, replayed=True))}
                for name, call in zip(PASSES, (linrec.forward, linrec.both), strict=True)
            }
        }
        y = linrec.output()
        for peer in peers:
            measured[peer.name] = measure_peer(peer, "scan", inputs, dy, y, device, budget)
        result["points"] += [
            {"length": length, "implementation": who, "pass": name, **entry}
            for who, entries in measured.items()
            for name, entry in entries.items()
        ]
    return result


def draw(growth: dict[str, Any], path: Path) -> Path:
    """Draw nanoseconds per element against length, forward on the left, forward and backward on the right."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    from linrec.lab.report import style

    points = [point for point in growth["points"] if "ms" in point]
    names = list(dict.fromkeys(point["implementation"] for point in points))
    figure = style.make_figure(3.0)
    both = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(both, PASSES, strict=True):
        handles: list[Line2D] = []
        for number, who in enumerate(names):
            mine = [p for p in points if p["pass"] == name and p["implementation"] == who]
            (line,) = axes.plot(
                [p["length"] for p in mine],
                [1e6 * p["ms"]["median"] / (p["length"] * growth["channels"]) for p in mine],
                marker="o",
                markersize=3,
                linewidth=2.4 if who == LINREC else 1.4,
                color=style.colour(number),
                label=who,
            )
            handles.append(line)
        axes.set_title(name, fontsize=style.LETTERS)
        style.finish_axes(axes, x="length (steps)", y="ns per element" if axes is both[0] else "")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0,), numticks=7))
    style.add_legend(figure, handles)
    return style.save(figure, path)
