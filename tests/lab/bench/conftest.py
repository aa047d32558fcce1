"""Processes of jobs that tests start in place of Python, which takes seconds."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linrec.lab.bench import schedule


class Process:
    """A job that ends with the status that `ends` has for its name, or when it is asked to stop."""

    started: list["Process"]
    ends: dict[str, int]
    deaf = False

    def __init__(self, words: list[str], stdout: Any, env: dict[str, str], **_: Any) -> None:
        self.starter, self.name, self.words = int(words[3]), Path(words[4]).name, words[5:]
        self.gpu, self.returncode = env.get("CUDA_VISIBLE_DEVICES"), Process.ends.get(self.name)
        stdout.write("".join(f"line {number}\n" for number in range(9)))
        Process.started.append(self)

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self.returncode = None if Process.deaf else 130

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    """Processes are `Process`, and there are two GPUs."""
    Process.started, Process.ends, Process.deaf = [], {}, False
    monkeypatch.setattr(schedule, "subprocess", SimpleNamespace(Popen=Process, STDOUT=None))
    monkeypatch.setattr(schedule, "POLL", 0.001)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    return Process


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], Any]], None]:
    """Make jobs run in this process, by a function of their folder."""

    def run_with(run: Callable[[Path], Any]) -> None:
        def start(words: list[str], **_: Any) -> SimpleNamespace:
            run(Path(words[4]))
            return SimpleNamespace(poll=lambda: 0)

        monkeypatch.setattr(schedule, "subprocess", SimpleNamespace(Popen=start, STDOUT=None))

    return run_with
