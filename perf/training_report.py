"""Training's tokens per second, and where its time goes, for a terminal of 80 columns and as a picture."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.table import plain_table, show_profiles


def show(console: Console, results: dict[str, Any]) -> None:
    """Print speeds, then profiles, then what failed."""
    loop, matmul = results["protocol"]["loop"], results["matmul"]
    measured = [model for model in results["models"] if "missing" not in model]
    console.print(
        f"\n{loop['batch_size']} x {results['protocol']['length']} tokens a step, {loop['precision']}; "
        f"% of {matmul['rate'] / 1e12:.3g} TFLOP/s, those of a {matmul['dtype'].removeprefix('torch.')} "
        f"product of {matmul['size']} x {matmul['size']}",
        highlight=False,
    )
    table = plain_table()
    table.add_column("preset")
    table.add_column("mixer")
    for heading in ("params", "tokens/s", "lowest", "ms/step", "GiB", "%"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in measured:
        rate, peak = model["tokens_per_second"], model["peak_bytes"]
        table.add_row(
            model["preset"],
            model["mixer"],
            f"{model['parameters'] / 1e6:.1f}M",
            f"{rate['median']:,.0f}",
            f"{rate['lowest']:,.0f}",
            f"{model['step_ms']:.3g}",
            "" if peak is None else f"{peak / 2**30:.3g}",
            f"{100 * model['share_of_matmul']:.3g}",
        )
    console.print(table)
    if any("fla" in model for model in measured):
        console.print("\nflash-linear-attention beside it; x: linrec's tokens/s over its")
        console.print(_beside([(model, model["fla"]) for model in measured if "fla" in model]))
    refused = [model for model in measured if "forward" in model]
    if refused:
        console.print("\nforward alone, where it refuses to train")
        console.print(_beside([(model | model["forward"], model["fla"]["forward"]) for model in refused]))
    show_profiles(console, measured, "preset", "mixer")
    for model in results["models"]:
        for part in ("", "profile", "fla"):
            missing = model.get(part, {}) if part else model
            if "missing" in missing:
                of = ", flash-linear-attention" if part == "fla" else ""
                text = f"{model['preset']}, {model['mixer']}{of}: {missing['missing']}"
                console.print(text, markup=False, highlight=False)


def _beside(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    table = plain_table()
    table.add_column("model")
    for heading in ("params", "tokens/s", "GiB", "first s", "linrec's", "x", "GiB x"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model, fla in pairs:
        if "tokens_per_second" not in fla:
            continue
        speeds = [found["tokens_per_second"]["median"] for found in (model, fla)]
        peaks = [found["peak_bytes"] for found in (model, fla)]
        table.add_row(
            model["mixer"],
            f"{fla['parameters'] / 1e6:.1f}M",
            f"{speeds[1]:,.0f}",
            "" if None in peaks else f"{peaks[1] / 2**30:.3g}",
            f"{fla['first_seconds']:.0f}",
            f"{model['first_seconds']:.0f}",
            f"{speeds[0] / speeds[1]:.2f}",
            "" if None in peaks else f"{peaks[0] / peaks[1]:.2f}",
        )
    return table


def draw(results: dict[str, Any], path: Path) -> Path:
    """Draw the tokens per second of models of one size, fastest first, beside flash-linear-attention's."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.lines import Line2D

    from linrec.lab.report import style

    measured = [model for model in results["models"] if "missing" not in model]
    measured.sort(key=lambda model: model["tokens_per_second"]["median"])
    figure = style.make_figure(1.2 + 0.34 * max(3, len(measured)))
    axes = figure.subplots()
    handles: list[Line2D] = []
    sides = [("", 0.19), ("fla", -0.19)]
    # no legend for a side without bars
    sides = sides if any("tokens_per_second" in model.get("fla", {}) for model in measured) else sides[:1]
    for number, (of, shift) in enumerate(sides):
        for place, model in enumerate(measured):
            found = model.get(of, {}) if of else model
            if "tokens_per_second" not in found:
                continue
            rate = found["tokens_per_second"]["median"] / 1000
            middle = place + shift if "tokens_per_second" in model.get("fla", {}) else place
            axes.barh(middle, rate, 0.36, color=style.colour(number), zorder=3)
            memory = "" if found["peak_bytes"] is None else f", {found['peak_bytes'] / 2**30:.1f} GiB"
            text = axes.annotate(
                f"{rate:.0f}{memory}",
                (rate, middle),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=style.LETTERS - 3,
            )
            # over the lines of the grid
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            # beside a bar that is long by far, the number stays in the room at the right
            text.set_in_layout(False)
        name = "flash-linear-attention" if of else "linrec"
        handles.append(Line2D([], [], color=style.colour(number), linewidth=6, label=name))
    for model in measured:
        if model["mixer"] == "transformer":
            rate = model["tokens_per_second"]["median"] / 1000
            handles.append(axes.axvline(rate, color="black", linewidth=0.8, label="linrec's transformer"))
    axes.set_yticks(range(len(measured)), [model["mixer"] for model in measured])
    loop, length = results["protocol"]["loop"], results["protocol"]["length"]
    style.finish_axes(axes, x=f"thousand tokens/s, {loop['batch_size']} x {length:,} tokens a step")
    # room for the numbers beside the bars
    axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    style.add_legend(figure, handles)
    return style.save(figure, path)
