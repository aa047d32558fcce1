"""`python -m perf ops`: the operators."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from linrec.errors import unknown
from perf.commands.results import Options, RefusedError, about, file_name, measure_rows, say, write
from perf.grow import SHORTEST, draw, measure_growth
from perf.lines import measure_line
from perf.ops import measure_row
from perf.peers import PEERS, Implementation, Peer
from perf.rows import R, lines_of, rows_of, select
from perf.table import show
from perf.timing import Budget, copy_rate, keep_freed_memory

PEER_PACKAGES = ("flash-linear-attention", "fla-core", "accelerated-scan", "mamba-ssm", "jax", "jaxlib")

P = TypeVar("P", bound=Implementation)


@dataclass(frozen=True)
class RowOptions(Options):
    """Options of the commands that measure rows.

    Args:
        rows: names of the rows to measure, all by default; a name that does not exist lists them.
        peers: measure other implementations too, those that are installed.
        without: with --peers, the names of peers to leave out.
        out: folder for DEVICE.json, DEVICE-matrix.json or DEVICE-steps.json, and what --grow writes.
    """

    rows: tuple[str, ...] = ()
    peers: bool = False
    without: tuple[str, ...] = ()
    out: Path = Path("results/ops")


@dataclass(frozen=True)
class OpsOptions(RowOptions):
    """Speed, memory and accuracy of the operators, against a copy of the same bytes.

    Args:
        grow: measure time against length instead of the rows, draw it, and write DEVICE-growth.json and .png.
        longest: with --grow, the greatest length; by default 2,097,152 on CUDA, 131,072 on the CPU.
    """

    grow: bool = False
    longest: int | None = None


def ops(options: OpsOptions, command: str) -> int:
    """Measure the operators; return the exit status.

    Raises:
        RefusedError: options that do not fit together, or a name that does not exist.
    """
    peers = chosen(PEERS, options.peers, options.without)
    if options.grow:
        if options.rows:
            raise RefusedError("--grow measures no rows; leave --rows out.")
        if options.longest is not None and options.longest < SHORTEST:
            raise RefusedError(f"--longest must be at least {SHORTEST} steps; got {options.longest}.")
        return _grow(options, peers, command)
    if options.longest is not None:
        raise RefusedError("--longest is the greatest length of --grow; pass both.")
    every = rows_of(options.device, quick=options.quick)
    lines = lines_of(options.device, quick=options.quick and not options.rows)
    rows, lines = selected(options, every, lines)
    device, budget = torch.device(options.device), budget_of(quick=options.quick)
    results = protocol(device, budget, peers, command) | yardstick(device, budget, quick=options.quick)
    copy = results.get("copy_rate")
    results |= {"rows": [], "lines": []}

    path = options.out / f"{file_name(results)}.json"
    measure_rows(rows, lambda row: measure_row(row, device, budget, peers, copy), results, path)
    for line in lines:
        say(line)
        results["lines"].append(measure_line(line, device, budget, quick=options.quick))
        write(path, results)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in result for result in (*results["rows"], *results["lines"])))


def _grow(options: OpsOptions, peers: Sequence[Peer], command: str) -> int:
    """Measure time against length, write it, draw it; return the exit status."""
    device, budget = torch.device(options.device), budget_of(quick=options.quick)
    results = protocol(device, budget, peers, command)
    if device.type == "cpu":
        results["keeps_freed_memory"] = keep_freed_memory()
    longest = options.longest or (2048 if options.quick else 2**21 if device.type == "cuda" else 2**17)
    growth = measure_growth(device, budget, peers, longest, say)
    results["growth"] = growth
    path = options.out / f"{file_name(results)}-growth.json"
    write(path, results)
    print(f"wrote {path}")
    if growth["points"]:
        print(f"wrote {draw(growth, path.with_suffix('.png'))}")
    if "error" in growth:
        print(growth["error"], file=sys.stderr)
    return int("error" in growth)


def chosen(peers: Sequence[P], wanted: bool, without: Sequence[str]) -> list[P]:
    """Return the peers that --peers and --without ask for.

    Raises:
        RefusedError: peers are left out where none are asked for, or there is none of such a name.
    """
    if without and not wanted:
        raise RefusedError("--without leaves peers out; pass --peers too.")
    names = [peer.name for peer in peers]
    for name in without:
        if name not in names:
            raise RefusedError(unknown("peer", name, names))
    return [peer for peer in peers if wanted and peer.name not in without]


def selected(options: RowOptions, rows: Sequence[R], lines: Sequence[str] = ()) -> tuple[list[R], list[str]]:
    """Return the rows and lines that --rows asks for.

    Raises:
        RefusedError: there is none of such a name.
    """
    try:
        return select(options.rows, rows, lines)
    except ValueError as error:
        raise RefusedError(error) from error


def budget_of(*, quick: bool) -> Budget:
    """Return how long each call is measured."""
    return Budget(1, 5) if quick else Budget()


def yardstick(device: torch.device, budget: Budget, *, quick: bool) -> dict[str, Any]:
    """Return what JSON holds of what operators are compared with: on CUDA "copy_rate", measured here."""
    if device.type == "cuda":
        copy = copy_rate(device, budget, 2**20 if quick else 2**30)
        return {"yardstick": "a copy on the device", "copy_rate": copy}
    return {"yardstick": "torch.add(x, y, out=z)", "keeps_freed_memory": keep_freed_memory()}


def protocol(
    device: torch.device, budget: Budget, peers: Sequence[Implementation], command: str
) -> dict[str, Any]:
    """Return what JSON holds of where, with what, beside whom and for how long it was measured."""
    return {
        **about(device, command, PEER_PACKAGES),
        "budget": dataclasses.asdict(budget),
        "peers": {peer.name: {"about": peer.about, "installed": peer.installed} for peer in peers},
    }
