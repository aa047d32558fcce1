"""The encoders' speed against length, as tables for a terminal of 80 columns and as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.encoders import BASELINE
from perf.memory import OUT_OF_MEMORY
from perf.models import PASSES
from perf.table import plain_table

FAILED = "failed"


def length_name(length: int) -> str:
    """Return a length as the paper's table heads it.

    Example:
        >>> length_name(5120), length_name(100)
        ('5K', '100')
    """
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def show(console: Console, results: dict[str, Any]) -> None:
    """Print steps per second, their ratios, memory, and what failed."""
    best, models = results["best"], results["models"]
    size = results["protocol"]["size"]
    console.print(
        f"\n{size['n_layers']} layers of width {size['d_model']}, batch {size['batch']}, "
        f"{results['protocol']['precision']}; parameters: "
        + ", ".join(f"{model['name']} {model['parameters'] / 1e6:.2f}M" for model in models),
        highlight=False,
    )
    names = [model["name"] for model in models]
    lengths = results["protocol"]["lengths"]

    def print_table(title: str, wanted: str, cell: Callable[[dict[str, Any]], str]) -> None:
        console.print(f"\n{title}", highlight=False)
        console.print(_table(best, wanted, names, lengths, cell))

    for wanted in PASSES:
        print_table(f"{wanted}, steps per second", wanted, lambda e: _three(e["steps_per_second"]))
    others = any(name != BASELINE for name in names)
    for wanted in PASSES if BASELINE in names and others else ():
        title = f"{wanted}, times as fast as the {BASELINE}"
        print_table(title, wanted, lambda e: "" if e["ratio"] is None else f"{e['ratio']:.2f}")
    if any(entry.get("peak_bytes") is not None for entry in best):
        print_table(
            "training, peak memory in GiB", PASSES[0], lambda entry: _three(entry["peak_bytes"] / 2**30)
        )
    for point in results["points"]:
        if point.get("missing", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            place = f"{point['model']}, {point['pass']}, {point['way']}, {length_name(point['length'])}"
            console.print(f"{place}: {point['missing']}", markup=False, highlight=False)


def _table(
    best: Sequence[dict[str, Any]],
    wanted: str,
    names: Sequence[str],
    lengths: Sequence[int],
    cell: Callable[[dict[str, Any]], str],
) -> Table:
    table = plain_table()
    table.add_column("", no_wrap=True)
    for length in lengths:
        # "out of memory" takes two lines of this width
        table.add_column(length_name(length), justify="right", max_width=len("memory"))
    entries = {(e["model"], e["length"]): e for e in best if e["pass"] == wanted}
    for name in names:
        cells = []
        for length in lengths:
            entry = entries.get((name, length))
            if entry is None:
                cells.append("")
            elif "missing" in entry:
                cells.append(OUT_OF_MEMORY if entry["missing"] == OUT_OF_MEMORY else FAILED)
            else:
                cells.append(cell(entry))
        table.add_row(name, *cells)
    return table


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def draw(results: dict[str, Any], path: Path) -> Path:
    """Draw steps per second against length, training on the left; a line ends where memory was too little."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from linrec.lab.report import style

    lengths = results["protocol"]["lengths"]
    figure = style.make_figure(3.0)
    both = figure.subplots(1, 2)
    for axes, wanted in zip(both, PASSES, strict=True):
        handles: list[Line2D] = []
        for number, model in enumerate(results["models"]):
            mine = [
                entry
                for entry in results["best"]
                if (entry["model"], entry["pass"]) == (model["name"], wanted) and "missing" not in entry
            ]
            (line,) = axes.plot(
                [entry["length"] for entry in mine],
                [entry["steps_per_second"] for entry in mine],
                marker="o",
                markersize=3,
                linewidth=1.6,
                color=style.colour(number),
                label=model["name"],
            )
            handles.append(line)
        axes.set_title(wanted, fontsize=style.LETTERS)
        style.finish_axes(axes, x="length (steps)", y="steps per second" if axes is both[0] else "")
        # a power law is a straight line
        axes.set_xscale("log", base=2)
        if all(entry["pass"] != wanted or "missing" in entry for entry in results["best"]):
            # an axis of logarithms needs a number
            axes.set_xlim(lengths[0], lengths[-1])
            axes.set_ylim(1, 10)
        axes.set_yscale("log")
        shown = lengths if len(lengths) <= 5 else [n for n in lengths if n & (n - 1) == 0]
        axes.set_xticks(shown, [length_name(n) for n in shown])
        low, high = axes.get_ylim()
        # one label for each decade is too few for one or two of them
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
    style.add_legend(figure, handles)
    return style.save(figure, path)
