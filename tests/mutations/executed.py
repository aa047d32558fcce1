"""Which tests execute which lines of the source, and how long each takes: a record that pytest makes."""

import functools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

RUNS: dict[str, tuple[str, ...]] = {
    "first": ("-m", "not thorough"),
    "kernels": ("-m", "not thorough"),
    "second": ("-m", "thorough and not nightly"),
    "second kernels": ("-m", "thorough and not nightly"),
}
"""The runs of pytest that a record is made of: the two tiers, and in each the tests of Triton's kernels."""


class Test(NamedTuple):
    """A test: the run that it belongs to, its name in pytest, and the seconds that it takes."""

    run: str
    name: str
    seconds: float


def environment(run: str) -> dict[str, str]:
    """Return the environment variables of a run of `RUNS`."""
    return {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if "kernels" in run else {})


def files(run: str, root: Path) -> list[str]:
    """Return the test files of a run, as arguments of pytest; an empty list means all."""
    if "kernels" not in run:
        return []
    found = [*sorted((root / "tests").rglob("test_*_triton.py")), root / "tests/ops/test_edges_long_conv.py"]
    return [str(path.relative_to(root)) for path in found]


def record(root: Path, folder: Path) -> None:
    """Run both tiers under coverage.py, and write a record. It takes an hour on two cores."""
    folder.mkdir(parents=True, exist_ok=True)
    for run, arguments in RUNS.items():
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutations.plugin", "-p", "no:cacheprovider"]
        command += ["-n", "auto", "--dist", "loadgroup", f"--record={folder / run}", *arguments]
        command += files(run, root)
        # tests that fail are left out
        if subprocess.run(command, cwd=root, env=os.environ | environment(run)).returncode > 1:
            raise RuntimeError(f"{' '.join(command)} did not end")


class Executed:
    """A record that `record` wrote.

    Args:
        root: the tree whose tests ran.
        folder: the record.
        runs: the runs to read, of `RUNS`.
    """

    def __init__(self, root: Path, folder: Path, runs: Iterable[str] = RUNS):
        from coverage import CoverageData

        self.root = root
        self.data: list[tuple[str, CoverageData]] = []
        self.tests: dict[tuple[str, str], Test] = {}
        self._lines: dict[str, Lines] = {}
        for run in runs:
            # a file for each process that ran tests
            for path in sorted(folder.glob(f"{run}.coverage*")):
                data = CoverageData(str(path))
                data.read()
                self.data.append((run, data))
            for name, seconds in json.loads((folder / f"{run}.json").read_text()).items():
                self.tests[run, name] = Test(run, name, seconds)

    def of(self, file: str, lines: Iterable[int], within: Iterable[int], *, compiled: bool) -> set[Test]:
        """Return the tests that passed and depend on a statement.

        Args:
            file: the file, below `src/linrec`.
            lines: the lines of the statement.
            within: the body of the function that the statement defines or is a part of; of a module's own
                statement, the lines of the file.
            compiled: whether Numba compiles the function, whose lines Python does not execute then.
        """
        of_file = self._of_file(file)
        tests = _union(of_file.by_test.get(line, ()) for line in lines)
        if tests or not (compiled or of_file.at_import.intersection(lines)):
            return tests
        # a kernel, a constant or a default
        return _union(of_file.by_test.get(line, ()) for line in within) or self._of_importers(file, set())

    def _of_file(self, file: str) -> "Lines":
        if file not in self._lines:
            by_test: dict[int, set[Test]] = defaultdict(set)
            at_import = set[int]()
            for run, data in self.data:
                for path in data.measured_files():
                    if path.endswith(f"/src/linrec/{file}"):
                        for line, names in data.contexts_by_lineno(path).items():
                            if "" in names:
                                at_import.add(line)
                            by_test[line] |= {self.tests[run, n] for n in names if (run, n) in self.tests}
            self._lines[file] = Lines({line: tests for line, tests in by_test.items() if tests}, at_import)
        return self._lines[file]

    def _of_importers(self, file: str, seen: set[str]) -> set[Test]:
        """Return the tests that execute a file that imports this one, or a file that imports that file."""
        module = ".".join(("linrec", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
        importing = re.compile(rf"\b{re.escape(module)} import|^import {re.escape(module)}\b", re.MULTILINE)
        importers = [other for other, text in self._sources.items() if importing.search(text)]
        tests = set[Test]()
        for other in importers:
            if other not in seen:
                seen.add(other)
                tests |= _union(self._of_file(other).by_test.values()) or self._of_importers(other, seen)
        return tests

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        source = self.root / "src/linrec"
        return {str(path.relative_to(source)): path.read_text() for path in source.rglob("*.py")}


class Lines(NamedTuple):
    """The tests that execute each line of a file, and the lines that are executed when it is imported."""

    by_test: Mapping[int, set[Test]]
    at_import: set[int]


def _union(sets: Iterable[Iterable[Test]]) -> set[Test]:
    return set().union(*sets)
