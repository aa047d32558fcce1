"""Tables for a terminal of 80 columns."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.kernels import KINDS
from perf.rows import PASSES

SHORT = dict(zip(PASSES, ("fwd", "fwd+bwd"), strict=True))
PEERS_PER_TABLE = 4


def show(console: Console, results: dict[str, Any]) -> None:
    """Print everything that was measured."""
    rows = [row for row in results["rows"] if "passes" in row]
    if rows:
        console.print(f"\nmilliseconds of a call, and percent of the rate of {results['yardstick']}")
        console.print(_speeds(rows))
        names = list(rows[0]["passes"][PASSES[0]]["peers"])
        for start in range(0, len(names), PEERS_PER_TABLE):
            console.print("\nlinrec's time / the peer's: below 1, linrec is faster")
            console.print(_ratios(rows, names[start : start + PEERS_PER_TABLE]))
        _show_missing(console, rows)
    if any("value" in line for line in results["lines"]):
        console.print("\nother numbers, each to be at most what is asked")
        console.print(_lines([line for line in results["lines"] if "value" in line]))
    for result in (*results["rows"], *results["lines"]):
        if "error" in result:
            console.print(f"{result['name']}: {result['error']}", markup=False, highlight=False)


def plain_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def show_profiles(console: Console, models: Sequence[dict[str, Any]], *heading: str) -> None:
    """Print percent of the time by kind of kernel, where there are profiles.

    Args:
        console: where to.
        models: measurements, some of which have a "profile".
        heading: what of a measurement stands above its column.
    """
    profiled = [model for model in models if "kinds" in model.get("profile", {})]
    if not profiled:
        return
    table = plain_table()
    table.add_column("")
    for model in profiled:
        table.add_column("\n".join(str(model[name]) for name in heading), justify="right")
    profiles = [model["profile"] for model in profiled]
    for kind in KINDS:
        table.add_row(kind, *(f"{100 * found['kinds'][kind]['share']:.1f}" for found in profiles))
    table.add_row("idle", *(f"{100 * found['idle']:.1f}" for found in profiles))
    console.print("\npercent of the device's time in steps")
    console.print(table)


def _speeds(rows: Sequence[dict[str, Any]]) -> Table:
    table = plain_table()
    table.add_column("row", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for heading in ("ms", "20%-80%", "%", "asked", "called"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        for name, entry in row["passes"].items():
            ms, target = entry["ms"], entry["target"]
            table.add_row(
                row["name"] if name == PASSES[0] else "",
                SHORT[name],
                number(ms["median"]),
                f"{number(ms['p20'])}-{number(ms['p80'])}",
                f"{entry['percent']:.0f}",
                "" if target is None else f"{target:.0f} {yes(entry['met'])}",
                number(entry["called_ms"]["median"]),
            )
    return table


def _ratios(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column("row", no_wrap=True)
    table.add_column("pass")
    for peer in peers:
        table.add_column(peer, justify="right", no_wrap=True)
    for row in rows:
        for name, entry in row["passes"].items():
            ratios = [entry["peers"][peer].get("ratio") for peer in peers]
            table.add_row(
                row["name"] if name == PASSES[0] else "",
                SHORT[name],
                *("-" if ratio is None else f"{ratio:.3g}" for ratio in ratios),
            )
    return table


def _show_missing(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Say why there is no ratio, each reason once."""
    missing = Counter(
        (peer, entry["missing"])
        for row in rows
        for result in row["passes"].values()
        for peer, entry in result["peers"].items()
        if "missing" in entry
    )
    total = len(rows) * len(PASSES)
    off: dict[str, list[float]] = {}
    for row in rows:
        for peer, result in row["passes"][PASSES[0]]["peers"].items():
            if "off" in result:
                off.setdefault(peer, []).append(result["off"])
    for peer, differences in off.items():
        most = f"up to {max(differences):.0%} of the largest ({len(differences)} of {len(rows)} rows)"
        console.print(f"{peer}: outputs differ from linrec's by {most}", markup=False, highlight=False)
    for (peer, why), count in missing.items():
        where = "" if count == total else f" ({count} of {total})"
        console.print(f"{peer}: {why}{where}", markup=False, highlight=False)


def _lines(lines: Sequence[dict[str, Any]]) -> Table:
    table = plain_table()
    table.add_column("row", no_wrap=True)
    table.add_column("what it is")
    for heading in ("value", "asked", "met"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        value, target = (f"{line[key]:.3g} {line['unit']}" for key in ("value", "target"))
        table.add_row(line["name"], line["about"], value, target, yes(line["met"]))
    return table


def number(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"


def yes(met: bool) -> str:
    return "yes" if met else "no"
