import io
import time

import pytest
from rich.console import Console

from linrec.cli.display import Display
from linrec.lab.train.progress import Clock, Progress, Reporter

PROGRESS = Progress(12_345, 15_900, loss=2.3456, accuracy=0.1234, steps_per_second=151.2)


def table(names: list[str], width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    display = Display(names, console)
    display.update(names[0], PROGRESS)
    assert not file.getvalue()
    console.print(display._table())
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_shows_one_row_per_run(width: int) -> None:
    lines = table(["data", "fixed"], width)
    assert len(lines) == 3 and all(len(line) <= width for line in lines)
    assert lines[0].split() == ["run", "step", "loss", "accuracy", "steps/s", "left"]
    assert lines[1].startswith("data") and lines[2].startswith("fixed")
    for shown in ("12345/15900", "━", "2.346", "0.123", "151.2", "0:24"):
        assert shown in lines[1]
    assert "starting" in lines[2]


def test_one_run_has_no_name_and_fits_into_half_a_screen() -> None:
    lines = table(["a-recipe-with-a-very-long-name"], 60)
    assert len(lines) == 2 and "long" not in lines[1]
    for shown in ("12345/15900", "━", "2.346", "0.123", "151.2", "0:24"):
        assert shown in lines[1]


def test_a_terminal_is_redrawn_and_left_empty() -> None:
    file = io.StringIO()
    with Display(["data"], Console(file=file, force_terminal=True, width=80)) as display:
        display.update("data", PROGRESS)
        display._live.refresh()
        assert "12345/15900" in file.getvalue()
    # the cursor is back above the table, and each of its lines is erased
    assert file.getvalue().count("\x1b[2K") >= 2


@pytest.mark.parametrize("doing", ["evaluating", "stopping"])
def test_a_terminal_shows_what_the_run_does(doing: str) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    display = Display(["data"], console)
    display.update("data", Progress(3, 10, doing=doing, logged=False))
    console.print(display._table())
    shown = file.getvalue()
    assert "3/10" in shown and doing in shown
    assert ("stopping after this step; Ctrl-C again stops at once" in shown) == (doing == "stopping")


def test_elsewhere_only_logged_steps_are_printed() -> None:
    file = io.StringIO()
    with Display(["data"], Console(file=file, force_terminal=False, width=20)) as display:
        display.update("data", Progress(1, 10, logged=False))
        display.update("data", Progress(2, 10, doing="evaluating", logged=False))
        display.update("data", Progress(3, 10, doing="stopping", logged=False))
        display.update("data", Progress(4, 10, 1.0, 0.5, 2.0, doing="stopping"))
    assert file.getvalue() == "data: step 4/10, loss 1.000, accuracy 0.500, 2.0 steps/s, 0:03 left\n"


def test_a_request_to_stop_lasts_while_the_run_evaluates() -> None:
    told: list[Progress] = []
    reporter = Reporter(told.append, 0, 10)
    with reporter.evaluating():
        reporter.stop()
    with reporter.evaluating():
        reporter.log(3, loss=1.0, accuracy=None, steps_per_second=5.0)
    assert [progress.doing for progress in told] == ["evaluating", *["stopping"] * 3]


def test_elsewhere_there_are_plain_lines() -> None:
    file = io.StringIO()
    with Display(["data"], Console(file=file, force_terminal=False, width=20)) as display:
        display.update("data", PROGRESS)
    assert file.getvalue() == (
        "data: step 12345/15900, loss 2.346, accuracy 0.123, 151.2 steps/s, 0:24 left\n"
    )


def test_hours_are_shown_as_hours() -> None:
    file = io.StringIO()
    Display(["x"], Console(file=file)).update("x", Progress(0, 7322, 1.0, 0.0, steps_per_second=1.0))
    assert file.getvalue().endswith("2:02:02 left\n")


def test_a_lap_has_the_steps_per_second_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.0, 12.0, 13.0, 18.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = Clock(step=4, seconds=3.0)
    assert clock.lap(24) == 10.0
    with clock.paused():
        pass
    # five of the eight seconds since then were a pause
    assert clock.lap(30) == 2.0
