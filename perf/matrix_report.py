"""Tables of operators with matrix states, for a terminal of 80 columns."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.rows import PASSES
from perf.table import SHORT, number, plain_table, yes


def show(console: Console, results: dict[str, Any]) -> None:
    """Print everything that was measured."""
    rows = [row for row in results["rows"] if "passes" in row]
    peers = list(results["peers"])
    if rows:
        memory = any(row["peak_bytes"] is not None for row in rows)
        words = ", and the peak memory of forward and backward in GiB" if memory else ""
        console.print(f"\nmilliseconds of a call{words}")
        console.print(_speeds(rows, ["linrec", *peers] if memory else []))
    if rows and peers:
        console.print("\nlinrec's time / the peer's: below 1, linrec is faster; whether as asked")
        console.print(_ratios(rows, peers))
    show_problems(console, results, [entry for row in rows for entry in row["passes"].values()])


def show_heads(console: Console, results: dict[str, Any]) -> None:
    """Print time and share of the limit by head size, and the largest step between neighbouring sizes."""
    rows = [row for row in results["rows"] if "passes" in row]
    has_fla = "fla" in results["peers"]
    console.print(
        "\nms forward, and forward and backward; % of the limit of memory or matrix products"
        + ("; fla: linrec's time over its" if has_fla else "")
    )
    table = plain_table()
    table.add_column("row", no_wrap=True)
    for heading in ("fwd", "%", *(["fla"] if has_fla else []), "fwd+bwd", "%", *(["fla"] if has_fla else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for entry in row["passes"].values():
            cells += [number(entry["ms"]["median"]), f"{100 * entry['share']:.3g}"]
            if has_fla:
                cells.append(_ratio(entry["peers"]["fla"]))
        table.add_row(row["name"], *cells)
    console.print(table)
    for name in PASSES:
        console.print(f"{name}: {_cliff(rows, name)}", highlight=False)
    show_problems(console, results, [entry for row in rows for entry in row["passes"].values()])


def _cliff(rows: Sequence[dict[str, Any]], name: str) -> str:
    """The largest ratio of the shares of two neighbouring sizes of the same operation."""
    found = [
        (abs(math.log(first["passes"][name]["share"] / second["passes"][name]["share"])), first, second)
        for first, second in itertools.pairwise(rows)
        if first["operation"] == second["operation"]
    ]
    if not found:
        return "no neighbours"
    step, first, second = max(found, key=lambda entry: entry[0])
    return f"largest step between neighbours {math.exp(step):.2f}, {first['name']} and {second['name']}"


def show_problems(console: Console, results: dict[str, Any], measured: Sequence[dict[str, Any]]) -> None:
    """Print why ratios are missing, and the errors of rows."""
    failed = [f"{row['name']}: {row['error']}" for row in results["rows"] if "error" in row]
    for words in (*missing(measured), *failed):
        console.print(words, markup=False, highlight=False)


def _speeds(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column("row", no_wrap=True)
    for heading in ("fwd", "fwd+bwd", *names):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peaks = {"linrec": row["peak_bytes"], **row.get("peers_peak_bytes", {})}
        table.add_row(
            row["name"],
            *(number(row["passes"][name]["ms"]["median"]) for name in PASSES),
            *(_gib(peaks.get(name)) for name in names),
        )
    return table


def _ratios(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column("row", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for peer in peers:
        table.add_column(peer, justify="right", no_wrap=True)
    for row in rows:
        for name, entry in row["passes"].items():
            cells = (_ratio(entry["peers"][peer]) for peer in peers)
            table.add_row(row["name"] if name == PASSES[0] else "", SHORT[name], *cells)
    return table


def _ratio(entry: dict[str, Any]) -> str:
    if "ratio" not in entry:
        return "-"
    met = "" if entry["asked"] is None else f" {yes(entry['met'])}"
    return f"{entry['ratio']:.2g}{met}"


def _gib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / 2**30:.2f}"


def missing(measured: Sequence[dict[str, Any]]) -> list[str]:
    """Why there is no ratio, each reason once, and whose outputs are not linrec's."""
    found = [(peer, entry) for result in measured for peer, entry in result["peers"].items()]
    reasons = Counter((peer, entry["missing"]) for peer, entry in found if "missing" in entry)
    off: dict[str, float] = {}
    for peer, entry in found:
        if "off" in entry:
            off[peer] = max(off.get(peer, 0.0), entry["off"])
    words = [
        f"{peer}: outputs differ from linrec's by up to {most:.0%} of the largest"
        for peer, most in off.items()
    ]
    total = len(measured)
    return words + [
        f"{peer}: {why}{'' if count == total else f' ({count} of {total})'}"
        for (peer, why), count in reasons.items()
    ]
