"""`linrec demo`: train two small GateLoops, data-controlled and fixed, side by side on one Memory Horizon."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from linrec.cli.display import Display
from linrec.cli.options import DemoOptions
from linrec.errors import InterruptedRunError, RunFolderError, TrainError
from linrec.lab.train.progress import Interrupt, Progress
from linrec.lab.train.records import METRICS
from linrec.lab.train.run import CONFIG, load_run, lock_run_folder, never_began

RECIPE = "memory-horizon-demo"
ARMS = ("data", "fixed")
POLL_SECONDS = 0.5


def run(options: DemoOptions, words: Sequence[str]) -> int:
    """Run `linrec demo`."""
    run_demo(options.out)
    return 0


def run_demo(out: Path, *, options: Sequence[str] = ()) -> Path:
    """Train both variants, each in its own process on one core; write the report, and return its path.

    Runs of an earlier demo in the folder are replaced. `options` are further options of `linrec train`.
    """
    # imported here because importing matplotlib is slow
    from linrec.lab.report import write_report

    folders = {arm: out / arm for arm in ARMS}
    for folder in folders.values():
        _clear(folder)
    with Interrupt() as interrupt, ExitStack() as stack:
        arms = {arm: stack.enter_context(_start(arm, folder, options)) for arm, folder in folders.items()}
        display = stack.enter_context(Display(ARMS))
        shown = dict.fromkeys(ARMS, 0)
        while True:
            finished = [process.poll() for process, _ in arms.values()]
            for arm, folder in folders.items():
                progress = _progress(folder)
                if progress is not None and progress.step > shown[arm]:
                    display.update(arm, progress)
                    shown[arm] = progress.step
            for arm, (process, errors) in arms.items():
                if process.returncode:
                    raise TrainError(_failure(arm, process.returncode, errors))
            if None not in finished:
                break
            if interrupt.requested:
                raise InterruptedRunError("stopped; `linrec demo` starts again from the beginning.")
            time.sleep(POLL_SECONDS)
    report = write_report(list(folders.values()), out)
    for arm, folder in folders.items():
        result = load_run(folder).result
        assert result is not None
        print(f"{arm}: test accuracy {result['test']['accuracy']:.4f}")
    print(f"report: {report}")
    return report


def _clear(folder: Path) -> None:
    """Remove the run of an earlier demo, and nothing else."""
    if not folder.exists():
        return
    if not (folder / CONFIG).exists() and not (folder.is_dir() and never_began(folder)):
        raise RunFolderError(f"{folder} exists and is not a run of an earlier demo; pass another --out.")
    with lock_run_folder(folder):
        shutil.rmtree(folder)


@contextmanager
def _start(
    arm: str, folder: Path, options: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Train a variant in a subprocess; leaving the context ends the subprocess."""
    command = [sys.executable, "-m", "linrec", "train", RECIPE, "--model.mixer-args.transition", arm]
    # one thread each: the variants share the cores, and models of this size do not speed up with more
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, "--out", str(folder), *options],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # Ctrl-C reaches only this process, which then stops both variants
            start_new_session=True,
        )
        try:
            yield process, errors
        finally:
            process.terminate()
            process.wait()


def _progress(folder: Path) -> Progress | None:
    """Return the progress of a variant, or None before its first logged step."""
    if not (folder / METRICS).exists():
        return None
    run = load_run(folder)
    records = [record for record in run.metrics if record["split"] == "train"]
    if not records:
        return None
    seen = {name: records[-1][name] for name in ("step", "loss", "accuracy", "steps_per_second")}
    return Progress(total_steps=run.about["total_steps"], **seen)


def _failure(arm: str, status: int, errors: IO[bytes]) -> str:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()[-20:]
    return "\n".join(
        [f"the {arm} variant of the demo ended with status {status} and wrote:", *(f"    {x}" for x in said)]
    )
