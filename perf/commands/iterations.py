"""`python -m perf iterations`: Newton's iterations on trained models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from linrec.errors import RunFolderError
from linrec.lab.train import load_run
from perf.commands.results import Options, RefusedError, about, file_name, say, write
from perf.iterations import count_iterations
from perf.table import plain_table


@dataclass(frozen=True, kw_only=True)
class IterationsOptions(Options):
    """Newton's iterations that a trained model needs, with its initial and its trained weights.

    Args:
        runs: run folders of sequence classifiers with mixers on nonlinear_scan.
        samples: number of validation samples.
        out: folder for DEVICE.json.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    samples: int = 16
    out: Path = Path("results/iterations")


def iterations(options: IterationsOptions, command: str) -> int:
    """Count the iterations, write the results, print them; return the exit status.

    Raises:
        RefusedError: a folder that is no run of a sequence classifier.
    """
    device = torch.device(options.device)
    results: dict[str, Any] = {**about(device, command), "samples": options.samples, "runs": []}
    path = options.out / f"{file_name(results)}.json"
    for folder in options.runs:
        say(str(folder))
        try:
            run = load_run(folder)
            counts = count_iterations(run, device, options.samples)
        except (RunFolderError, ValueError) as error:
            raise RefusedError(error) from error
        task, mixer = run.config.name, run.config.model.mixer
        results["runs"].append({"run": str(folder), "task": task, "mixer": mixer, "counts": counts})
        write(path, results)
    show(Console(width=min(Console().width, 80)), results["runs"])
    print(f"\nwrote {path}")
    return 0


def show(console: Console, runs: list[dict[str, Any]]) -> None:
    """Print the iterations."""
    table = plain_table()
    for heading in ("task", "mixer", "weights", "layer", "mode", "iterations"):
        table.add_column(heading, justify="right" if heading in ("layer", "iterations") else "left")
    for run in runs:
        for count in run["counts"]:
            found = str(count["iterations"]) if "iterations" in count else count["missing"]
            table.add_row(
                run["task"], str(run["mixer"]), count["weights"], str(count["layer"]), count["mode"], found
            )
    console.print(table)
