import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from linrec.models.compilation import EAGER_STEPS, CapturedStep


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a log of captures and replays, with stand-ins for the streams and graphs of CUDA."""
    found: list[str] = []

    class Graph:
        def replay(self) -> None:
            found.append("replay")

    @contextmanager
    def capturing(graph: Graph, stream: Any) -> Iterator[None]:
        found.append("capture")
        yield

    stand_ins = {"Stream": mock.Mock, "current_stream": mock.Mock, "stream": nullcontext}
    for name, stand_in in {**stand_ins, "CUDAGraph": Graph, "graph": capturing}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


def test_eager_calls_do_not_change_the_graph_of_the_other_calls(log: list[str]) -> None:
    def step(x: torch.Tensor, reset: torch.Tensor | None) -> None:
        log.append("step" if reset is None else "step with resets")

    captured = CapturedStep(step, unless=lambda x, reset: reset is not None)
    x, reset = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for _ in range(EAGER_STEPS):
        captured(x, reset)
        captured(x, None)
    assert log == ["step with resets", "step"] * EAGER_STEPS
    log.clear()
    for given in (None, reset, None):
        captured(x, given)
    assert log == ["capture", "step", "replay", "step with resets", "replay"]


def test_none_in_other_places_is_captured_again(log: list[str]) -> None:
    captured = CapturedStep(lambda x, dt: log.append("step"))
    x = torch.zeros(2, 3)
    for dt in (x, None, x):
        for _ in range(EAGER_STEPS + 2):
            captured(x, dt)
    assert log == [*["step"] * EAGER_STEPS, "capture", "step", "replay", "replay"] * 3


def test_other_tensors_in_place_are_captured_again(log: list[str]) -> None:
    held = [torch.zeros(2)]
    captured = CapturedStep(
        lambda x: log.append("step"), unless=lambda x: not held, in_place=lambda: list(held)
    )
    x, kept = torch.zeros(2, 3), held[0]
    fresh = [*["step"] * EAGER_STEPS, "capture", "step", "replay", "replay"]
    for _ in range(EAGER_STEPS + 2):
        captured(x)
    assert log == fresh
    log.clear()
    # away for one call, which runs eagerly
    held.clear()
    captured(x)
    held.append(kept)
    captured(x)
    assert log == ["step", "replay"]
    log.clear()
    held[:] = [torch.zeros(2)]
    for _ in range(EAGER_STEPS + 2):
        captured(x)
    assert log == fresh


def test_no_garbage_is_collected_during_a_capture(log: list[str]) -> None:
    captured = CapturedStep(lambda x: log.append(f"collects: {gc.isenabled()}"))
    for _ in range(EAGER_STEPS + 1):
        captured(torch.zeros(2))
    assert log[-3:] == ["capture", "collects: False", "replay"] and log[0] == "collects: True"
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_old_graph_does_not_break_a_capture() -> None:
    x = torch.zeros(2, device="cuda")

    def captured(step: Callable[[torch.Tensor], None]) -> CapturedStep:
        run = CapturedStep(step)
        for _ in range(EAGER_STEPS + 2):
            run(x)
        return run

    def making_garbage(x: torch.Tensor) -> None:
        # enough lists for the collector to begin
        assert len([[] for _ in range(5000)]) == 5000
        x.add_(1)

    for _ in range(20):
        # a cycle, which the collector alone ends
        old = captured(lambda x: x.add_(1))
        old.itself = old  # type: ignore[attr-defined]
        del old
        captured(making_garbage)
