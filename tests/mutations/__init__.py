"""Mistakes in the source, and the check that the tests notice them.

    python -m tests.mutations --record
    python -m tests.mutations --seed 1 --count 150 --out caught.json

The first command runs both tiers under coverage.py, which takes an hour on two cores. The second draws
mistakes in the source, over statements that tests execute, and makes one after the other in a copy of the
working tree. For each it runs the tests of the first tier that execute the statement, and then those of the
second, until one fails. Other tests cannot tell, but by a program that they start.

    python -m tests.mutations --listed

makes the mistakes that are written down in `tests/mutations/listed.py`, which the first tier must catch.
Run both after tests are moved or taken out. Numbers behind either command try these mistakes alone.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mutations.executed import RUNS, Test, environment
from tests.mutations.listed import MUTATIONS, Mutation

__all__ = ["MUTATIONS", "ROOT", "Copy", "Mutation", "catch", "changed", "source"]

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv", "runs", "build", "site", "__pycache__", ".*_cache", "*.egg-info")
# seconds of tests that run before all others
AT_ONCE = 40


def source(mutation: Mutation, root: Path = ROOT) -> Path:
    """Return the file that a listed mutation changes."""
    return root / "src/linrec" / mutation.file


def changed(mutation: Mutation, text: str) -> str:
    """Return the text of the file with the mistake."""
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} must contain {mutation.old!r} once; it does {text.count(mutation.old)} times. "
            "Bring tests/mutations/listed.py up to date."
        )
    return text.replace(mutation.old, mutation.new)


class Copy:
    """A copy of the working tree in which mistakes are made.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path):
        self.root, self.caches = folder / "linrec", folder / "caches"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*LEFT_OUT))

    @contextmanager
    def changed(self, file: str, content: bytes) -> Iterator[None]:
        """Change a file below `src/linrec`, and put it back."""
        path = self.root / "src/linrec" / file
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            yield
        finally:
            path.write_bytes(before)

    def first_failure(
        self, arguments: Sequence[str], *, fresh: bool, limit: float | None = None, run: str = "first"
    ) -> str | None:
        """Return the first test that fails, or None if all pass.

        Args:
            arguments: of pytest.
            fresh: whether to compile kernels again: the compiled code of a file may hold another's.
            limit: seconds after which the tests are stopped, which counts as a failure.
            run: the run of `RUNS` whose environment the tests need.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", *arguments]
        with tempfile.TemporaryDirectory() as empty:
            caches = empty if fresh else self.caches
            compilers = ("NUMBA", "TRITON", "TORCHINDUCTOR")
            variables = {f"{name}_CACHE_DIR": f"{caches}/{name}" for name in compilers}
            # the source is compiled again too: it may keep its size and its time
            variables |= {"PYTHONPATH": str(self.root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            said, status = _ended(command, self.root, os.environ | variables | environment(run), limit)
        if status == 0:
            return None
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError(f"{' '.join(command)} ran no tests:\n{said[-2000:]}")
        failures = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
        if status is None:
            failures.append(f"no end within {limit:.0f} seconds")
        # without a test that failed, the tests could not be imported
        return [*failures, f"status {status}"][0]


def _ended(
    command: list[str], folder: Path, variables: dict[str, str], limit: float | None
) -> tuple[str, int | None]:
    """Run a program; return what it wrote, and its exit status, or None if it was stopped."""
    program = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return program.communicate(timeout=limit)[0], program.returncode
    except subprocess.TimeoutExpired:
        # what the tests started too
        os.killpg(program.pid, signal.SIGKILL)
        return program.communicate()[0], None


def catch(copy: Copy, file: str, content: bytes, tests: Iterable[Test]) -> Test | None:
    """Return the first test that fails when a file has another content, or None if no test does.

    Args:
        copy: where to run the tests.
        file: the file, below `src/linrec`.
        content: its content.
        tests: the tests to run.
    """
    chosen = copy.root.parent / "chosen.txt"
    for run in RUNS:
        of_run = _ordered([test for test in tests if test.run == run], file)
        totals = itertools.accumulate(test.seconds for test in of_run)
        count = max(1, sum(total < AT_ONCE for total in totals))
        for part in filter(None, (of_run[:count], of_run[count:])):
            chosen.write_text("\n".join(test.name for test in part))
            files = sorted({test.name.split("::")[0] for test in part})
            arguments = ["-p", "tests.mutations.plugin", f"--chosen={chosen}", *files]
            limit = 600 + 10 * sum(test.seconds for test in part)
            with copy.changed(file, content):
                failed = copy.first_failure(arguments, fresh=b"numba" in content, limit=limit, run=run)
            if failed is not None:
                return Test(run, failed, 0.0)
    return None


def _ordered(tests: Iterable[Test], file: str) -> list[Test]:
    """Return tests in the order in which one of them is likely to notice a mistake in a file soon.

    One case of every function of tests comes first, then a second one, and so on. Up to five cases are early
    where the file of tests has the name of the changed file. Among equals, quick tests come first.
    """
    path = Path(file)
    name = path.parent.name if path.stem == "__init__" else path.stem
    cases, places = Counter[str](), dict[Test, tuple[int, bool, float]]()
    for test in sorted(tests, key=lambda test: test.seconds):
        function = test.name.split("[")[0]
        cases[function] += 1
        near = name in test.name.split("::")[0]
        places[test] = cases[function] - (5 if near else 0), not near, test.seconds
    return sorted(places, key=lambda test: (max(places[test][0], 1), *places[test][1:]))
