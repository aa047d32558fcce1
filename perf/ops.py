"""`python -m perf ops`: the operators, beside the yardstick and other implementations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from perf import engine
from perf.command import RefusedError, RowCommand, check_names
from perf.engine import PASSES, Calls, Implementation, Record
from perf.lines import LINES, Line
from perf.operations import OPERATIONS, Row, calls_of, make
from perf.peers import PEERS
from perf.table import Part, Table, draw_panels, errors, missing_peers, passes_of
from perf.timing import Bench

PEERS_PER_TABLE = 4
# lengths of --grow: from the shortest by this factor
SHORTEST, FACTOR = 512, 4
CHANNELS = 64


@dataclass(frozen=True)
class PeerCommand(RowCommand):
    """Base of the commands that measure operators.

    Args:
        peers: measure other implementations too, those that are installed.
        without: with --peers, the names of peers to leave out.
    """

    peers: bool = False
    without: tuple[str, ...] = ()

    folder = "ops"
    packages = ("flash-linear-attention", "fla-core", "accelerated-scan", "mamba-ssm", "jax", "jaxlib")
    known: ClassVar[Sequence[Implementation]]

    def chosen(self) -> dict[str, Any]:
        if self.without and not self.peers:
            raise RefusedError("--without leaves peers out; pass --peers too.")
        check_names("peer", self.without, [peer.name for peer in self.known])
        return super().chosen()

    @property
    def measured_peers(self) -> list[Implementation]:
        return [peer for peer in self.known if self.peers and peer.name not in self.without]

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        peers = {
            peer.name: {"about": peer.about, "installed": peer.installed} for peer in self.measured_peers
        }
        bench, yardstick = bench.with_copy(quick=self.quick)
        return bench, {"budget": bench.budget._asdict(), "peers": peers, **yardstick}

    def beside_peers(self, bench: Bench, calls: Calls, *given: Any, memory: bool = False) -> Record:
        """Measure linrec's calls and the peers on the same arguments; each pass is linrec's, with "peers"."""
        peers = {peer.name: partial(peer.calls, *given) for peer in self.measured_peers}
        implementations = {"linrec": lambda: calls} | peers
        found = engine.measure_each(bench, implementations, "linrec", compared=True, memory=memory)
        for one, entries in found.get("passes", {}).items():
            found["passes"][one] = {**entries.pop("linrec"), "peers": entries}
        if peaks := found.pop("peaks", {}):
            found |= {"peak_bytes": peaks.pop("linrec"), "peers_peak_bytes": peaks}
        return found


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


@dataclass(frozen=True)
class Ops(PeerCommand):
    """Speed, memory and accuracy of the operators, against a copy of the same bytes.

    Args:
        grow: measure scan at growing lengths instead, draw time against length, and write DEVICE-growth.json
            and .png.
        longest: with --grow, the greatest length; by default 2,097,152 on CUDA, 131,072 on the CPU.
    """

    grow: bool = False
    longest: int | None = None

    known = PEERS

    @property
    def suffix(self) -> str:
        return "-growth" if self.grow else ""

    def chosen(self) -> dict[str, Row | Line]:
        if self.grow and self.rows:
            raise RefusedError("--grow measures no rows; leave --rows out.")
        if self.longest is not None and not self.grow:
            raise RefusedError("--longest is the greatest length of --grow; pass both.")
        if self.longest is not None and self.longest < SHORTEST:
            raise RefusedError(f"--longest must be at least {SHORTEST} steps; got {self.longest}.")
        return super().chosen()

    def all_rows(self) -> list[Row | Line]:
        on_cuda = self.device == "cuda"
        if self.grow:
            longest = self.longest or (2048 if self.quick else 2**21 if on_cuda else 2**17)
            return [Row("scan", (1, length, CHANNELS), "f32") for length in lengths(longest)]
        rows = list(CUDA_ROWS if on_cuda else CPU_ROWS)
        if self.quick:
            kinds = dict.fromkeys((row.operation, row.dtype) for row in rows)
            rows = [Row(operation, (2, 64, 16), dtype, (50, 50)) for operation, dtype in kinds]
        lines = [line for line in LINES if on_cuda or line.on_cpu]
        return [*rows, *(line for line in lines if self.rows or not (self.quick and line.slow))]

    def measure(self, bench: Bench, row: Row | Line) -> Record:
        if isinstance(row, Line):
            return row.measured(bench, quick=self.quick)
        given = (row.operation, *make(row, bench.device))
        found = self.beside_peers(bench, calls_of(*given), *given)
        for entry, target in zip(found.get("passes", {}).values(), row.targets, strict=False):
            entry |= {"target": target, "met": None if target is None else entry["percent"] >= target}
        return {**row.head(), "checked": OPERATIONS[row.operation].checked, **found}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        rows, lines = results["rows"], results.get("lines", ())
        passes = passes_of(rows)
        yield Table(
            f"milliseconds of a call, and percent of the rate of {results['yardstick']}",
            "row {name} | pass {pass} | ms {ms[median]:digits} | "
            "20%-80% {ms[p20]:digits}-{ms[p80]:digits} | % {percent:.0f} | "
            "asked {target:.0f} {met:yes} | called {called_ms[median]:digits}",
            passes,
            left=2,
        )
        names = list(results["peers"])
        for start in range(0, len(names), PEERS_PER_TABLE):
            yield ratios(passes, names[start : start + PEERS_PER_TABLE], ".3g")
        yield from missing_peers(passes)
        yield Table(
            "other numbers, each to be at most what is asked",
            "row {name} | what it is {about} | value {value:.3g} {unit} | asked {target:.3g} {unit} | "
            "met {met:yes}",
            [line for line in lines if "value" in line],
            left=2,
            wrap=("what it is",),
        )
        yield from errors((*rows, *lines))

    def draw(self, results: Record, path: Path) -> Path | None:
        measured = any("passes" in row for row in results["rows"])
        return draw_growth(results, path) if self.grow and measured else None


def ratios(passes: Sequence[Mapping[str, Any]], peers: Sequence[str], digits: str = ".2g") -> Table:
    title = "linrec's time / the peer's: below 1, linrec is faster"
    if any("asked" in peer for entry in passes for peer in entry["peers"].values()):
        title += "; whether as asked"
    columns = ["row {name}", "pass {pass}", *(f"{peer} {{peers[{peer}]:{digits} ratio}}" for peer in peers)]
    return Table(title, " | ".join(columns), passes, left=2)


def lengths(longest: int) -> list[int]:
    found = [SHORTEST]
    while found[-1] * FACTOR <= longest:
        found.append(found[-1] * FACTOR)
    return found


def draw_growth(results: Record, path: Path) -> Path:
    """Draw nanoseconds per element against length, for each pass."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.ticker import LogLocator

    entries = [
        (one, name, row["size"][1], timed)
        for row in results["rows"]
        for one, entry in row.get("passes", {}).items()
        for name, timed in {"linrec": entry, **entry["peers"]}.items()
    ]
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for one, name, length, timed in entries:
        if "ms" in timed:
            each = 1e6 * timed["ms"]["median"] / (length * CHANNELS)
            found.setdefault((one, name), []).append((length, each))
    names = list(dict.fromkeys(name for _, name in found))

    def finish(axes: Any, one: str) -> None:
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0,), numticks=7))

    def curve(one: str, name: str) -> list[tuple[int, float]]:
        return found.get((one, name), [])

    widths = [2.4 if name == "linrec" else 1.4 for name in names]
    return draw_panels(path, PASSES, names, curve, finish, y="ns per element", share_y=True, widths=widths)
