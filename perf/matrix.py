"""Operators with matrix states, one (dk, dv) state per head: rows, inputs, correctness, measurement."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec.ops import delta_rule, gate_loop
from linrec.testing import assert_agree
from perf.memory import peak_bytes, release, why
from perf.operations import decays, normal, outputs_and_gradients
from perf.ops import CLOSE, difference, failure
from perf.peers import Calls, Peer, torch_calls
from perf.rows import DTYPES, PASSES
from perf.timing import Budget, measure

CHECKED = (
    "first and last batch row and head, every step, against (chunkwise, torch) in float64; all gradients"
)

Size = tuple[int, ...]
# steps of a chunk in what products are counted
CHUNK = 64


@dataclass(frozen=True)
class MatrixRow:
    """One operation at one size.

    Args:
        operation: a key of `OPERATIONS`.
        size: (batch, time, heads, channels), for keys and values alike, or (batch, time, heads, dk, dv).
        dtype: a key of `perf.rows.DTYPES`.
    """

    operation: str
    size: Size
    dtype: str

    @property
    def name(self) -> str:
        """What `--rows` takes: "head-bf16-8x4096x16x128"."""
        return "-".join((self.operation, self.dtype, "x".join(map(str, self.size))))

    def described(self, checked: str) -> dict[str, Any]:
        """Return the head of a row in JSON, with a sentence about its check."""
        return {
            "name": self.name,
            "operation": self.operation,
            "size": list(self.size),
            "dtype": str(DTYPES[self.dtype]).removeprefix("torch."),
            "checked": checked,
        }

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        """The fewest bytes and the operations of matrix products, for each of `PASSES`.

        Forward, q, k, v and gates are read and y is written; backward, these but y are read with dy, and a
        gradient is written for each. Products are those of chunks of 64 steps, three times as many with
        the backward pass; those that only the delta rule has are not counted.
        """
        batch, time, heads, dk, *_ = self.size
        dv, steps, itemsize = self.size[-1], batch * time * heads, DTYPES[self.dtype].itemsize
        gates = {"linear": 0, "head": 4, "channel": 4 * dk, "delta": itemsize, "gated_delta": itemsize + 4}
        inputs = itemsize * (2 * dk + dv) + gates[self.operation]
        products = 4 * dk * dv + CHUNK * (dk + dv)
        forward = inputs + itemsize * dv
        return {
            PASSES[0]: (steps * forward, steps * products),
            PASSES[1]: (steps * (forward + 2 * inputs + itemsize * dv), 3 * steps * products),
        }


OPERATIONS: dict[str, dict[str, float]] = {
    "linear": {"attention": 1.0, "reference": 0.1},
    "head": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
    "channel": {"fla": 1 / 1.3, "attention": 1.0, "reference": 0.1},
    "delta": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
    "gated_delta": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
}
"""The most that linrec's time may be of a peer's, by the operation's name and the peer's."""

SIZES: dict[str, tuple[Size, ...]] = {
    # the last where softmax attention is cheaper still
    "cuda": ((8, 4096, 16, 128), (8, 4096, 32, 64), (1, 32768, 16, 128), (8, 2048, 16, 128)),
    "cpu": ((1, 4096, 4, 64),),
}


HEAD_SIZES = tuple((dk, dv) for dk in (16, 32, 48, 64, 96, 128, 192, 256) for dv in (dk, 2 * dk))
"""dk and dv of --heads."""


def head_rows(*, quick: bool = False) -> list[MatrixRow]:
    """Return rows that differ in the sizes of their heads; the heads of v fill the same width."""
    batch, time, width = (1, 70, 32) if quick else (8, 4096, 2048)
    sizes = HEAD_SIZES[:2] if quick else HEAD_SIZES
    return [
        MatrixRow(operation, (batch, time, max(1, width // dv), dk, dv), "bf16")
        for operation in ("head", "channel", "delta")
        for dk, dv in sizes
    ]


def operator(operation: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the operator: it maps the tensors that `make` gives to y (b, t, h, d) and the last state."""
    return delta_rule if "delta" in operation else gate_loop


def rows_of(device_type: str, *, quick: bool = False) -> list[MatrixRow]:
    """Return the rows of a device; `quick` keeps the operations, at a size of no meaning."""
    sizes: tuple[Size, ...] = ((2, 70, 2, 8),) if quick else SIZES[device_type]
    dtype = "bf16" if device_type == "cuda" else "f32"
    return [MatrixRow(operation, size, dtype) for size in sizes for operation in OPERATIONS]


