"""`python -m perf ops`: the operators, beside the yardstick and other implementations."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from perf import engine
from perf.engine import PASSES, Entry, Implementation, RefusedError, Report, Row, RowOptions
from perf.lines import ABOUT, CPU_LINES, CUDA_LINES, SLOW, measure_line
from perf.operations import OPERATIONS, case_of, make
from perf.peers import PEERS
from perf.table import draw_panels, number, old_passes_of, ratio, show_errors, show_missing, show_table, yes
from perf.timing import Bench, keep_freed_memory

PEER_PACKAGES = ("flash-linear-attention", "fla-core", "accelerated-scan", "mamba-ssm", "jax", "jaxlib")
PEERS_PER_TABLE = 4
# lengths of --grow: from the shortest by this factor
SHORTEST, FACTOR = 512, 4
CHANNELS = 64
LINREC = "linrec"


@dataclass(frozen=True)
class PeerOptions(RowOptions):
    """Options of the commands that measure operators.

    Args:
        peers: measure other implementations too, those that are installed.
        without: with --peers, the names of peers to leave out.
        out: folder for DEVICE.json, DEVICE-matrix.json or DEVICE-steps.json, and the files of --grow.
    """

    peers: bool = False
    without: tuple[str, ...] = ()
    out: Path = Path("results/ops")

    def chosen(self, peers: Sequence[Implementation]) -> list[Implementation]:
        """Return the peers that --peers and --without ask for."""
        if self.without and not self.peers:
            raise RefusedError("--without leaves peers out; pass --peers too.")
        engine.check_names("peer", self.without, [peer.name for peer in peers])
        return [peer for peer in peers if self.peers and peer.name not in self.without]


@dataclass(frozen=True)
class OpsOptions(PeerOptions):
    """Speed, memory and accuracy of the operators, against a copy of the same bytes.

    Args:
        grow: measure time against length instead of the rows, draw it, and write DEVICE-growth.json and .png.
        longest: with --grow, the greatest length; by default 2,097,152 on CUDA, 131,072 on the CPU.
    """

    grow: bool = False
    longest: int | None = None


# (batch, time, channels)
_LARGE, _LONG, _LONGEST, _SMALL = (8, 4096, 2048), (1, 65536, 2048), (1, 1048576, 64), (32, 1024, 512)
# as many numbers each, at first, then as many channels as fit with a million steps
_CONVOLVED = (
    *((16, 1024, 768), (4, 4096, 768), (1, 16384, 768), (1, 65536, 768)),
    *((1, 262144, 192), (1, 1048576, 48)),
)

CUDA_ROWS = (
    Row("scan", _LARGE, "f32", (90, 85)),
    Row("scan", _LARGE, "bf16", (80, 75)),
    Row("scan", _LONG, "f32", (80, 75)),
    Row("scan", _LONG, "bf16", (65, 60)),
    Row("scan", _LONGEST, "f32", (80, 75)),
    Row("scan", _LONGEST, "bf16", (65, 60)),
    Row("scan", _SMALL, "f32", (75, 70)),
    Row("scan", _SMALL, "bf16", (60, 55)),
    Row("scan", _LARGE, "c64", (85, 80)),
    Row("gate_loop", _LARGE, "f32", (80, 70)),
    Row("gate_loop", _LARGE, "bf16", (60, 50)),
    Row("selective", _LARGE, "bf16", (None, 55)),
    *(Row("conv", shape, dtype) for shape in _CONVOLVED for dtype in ("f32", "bf16")),
)

CPU_ROWS = tuple(
    Row(operation, (8, time, 512), dtype, targets)
    for time in (1024, 4096)
    for operation, dtype, targets in (
        ("scan", "f32", (80, 70)),
        ("scan", "c64", (65, None)),
        ("gate_loop", "f32", (50, None)),
        ("selective", "f32", (None, None)),
        ("conv", "f32", (None, None)),
    )
)


def rows_of(device_type: str, *, quick: bool = False) -> list[Row]:
    """Return the rows of a device; `quick` keeps their operations and dtypes, at a meaningless size."""
    rows = CUDA_ROWS if device_type == "cuda" else CPU_ROWS
    if not quick:
        return list(rows)
    kinds = dict.fromkeys((row.operation, row.dtype) for row in rows)
    return [Row(operation, (2, 64, 16), dtype, (50, 50)) for operation, dtype in kinds]


def operator_report(
    options: PeerOptions, command: str, bench: Bench, peers: Sequence[Implementation], suffix: str = ""
) -> Report:
    """Return the report of a command that measures operators, with its budget and its peers."""
    return Report(
        options,
        command,
        suffix,
        PEER_PACKAGES,
        budget=dataclasses.asdict(bench.budget),
        peers={peer.name: {"about": peer.about, "installed": peer.installed} for peer in peers},
    )


def with_yardstick(bench: Bench, *, quick: bool) -> tuple[Bench, dict[str, Any]]:
    """Return the bench with its yardstick, and the fields of it: on CUDA "copy_rate", measured here."""
    if bench.on_cuda:
        copy = bench.copy_rate(2**20 if quick else 2**30)
        return dataclasses.replace(bench, copy=copy), {"yardstick": "a copy on the device", "copy_rate": copy}
    return bench, {"yardstick": "torch.add(x, y, out=z)", "keeps_freed_memory": keep_freed_memory()}


def ops(options: OpsOptions, command: str) -> int:
    """Measure the operators, write and print the results; return the exit status."""
    peers, quick = options.chosen(PEERS), options.quick
    if options.grow:
        return grow(options, peers, command)
    if options.longest is not None:
        raise RefusedError("--longest is the greatest length of --grow; pass both.")
    lines: dict[str, Any] = {
        name: name
        for name in (CUDA_LINES if options.device == "cuda" else CPU_LINES)
        if not quick or options.rows or name not in SLOW
    }
    wanted = engine.selected(options.rows, engine.by_name(rows_of(options.device, quick=quick)) | lines)
    bench = engine.bench_of(options)
    report = operator_report(options, command, bench, peers)
    bench, fields = with_yardstick(bench, quick=quick)
    results = report.results
    results |= fields | {"rows": [], "lines": []}
    rows = {name: row for name, row in wanted.items() if name not in lines}
    report.measure(rows, lambda row: measure_row(bench, row, peers))
    report.measure(
        {name: name for name in wanted if name in lines},
        lambda name: measure_line(bench, name, quick=quick),
        key="lines",
    )
    return report.finish(show)


def measure_row(bench: Bench, row: Row, peers: Sequence[Implementation]) -> dict[str, Any]:
    """Check and time one row, and the peers on the same inputs; each pass has its "target" too."""
    case = case_of(row.operation, *make(row, bench.device))
    result = row.record(OPERATIONS[row.operation].checked, "shape") | engine.measure_case(bench, case, peers)
    for entry, target in zip(result.get("passes", {}).values(), row.targets, strict=False):
        met = None if target is None else entry["percent"] >= target
        entry |= {"target": target, "met": met}
    return result


def show(console: Console, results: dict[str, Any]) -> None:
    """Print times and rates, ratios to peers, the other numbers, and the errors."""
    rows = [row for row in results["rows"] if "passes" in row]

    def speed(entry: Entry) -> list[str]:
        ms, target = entry["ms"], entry["target"]
        return [
            number(ms["median"]),
            f"{number(ms['p20'])}-{number(ms['p80'])}",
            f"{entry['percent']:.0f}",
            "" if target is None else f"{target:.0f} {yes(entry['met'])}",
            number(entry["called_ms"]["median"]),
        ]

    if rows:
        title = f"milliseconds of a call, and percent of the rate of {results['yardstick']}"
        headings = ("row", "pass", "ms", "20%-80%", "%", "asked", "called")
        show_table(console, title, headings, old_passes_of(rows, speed), left=2)
        names = list(rows[0]["passes"][PASSES[0]]["peers"])
        for start in range(0, len(names), PEERS_PER_TABLE):
            show_ratios(console, rows, names[start : start + PEERS_PER_TABLE], ".3g")
        show_missing(console, [entry for row in rows for entry in row["passes"].values()])
    lines = [line for line in results["lines"] if "value" in line]
    if lines:
        cells = [
            [line["name"], line["about"], *(f"{line[key]:.3g} {line['unit']}" for key in ("value", "target"))]
            for line in lines
        ]
        show_table(
            console,
            "other numbers, each to be at most what is asked",
            ("row", ABOUT, "value", "asked", "met"),
            [[*given, yes(line["met"])] for given, line in zip(cells, lines, strict=True)],
            left=2,
            wrap=(ABOUT,),
        )
    show_errors(console, (*results["rows"], *results["lines"]))


def show_ratios(
    console: Console, rows: Sequence[dict[str, Any]], peers: Sequence[str], digits: str = ".2g"
) -> None:
    """Print linrec's time over the peers'."""
    title = "linrec's time / the peer's: below 1, linrec is faster"
    if any("asked" in entry for entry in rows[0]["passes"][PASSES[0]]["peers"].values()):
        title += "; whether as asked"
    lines = old_passes_of(rows, lambda entry: [ratio(entry["peers"][peer], digits) for peer in peers])
    show_table(console, title, ("row", "pass", *peers), lines, left=2)


def lengths(longest: int) -> list[int]:
    """Return the lengths of --grow up to `longest`."""
    found = [SHORTEST]
    while found[-1] * FACTOR <= longest:
        found.append(found[-1] * FACTOR)
    return found


def grow(options: OpsOptions, peers: Sequence[Implementation], command: str) -> int:
    """Measure time against length, write and draw it; return the exit status."""
    if options.rows:
        raise RefusedError("--grow measures no rows; leave --rows out.")
    if options.longest is not None and options.longest < SHORTEST:
        raise RefusedError(f"--longest must be at least {SHORTEST} steps; got {options.longest}.")
    bench = engine.bench_of(options)
    report = operator_report(options, command, bench, peers, "-growth")
    if not bench.on_cuda:
        report.results["keeps_freed_memory"] = keep_freed_memory()
    longest = options.longest or (2048 if options.quick else 2**21 if options.device == "cuda" else 2**17)
    growth = report.results["growth"] = measure_growth(bench, peers, longest)
    report.write()
    print(f"wrote {report.path}")
    if growth["points"]:
        print(f"wrote {draw(growth, report.path.with_suffix('.png'))}")
    if "error" in growth:
        print(growth["error"], file=sys.stderr)
    return int("error" in growth)


def measure_growth(bench: Bench, peers: Sequence[Implementation], longest: int) -> dict[str, Any]:
    """Time scan, float32, batch 1, at growing lengths, each checked before."""
    result: dict[str, Any] = {"batch": 1, "channels": CHANNELS, "dtype": "float32", "points": []}
    for length in lengths(longest):
        row = Row("scan", (1, length, CHANNELS), "f32")
        engine.say(row.name)
        case = case_of("scan", *make(row, bench.device))
        if wrong := engine.failure(case.check):
            return result | {"error": f"{row.name}: {wrong}"}
        passes = case.calls.passes.items()
        measured = {LINREC: {name: engine.timed(bench, call, replayed=True) for name, call in passes}}
        outputs = case.calls.outputs()
        for peer in peers:
            measured[peer.name], _ = engine.measure_peer(bench, peer, case, outputs)
        result["points"] += [
            {"length": length, "implementation": name, "pass": one, **entry}
            for name, entries in measured.items()
            for one, entry in entries.items()
        ]
    return result


def draw(growth: dict[str, Any], path: Path) -> Path:
    """Draw nanoseconds per element against length, for each pass."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.ticker import LogLocator

    points = [point for point in growth["points"] if "ms" in point]
    names = list(dict.fromkeys(point["implementation"] for point in points))

    def curve(one: str, name: str) -> tuple[list[float], list[float]]:
        mine = [point for point in points if (point["pass"], point["implementation"]) == (one, name)]
        elements = [point["length"] * growth["channels"] for point in mine]
        times = [1e6 * point["ms"]["median"] for point in mine]
        return [p["length"] for p in mine], [ns / n for ns, n in zip(times, elements, strict=True)]

    def finish(axes: Any, one: str) -> None:
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0,), numticks=7))

    widths = [2.4 if name == LINREC else 1.4 for name in names]
    return draw_panels(
        path, PASSES, names, curve, y="ns per element", share_y=True, widths=widths, finish=finish
    )
