"""A plugin of pytest that records which tests execute which lines, and runs tests in a given order."""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", help="write executed lines to PATH.coverage, and seconds to PATH.json")
    parser.addoption("--chosen", help="run the tests that a file lists, in its order, and no others")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("record")
    if path is None:
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        config.pluginmanager.register(_Seconds(Path(path)))
    # the process that gives tests to workers runs none
    if worker is not None or not config.getoption("numprocesses", 0):
        config.pluginmanager.register(_Lines(Path(path), worker))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("chosen")
    if path is None:
        return
    place = {name: n for n, name in enumerate(Path(path).read_text().splitlines())}
    chosen = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in place])
    items[:] = chosen


def plain(name: str) -> str:
    """Return the name of a test without the group that xdist adds to it."""
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


class _Lines:
    """Write the lines of `linrec` that each test executes, in a file of coverage.py per process."""

    def __init__(self, path: Path, worker: str | None):
        import coverage

        # a process of tests is no place for a notice, which would be an error
        self.coverage = coverage.Coverage(
            data_file=f"{path}.coverage",
            data_suffix=worker,
            source=["src/linrec"],
            config_file=False,
            messages=False,
        )
        self.coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(plain(item.nodeid))
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()


class _Seconds:
    """Write how long each test takes that passes."""

    def __init__(self, path: Path):
        self.path = path
        self.seconds: dict[str, float] = defaultdict(float)
        self.left_out: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[plain(report.nodeid)] += report.duration
        if not report.passed:
            self.left_out.add(plain(report.nodeid))

    def pytest_unconfigure(self) -> None:
        passed = {name: round(s, 3) for name, s in self.seconds.items() if name not in self.left_out}
        Path(f"{self.path}.json").write_text(json.dumps(passed))