def make(row: MatrixRow, device: torch.device, seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the inputs of a row, and the gradient dy that its backward pass starts from.

    Queries and keys have norm 1, decays time scales from 10 to 1,000 steps, writing strengths are in (0, 1).
    """
    random = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[row.dtype]
    keys, values = row.size[:4], (*row.size[:3], row.size[-1])
    q, k, v, dy = (normal(size, dtype, random) for size in (keys, keys, values, values))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = decays(keys, torch.float32, random).log()
    beta = normal(row.size[:3], dtype, random).sigmoid()
    more = {
        "linear": (),
        "head": (log_decay[..., 0],),
        "channel": (log_decay,),
        "delta": (beta,),
        "gated_delta": (beta, log_decay[..., 0]),
    }[row.operation]
    return (q, k, v, *(x.contiguous() for x in more)), dy


def check(row: MatrixRow, inputs: tuple[Tensor, ...], dy: Tensor) -> None:
    """Compare outputs and gradients of some rows and heads with those in double precision.

    Raises:
        AssertionError: they differ by more than the tolerance of the dtype.
    """
    run = operator(row.operation)
    y, gradients = outputs_and_gradients(lambda *xs: run(*xs)[0], inputs, dy)
    expected_y, expected = outputs_and_gradients(
        lambda *xs: run(*xs, mode="chunkwise", backend="torch")[0], tuple(map(_cut, inputs)), _cut(dy)
    )
    names = ("y", *(f"gradient of input {number}" for number in range(1, len(inputs) + 1)))
    for name, mine, right in zip(names, (y, *gradients), (expected_y, *expected), strict=True):
        assert_agree(_cut(mine), right, name, dtype=y.dtype)


def measure_row(
    row: MatrixRow,
    device: torch.device,
    budget: Budget,
    peers: Sequence[Peer],
    limits: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Check and time one row, and the peers on the same inputs.

    With `limits`, bytes and operations per second, a pass also has its "share" of the limit that is reached
    later.

    Returns:
        What JSON holds of the row; with "error" and without "passes" where it is wrong or fails. Peaks of
        memory are those of forward and backward, over what was there before: outputs, gradients and what is
        kept between.
    """
    result = row.described(CHECKED)
    inputs, dy = make(row, device)
    if wrong := failure(lambda: check(row, inputs, dy)):
        return result | {"error": wrong}
    run = operator(row.operation)
    linrec = torch_calls(lambda *xs: run(*xs)[0], inputs, dy)
    y = linrec.output()
    mine = _measured(linrec, device, budget)
    result |= {"passes": {name: {"ms": mine[name]["ms"], "peers": {}} for name in PASSES}}
    result["peak_bytes"] = mine["peak_bytes"]
    if limits is not None:
        for name, entry in result["passes"].items():
            least = max(part / rate for part, rate in zip(row.limits[name], limits, strict=True))
            entry["share"] = least / entry["ms"]["median"] * 1e3
    for peer in peers:
        found = _measured_peer(peer, row.operation, inputs, dy, y, device, budget)
        for name in PASSES:
            entry = dict(found[name])
            if "ms" in entry:
                entry["ratio"] = mine[name]["ms"]["median"] / entry["ms"]["median"]
                entry["asked"] = OPERATIONS[row.operation].get(peer.name)
                entry["met"] = None if entry["asked"] is None else entry["ratio"] <= entry["asked"]
            if "off" in found:
                entry["off"] = found["off"]
            result["passes"][name]["peers"][peer.name] = entry
        if "peak_bytes" in found:
            result.setdefault("peers_peak_bytes", {})[peer.name] = found["peak_bytes"]
    return result


def _measured_peer(
    peer: Peer,
    operation: str,
    inputs: tuple[Tensor, ...],
    dy: Tensor,
    y: Tensor,
    device: torch.device,
    budget: Budget,
) -> dict[str, Any]:
    if not peer.installed:
        return {name: {"missing": "not installed"} for name in PASSES}
    try:
        prepared = peer.prepare(operation, inputs, dy)
        off = difference(prepared.output(), y) if peer.same else 0.0
    except Exception as error:
        return {name: {"missing": why(error)} for name in PASSES}
    found = _measured(prepared, device, budget)
    return found | ({"off": off} if off > CLOSE else {})


def _measured(prepared: Calls, device: torch.device, budget: Budget) -> dict[str, Any]:
    """Time both passes, and take the peak of the second; "missing" with the reason where one fails."""
    found: dict[str, Any] = {}
    for name, function in zip(PASSES, (prepared.forward, prepared.both), strict=True):
        try:
            timing = measure(function, device, budget, replayed=True)
            found[name] = {"ms": dataclasses.asdict(timing)}
        except Exception as error:
            found[name] = {"missing": why(error)}
    if "ms" in found[PASSES[1]]:
        release(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        results = prepared.both()
        peak = peak_bytes(device)
        del results
        found["peak_bytes"] = None if peak is None else peak - before
    return found


def _cut(x: Tensor) -> Tensor:
    rows, heads = (torch.tensor(sorted({0, n - 1}), device=x.device) for n in (x.shape[0], x.shape[2]))
    return x.index_select(0, rows).index_select(2, heads).double()
