"""One decoding step of operators with matrix states: rows, inputs, correctness, measurement."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linrec.testing import assert_agree
from perf.matrix import OPERATIONS, MatrixRow, Size, make, operator
from perf.memory import why
from perf.operations import normal
from perf.ops import CLOSE, difference, failure, timed
from perf.steps_peers import StepPeer
from perf.timing import Budget, measure

CHECKED = "y and the new state, every row and head, against the reference in float64"

SIZES: dict[str, tuple[Size, ...]] = {
    "cuda": (*((batch, 1, 16, 128) for batch in (1, 16, 128, 512)), (8, 1, 32, 64)),
    "cpu": ((1, 1, 4, 64), (8, 1, 4, 64)),
}


def step_rows_of(device_type: str, *, quick: bool = False) -> list[MatrixRow]:
    """Return the rows of a device; `quick` keeps the operations, at a size of no meaning."""
    sizes: tuple[Size, ...] = ((2, 1, 2, 8),) if quick else SIZES[device_type]
    dtype = "bf16" if device_type == "cuda" else "f32"
    return [MatrixRow(operation, size, dtype) for size in sizes for operation in OPERATIONS]


def make_step(row: MatrixRow, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the inputs of one step (b, 1, ...), and the state (b, h, d, d) in float32 before it."""
    batch, _, heads, channels = row.size
    random = torch.Generator(device).manual_seed(1)
    inputs, _ = make(row, device)
    return inputs, normal((batch, heads, channels, channels), torch.float32, random)


def check_step(row: MatrixRow, inputs: tuple[Tensor, ...], state: Tensor) -> None:
    """Compare the output and the new state with the reference in double precision.

    The output has the tolerance of its dtype, the state that of float32.

    Raises:
        AssertionError: they differ by more.
    """
    run = operator(row.operation)
    found = run(*inputs, state=state)
    wide = (x.double() for x in inputs)
    expected = run(*wide, state=state.double(), mode="recurrent", backend="reference")
    for name, mine, right in zip(("y", "state"), found, expected, strict=True):
        assert_agree(mine, right, name)


def fewest_bytes(inputs: tuple[Tensor, ...], y: Tensor, state: Tensor) -> int:
    """Return the least that a step must read and write: the state twice, all else once."""
    return sum(x.numel() * x.element_size() for x in (*inputs, y, state, state))


@torch.no_grad()
def measure_step(
    row: MatrixRow, device: torch.device, budget: Budget, peers: Sequence[StepPeer], copy: float | None
) -> dict[str, Any]:
    """Check and time one step, and the peers on the same inputs and state.

    Args:
        row: what to measure, with a time of 1.
        device: where.
        budget: for how long.
        peers: what else to measure.
        copy: the device's copy rate in bytes per second; None takes that of an addition of the same size.

    Returns:
        What JSON holds of the row; with "error" and without "ms" where it is wrong or fails.
    """
    result = row.described(CHECKED)
    inputs, state = make_step(row, device)
    if wrong := failure(lambda: check_step(row, inputs, state)):
        return result | {"error": wrong}
    step = partial(operator(row.operation), *inputs, state=state)
    right = step()
    result |= timed(step, fewest_bytes(inputs, right[0], state), state.dtype, device, budget, copy)
    result["peers"] = {}
    for peer in peers:
        entry = _measured_peer(peer, row.operation, inputs, state, right, device, budget)
        if "ms" in entry:
            entry["ratio"] = result["ms"]["median"] / entry["ms"]["median"]
        result["peers"][peer.name] = entry
    return result


def _measured_peer(
    peer: StepPeer,
    operation: str,
    inputs: tuple[Tensor, ...],
    state: Tensor,
    right: tuple[Tensor, Tensor],
    device: torch.device,
    budget: Budget,
) -> dict[str, Any]:
    """Time a peer: "ms" or "missing", with "off" where its output or its new state is not linrec's."""
    if not peer.installed:
        return {"missing": "not installed"}
    try:
        step = peer.prepare(operation, inputs, state)
        off = max(difference(found, mine) for found, mine in zip(step(), right, strict=True))
        timing = measure(step, device, budget, replayed=True)
    except Exception as error:
        return {"missing": why(error)}
    return {"ms": dataclasses.asdict(timing)} | ({"off": off} if off > CLOSE else {})
