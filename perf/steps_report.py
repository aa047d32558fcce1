"""The table of single steps, for a terminal of 80 columns."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.matrix_report import show_problems
from perf.table import number, plain_table


def show_steps(console: Console, results: dict[str, Any]) -> None:
    """Print everything that was measured."""
    rows = [row for row in results["rows"] if "ms" in row]
    peers = list(results["peers"])
    if rows:
        console.print(f"\nmilliseconds of a step, and percent of the rate of {results['yardstick']}")
        if peers:
            console.print("last linrec's time / the peer's: below 1, linrec is faster")
        console.print(_steps(rows, peers))
    show_problems(console, results, rows)


def _steps(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column("row", no_wrap=True)
    for heading in ("ms", "%", "called", *peers):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ratios = (row["peers"][peer].get("ratio") for peer in peers)
        table.add_row(
            row["name"],
            number(row["ms"]["median"]),
            f"{row['percent']:.0f}",
            number(row["called_ms"]["median"]),
            *("-" if ratio is None else f"{ratio:.2g}" for ratio in ratios),
        )
    return table
