"""The command line: `python -m benchmarks ops`, from the root of the repository."""

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from benchmarks.grow import SHORTEST, draw, measure_growth
from benchmarks.lines import measure_line
from benchmarks.ops import measure_row
from benchmarks.peers import PEERS, Peer
from benchmarks.rows import Row, lines_of, rows_of, select
from benchmarks.table import show
from benchmarks.timing import Budget, copy_rate, keep_freed_memory
from linrec.errors import unknown
from linrec.train.provenance import provenance

PEER_PACKAGES = ("flash-linear-attention", "fla-core", "accelerated-scan", "jax", "jaxlib")
HELP = "usage: python -m benchmarks ops ...\n\n`python -m benchmarks ops --help` says more."


@dataclass(frozen=True)
class OpsOptions:
    """Speed, memory and accuracy of the operators, against a copy of the same bytes.

    Args:
        device: where to measure; by default on CUDA where there is one.
        rows: names of the rows to measure, all by default; a name that does not exist lists them.
        peers: measure other implementations too, those that are installed.
        without: with --peers, the names of those to leave out.
        grow: measure time against length instead of the rows, and draw it.
        longest: with --grow, the greatest length; by default 2,097,152 on CUDA, 131,072 on the CPU.
        out: folder for DEVICE.json, or with --grow for DEVICE-growth.json and DEVICE-growth.png.
        quick: tiny sizes and few repetitions, to see that all of it runs; the numbers mean nothing.
    """

    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    rows: tuple[str, ...] = ()
    peers: bool = False
    without: tuple[str, ...] = ()
    grow: bool = False
    longest: int | None = None
    out: Path = Path("results/ops")
    quick: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 where a row was wrong or failed, or 2 for what the user got wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] != ["ops"]:
        print(HELP, file=sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    try:
        options = tyro.cli(OpsOptions, args=words[1:], prog="python -m benchmarks ops")
    except SystemExit as stop:
        return 2 if stop.code else 0
    if options.device == "cuda" and not torch.cuda.is_available():
        return _refuse("there is no CUDA device here; pass --device cpu.")
    try:
        peers = _peers(options)
    except ValueError as error:
        return _refuse(error)
    command = shlex.join(["python", "-m", "benchmarks", *words])
    if options.grow:
        if options.rows:
            return _refuse("--grow measures no rows; leave --rows out.")
        if options.longest is not None and options.longest < SHORTEST:
            return _refuse(f"--longest must be at least {SHORTEST} steps; got {options.longest}.")
        return grow(options, peers, command)
    if options.longest is not None:
        return _refuse("--longest is the greatest length of --grow; pass both.")
    try:
        rows, lines = select(
            options.rows,
            rows_of(options.device, quick=options.quick),
            lines_of(options.device, quick=options.quick and not options.rows),
        )
    except ValueError as error:
        return _refuse(error)
    return ops(options, rows, lines, peers, command)


def ops(
    options: OpsOptions, rows: Sequence[Row], lines: Sequence[str], peers: Sequence[Peer], command: str
) -> int:
    """Measure the rows and the lines, write them, print them; return the exit status."""
    device, budget = torch.device(options.device), _budget(options)
    results = _about(device, budget, peers, command)
    copy = None
    if device.type == "cuda":
        copy = copy_rate(device, budget, 2**20 if options.quick else 2**30)
        results |= {"yardstick": "a copy on the device", "copy_rate": copy}
    else:
        results |= {"yardstick": "torch.add(x, y, out=z)", "keeps_freed_memory": keep_freed_memory()}
    results |= {"rows": [], "lines": []}

    path = options.out / f"{_file_name(results)}.json"
    for row in rows:
        _say(row.name)
        results["rows"].append(measure_row(row, device, budget, peers, copy))
        # what is measured is not lost when the rest is stopped
        _write(path, results)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for line in lines:
        _say(line)
        results["lines"].append(measure_line(line, device, budget, quick=options.quick))
        _write(path, results)
    show(Console(width=min(Console().width, 80)), results)
    print(f"\nwrote {path}")
    return int(any("error" in result for result in (*results["rows"], *results["lines"])))


def grow(options: OpsOptions, peers: Sequence[Peer], command: str) -> int:
    """Measure time against length, write it, draw it; return the exit status."""
    device, budget = torch.device(options.device), _budget(options)
    results = _about(device, budget, peers, command)
    if device.type == "cpu":
        results["keeps_freed_memory"] = keep_freed_memory()
    longest = options.longest or (2048 if options.quick else 2**21 if device.type == "cuda" else 2**17)
    growth = measure_growth(device, budget, peers, longest, _say)
    results["growth"] = growth
    path = options.out / f"{_file_name(results)}-growth.json"
    _write(path, results)
    print(f"wrote {path}")
    if growth["points"]:
        print(f"wrote {draw(growth, path.with_suffix('.png'))}")
    if "error" in growth:
        print(growth["error"], file=sys.stderr)
    return int("error" in growth)


def _peers(options: OpsOptions) -> list[Peer]:
    if options.without and not options.peers:
        raise ValueError("--without leaves peers out; pass --peers too.")
    names = [peer.name for peer in PEERS]
    for name in options.without:
        if name not in names:
            raise unknown("peer", name, names)
    return [peer for peer in PEERS if options.peers and peer.name not in options.without]


def _budget(options: OpsOptions) -> Budget:
    return Budget(1, 5) if options.quick else Budget()


def _about(device: torch.device, budget: Budget, peers: Sequence[Peer], command: str) -> dict[str, Any]:
    about = provenance(device)
    for package in PEER_PACKAGES:
        try:
            about["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": command,
        **about,
        "budget": dataclasses.asdict(budget),
        "peers": {peer.name: {"about": peer.about, "installed": peer.installed} for peer in peers},
    }


def _file_name(results: dict[str, Any]) -> str:
    return re.sub("[^a-z0-9]+", "-", results["device"]["name"].lower()).strip("-")


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def _refuse(what: object) -> int:
    print(f"benchmarks: {what}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
