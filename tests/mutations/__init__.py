"""Thirty mistakes in the source, and the check that the tests of `make test` notice each of them.

    python -m tests.mutations

makes one mistake after the other in a copy of the working tree, and runs the tests there until one fails. Run
it after tests were moved out of `make test`; `python -m tests.mutations 3 14` tries these two alone.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutations.listed import MUTATIONS, Mutation

__all__ = ["MUTATIONS", "Mutation", "changed", "check", "source"]

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv", "runs", "site", "__pycache__", ".*_cache", "*.egg-info")


def source(mutation: Mutation, root: Path = ROOT) -> Path:
    """Return the file that a mutation changes."""
    return root / "src/linrec" / mutation.file


def changed(mutation: Mutation, text: str) -> str:
    """Return the text of the file with the mistake."""
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} must contain {mutation.old!r} once; it does {text.count(mutation.old)} times. "
            "Bring tests/mutations/listed.py up to date."
        )
    return text.replace(mutation.old, mutation.new)


def check(numbers: Sequence[int]) -> bool:
    """Try mutations, counted from 1, print a line of each, and return whether the tests caught all."""
    missed, known = [], set[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "linrec"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for number in numbers:
            mutation, begin = MUTATIONS[number - 1], time.monotonic()
            # all tests where the likeliest find nothing
            for tests in (mutation.tests, ()):
                # tests that fail without a mistake would catch every one
                if tests not in known and (failed := _first_failure(copy, tests)):
                    raise RuntimeError(f"{failed} fails without a mutation")
                known.add(tests)
                with _applied(mutation, copy):
                    caught_by = _first_failure(copy, tests)
                if caught_by:
                    break
            else:
                missed.append(number)
            seconds = time.monotonic() - begin
            print(f"{number:2} {mutation.breaks}: {caught_by or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    print(f"{len(numbers) - len(missed)} of {len(numbers)} caught")
    return not missed


@contextmanager
def _applied(mutation: Mutation, copy: Path) -> Iterator[None]:
    path = source(mutation, copy)
    text = path.read_text()
    path.write_text(changed(mutation, text))
    yield
    path.write_text(text)


def _first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    """Return the first test of `make test` that fails, of these or of all; None where all pass."""
    command = [sys.executable, "-m", "pytest", "-m", "not thorough", "-x", "-rfE", "-p", "no:cacheprovider"]
    command += tests or ["-n", "auto", "--dist", "loadgroup"]
    with tempfile.TemporaryDirectory() as caches:
        # a kernel is compiled again: the compiled code of another file may hold the one that changes
        places = {f"{name}_CACHE_DIR": f"{caches}/{name}" for name in ("NUMBA", "TRITON", "TORCHINDUCTOR")}
        # and so is the source, which may keep its size and its time
        others = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment = os.environ | places | others
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    failures = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    if failures:
        return failures[0]
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {ended.returncode}:\n{said[-2000:]}")
    return None
