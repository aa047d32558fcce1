"""Measures the rows: linrec's operations, each checked first, beside the yardstick and the peers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perf.check import CHECKED, check
from perf.memory import why
from perf.operations import OPERATIONS, make
from perf.peers import Calls, Peer, reason, torch_calls
from perf.rows import DTYPES, PASSES, Row
from perf.timing import Budget, beside_add, measure, percent_of

CLOSE = 0.05
"""A peer may differ from linrec by so much of the largest output; more is reported."""


def measure_row(
    row: Row, device: torch.device, budget: Budget, peers: Sequence[Peer], copy: float | None
) -> dict[str, Any]:
    """Check and time one row.

    Args:
        row: what to measure.
        device: where.
        budget: for how long.
        peers: what else to measure on the same inputs.
        copy: the device's copy rate in bytes per second; None takes that of an addition of the same size.

    Returns:
        What JSON holds of the row; with "error" and without "passes" where it is wrong or fails.
    """
    result: dict[str, Any] = {
        "name": row.name,
        "operation": row.operation,
        "shape": list(row.shape),
        "dtype": str(DTYPES[row.dtype]).removeprefix("torch."),
        "checked": CHECKED[row.operation],
    }
    operation = OPERATIONS[row.operation]
    inputs, dy = make(row, device)
    if wrong := failure(lambda: check(row.operation, operation.run, inputs, dy)):
        return result | {"error": wrong}
    passes: dict[str, Any] = {}
    linrec = torch_calls(operation.run, inputs, dy)
    columns = (PASSES, (linrec.forward, linrec.both), operation.fewest_bytes(inputs), row.targets)
    for name, call, n_bytes, target in zip(*columns, strict=True):
        entry = timed(call, n_bytes, inputs[-1].dtype, device, budget, copy)
        met = None if target is None else entry["percent"] >= target
        passes[name] = entry | {"target": target, "met": met, "peers": {}}
    result |= {"passes": passes}
    if peers:
        y = linrec.output()
        for peer in peers:
            measured = measure_peer(peer, row.operation, inputs, dy, y, device, budget)
            for name in PASSES:
                entry = measured[name]
                if "ms" in entry:
                    entry["ratio"] = passes[name]["ms"]["median"] / entry["ms"]["median"]
                passes[name]["peers"][peer.name] = entry
    return result


def failure(check: Callable[[], None]) -> str | None:
    """Run a check; return why what it checks is not timed, None where it is right."""
    try:
        check()
    except AssertionError as error:
        return f"wrong, so not timed: {' '.join(str(error).split())}"
    except Exception as error:
        return f"failed, so not timed: {why(error)}"
    return None


def timed(
    call: Callable[[], Any],
    n_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    budget: Budget,
    copy: float | None,
) -> dict[str, Any]:
    """Time a call beside the yardstick.

    Args:
        call: what to time.
        n_bytes: the least that it must read and write.
        dtype: that of the addition, where that is the yardstick.
        device: where.
        budget: for how long.
        copy: the device's copy rate in bytes per second; None takes that of an addition of the same size.

    Returns:
        What JSON holds of it: "ms", "called_ms" as Python launches it, "bytes", "rate" and "percent".
    """
    if copy is None:
        timing, rate = beside_add(call, n_bytes, dtype, budget)
        called = timing
    else:
        timing, rate = measure(call, device, budget, replayed=True), copy
        # the same where Python launches it, which the device waits for if it takes longer
        called = measure(call, device, budget)
    return {
        "ms": dataclasses.asdict(timing),
        "called_ms": dataclasses.asdict(called),
        "bytes": n_bytes,
        "rate": rate,
        "percent": percent_of(n_bytes, timing.median, rate),
    }


def measure_peer(
    peer: Peer,
    operation: str,
    inputs: tuple[Tensor, ...],
    dy: Tensor,
    y: Tensor,
    device: torch.device,
    budget: Budget,
) -> dict[str, dict[str, Any]]:
    """Time a peer on the inputs of a row.

    Returns:
        For each pass "ms", or "missing": why there is no time. With "off" where the outputs differ from
        linrec's, which were checked.
    """
    if not peer.installed:
        return {name: {"missing": "not installed"} for name in PASSES}
    try:
        calls = peer.prepare(operation, inputs, dy)
        off = difference(calls.output(), y)
    except Exception as error:
        return {name: {"missing": reason(error)} for name in PASSES}
    wrong = {"off": off} if off > CLOSE else {}
    return {
        name: _time_peer(calls, function, device, budget) | wrong
        for name, function in zip(PASSES, (calls.forward, calls.both), strict=True)
    }


def _time_peer(
    calls: Calls, function: Callable[[], Any], device: torch.device, budget: Budget
) -> dict[str, Any]:
    try:
        timing = measure(function, device, budget, wall_clock=calls.waits, replayed=True)
        return {"ms": dataclasses.asdict(timing)}
    except Exception as error:
        return {"missing": reason(error)}


def difference(output: Tensor, y: Tensor) -> float:
    output = output.to(y.device)
    # not a number is not close to anything
    return float(((output - y).abs().max() / y.abs().max()).nan_to_num(nan=torch.inf))
