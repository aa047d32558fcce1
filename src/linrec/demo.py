"""The demo: two small GateLoops, data-controlled and fixed, trained side by side on one Memory Horizon."""

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

from linrec.errors import InterruptedRunError, RunFolderError, TrainError
from linrec.train.display import Display
from linrec.train.interrupt import Interrupt
from linrec.train.metrics import FILE as METRICS
from linrec.train.result import Progress
from linrec.train.run import CONFIG, load_run, lock_run_folder, never_began

RECIPE = "memory-horizon-demo"
ARMS = ("data", "fixed")
POLL_SECONDS = 0.5


def run_demo(out: Path, *, options: Sequence[str] = ()) -> Path:
    """Train both arms, each in a process of its own on one core, and write the report.

    Args:
        out: folder for both runs and the report; the runs of an earlier demo in it are replaced.
        options: further options of `linrec train`, for both arms.

    Returns:
        The report.

    Raises:
        RunFolderError: `out` holds something under the names of the runs that is no run.
        TrainError: an arm failed; the message holds what it said.
        InterruptedRunError: SIGINT or SIGTERM came.
    """
    # imported here: matplotlib takes its time
    from linrec.report import write_report

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
        raise RunFolderError(f"{folder} is in the way and no run of an earlier demo; pass another --out.")
    with lock_run_folder(folder):
        shutil.rmtree(folder)


@contextmanager
def _start(
    arm: str, folder: Path, options: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Train an arm in a process, which ends at the latest when the context does."""
    command = [sys.executable, "-m", "linrec", "train", RECIPE, "--model.mixer-args.transition", arm]
    # one thread each: the arms share the cores, and models of this size gain nothing from more
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, "--out", str(folder), *options],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # Ctrl-C reaches this process alone, which then stops both
            start_new_session=True,
        )
        try:
            yield process, errors
        finally:
            process.terminate()
            process.wait()


def _progress(folder: Path) -> Progress | None:
    """Return how far an arm is, None before its first logged step."""
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
        [f"the {arm} arm of the demo ended with status {status} and said:", *(f"    {x}" for x in said)]
    )
