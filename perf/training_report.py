"""Training's tokens per second, and where its time goes, for a terminal of 80 columns."""

from typing import Any

from rich.console import Console
from rich.table import Table

from perf.kernels import KINDS
from perf.table import plain_table


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
        console.print(_beside(measured))
    profiled = [model for model in measured if "kinds" in model.get("profile", {})]
    if profiled:
        console.print("\npercent of the device's time in replayed steps")
        console.print(_shares(profiled))
    for model in results["models"]:
        for part in ("", "profile", "fla"):
            missing = model.get(part, {}) if part else model
            if "missing" in missing:
                of = ", flash-linear-attention" if part == "fla" else ""
                text = f"{model['preset']}, {model['mixer']}{of}: {missing['missing']}"
                console.print(text, markup=False, highlight=False)


def _beside(models: list[dict[str, Any]]) -> Table:
    table = plain_table()
    table.add_column("model")
    for heading in ("params", "tokens/s", "GiB", "first s", "linrec's", "x", "GiB x"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        fla = model.get("fla", {})
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


def _shares(models: list[dict[str, Any]]) -> Table:
    table = plain_table()
    table.add_column("")
    for model in models:
        table.add_column(f"{model['preset']}\n{model['mixer']}", justify="right")
    profiles = [model["profile"] for model in models]
    for kind in KINDS:
        table.add_row(kind, *(f"{100 * profile['kinds'][kind]['share']:.1f}" for profile in profiles))
    table.add_row("idle", *(f"{100 * profile['idle']:.1f}" for profile in profiles))
    return table
