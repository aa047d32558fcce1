"""The engine of all commands: options and rows, implementations, measurements, and their records.

A command is a table of rows, and functions that make the inputs and the implementations of a row. The engine
checks linrec's result, and times its passes and those of the other implementations on the same inputs. Each
row's record is written as JSON as soon as it is measured.

An entry of a record is one time, `{"ms": {"median", "p20", "p80"}}`, with more numbers beside it; or
`{"missing": reason}`. "ratio" is the time of the baseline over the entry's. A record with "error" has no
entries: the result was wrong, or failed.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from linrec.testing import assert_agree
from perf.timing import Bench, UnsuitedError, share, why

Device: TypeAlias = Literal["cuda", "cpu"]
Tensors: TypeAlias = tuple[Tensor, ...]
Entry: TypeAlias = dict[str, Any]
R = TypeVar("R")

PASSES = FORWARD, BOTH = "forward", "forward+backward"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "c64": torch.complex64}
HERE: Device = "cuda" if torch.cuda.is_available() else "cpu"
# a larger difference of a peer's outputs from linrec's, relative to the largest output, is reported
CLOSE = 0.05


class RefusedError(Exception):
    """The options do not fit together or name something unknown; the message says what to do."""


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    Args:
        operation: name of the operation.
        size: its sizes.
        dtype: a key of `DTYPES`.
        targets: percent of the yardstick's rate for each pass; None where no speed is asked.
    """

    operation: str
    size: tuple[int, ...]
    dtype: str
    targets: tuple[float | None, float | None] = (None, None)

    @property
    def name(self) -> str:
        """The name, such as "scan-f32-8x4096x2048"."""
        return "-".join((self.operation, self.dtype, "x".join(map(str, self.size))))


@dataclass(frozen=True)
class Calls:
    """The calls of an implementation on given inputs.

    Args:
        passes: the call to time, by the name of the pass.
        outputs: computes the outputs in torch's layout, for comparison.
        waits: whether the calls wait for their results, on a stream that is not torch's.
        check: raises AssertionError if the results are wrong; None compares nothing.
    """

    passes: Mapping[str, Callable[[], Any]]
    outputs: Callable[[], Tensors]
    waits: bool = False
    check: Callable[[], None] | None = None


@dataclass(frozen=True)
class Implementation:
    """An implementation that `--peers` measures and `--without` leaves out.

    Args:
        name: heads its column.
        about: a description of one line.
        module: the module that it needs.
        prepare: returns the calls from the arguments of a `Case`. It converts the inputs to the layout that
            the implementation takes, before the clock starts.
        operations: the operations that it has; empty for all.
        device: the only type of device that it is measured on, if there is one.
        same: whether it computes what linrec computes; softmax attention does not.
    """

    name: str
    about: str
    module: str
    prepare: Callable[..., Calls]
    operations: tuple[str, ...] = ()
    device: str | None = None
    same: bool = True

    @property
    def installed(self) -> bool:
        """Whether its module can be found; it may still fail."""
        return importlib.util.find_spec(self.module) is not None

    def calls(self, operation: str, inputs: Tensors, *more: Tensor) -> Calls:
        """Return the calls, or raise UnsuitedError for an operation or a device that it lacks."""
        if self.operations and operation not in self.operations:
            raise UnsuitedError(f"has no {operation}")
        if self.device is not None and inputs[0].device.type != self.device:
            where = "runs on CUDA" if self.device == "cuda" else "is measured on the CPU"
            raise UnsuitedError(f"{where} alone")
        return self.prepare(operation, inputs, *more)


@dataclass(frozen=True)
class Case:
    """linrec's part of a row.

    Args:
        arguments: the arguments of `Implementation.prepare`: the operation's name, its inputs, and more.
        calls: linrec's calls.
        check: raises AssertionError if linrec's result is wrong.
        n_bytes: the fewest bytes that each pass reads and writes, to compare it with a yardstick.
        dtype: the dtype of the addition that is the yardstick on the CPU.
    """

    arguments: tuple[Any, ...]
    calls: Calls
    check: Callable[[], None]
    n_bytes: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


def calls_of(
    function: Callable[..., Tensor],
    inputs: Tensors,
    dy: Tensor,
    output: Callable[[Tensor], Tensor] = lambda y: y,
) -> Calls:
    """Return forward without gradients, and forward with the gradients of all inputs from dy.

    `output` converts y to the layout of linrec's output.
    """
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    plain = tuple(x.detach() for x in inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*plain)

    def both() -> Tensors:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return Calls({FORWARD: forward, BOTH: both}, lambda: (output(forward()),))


def outputs_and_gradients(function: Callable[..., Tensor], inputs: Tensors, dy: Tensor) -> Tensors:
    """Return y and the gradients of all inputs."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def assert_all_agree(
    names: Iterable[str],
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Raise AssertionError with the name of the first tensor that differs by more than the tolerance."""
    for name, mine, right in zip(names, found, expected, strict=False):
        assert_agree(mine, right, name, dtype=dtype)


def gradient_names(inputs: Sequence[Tensor]) -> list[str]:
    """Return names of the results of `outputs_and_gradients`."""
    return ["y", *(f"gradient of input {number}" for number in range(1, len(inputs) + 1))]


def failure(check: Callable[[], None]) -> str | None:
    """Run a check; return the reason not to time the checked function, None if it is right."""
    try:
        check()
    except AssertionError as error:
        return f"wrong, so not timed: {' '.join(str(error).split())}"
    except Exception as error:
        return f"failed, so not timed: {why(error)}"
    return None


def attempt(measurement: Callable[[], Entry]) -> Entry:
    """Return an entry; one with "missing", the reason, where the measurement fails."""
    try:
        return measurement()
    except Exception as error:
        return {"missing": why(error)}


def timed(bench: Bench, call: Callable[[], Any], **how: bool) -> Entry:
    """Return the entry of a call; `how` are keyword arguments of `Bench.measure`."""
    return {"ms": dataclasses.asdict(bench.measure(call, **how))}


def launched(bench: Bench, call: Callable[[], Any]) -> Entry:
    """Return the entry of a call with its time on the device, and as Python launches it."""
    entry = timed(bench, call, replayed=True)
    return entry | {"called_ms": timed(bench, call)["ms"]}


def beside_yardstick(bench: Bench, call: Callable[[], Any], n_bytes: int, dtype: torch.dtype) -> Entry:
    """Return the entry of a call that moves so many bytes, beside the yardstick.

    "called_ms" is the time as Python launches the call, "rate" the yardstick's, "percent" the part of it.
    """
    if bench.copy is None:
        timing, rate = bench.beside_add(call, n_bytes, dtype)
        ms = dataclasses.asdict(timing)
        entry = {"ms": ms, "called_ms": ms}
    else:
        entry, rate = launched(bench, call), bench.copy
    percent = 100 * share(n_bytes, rate, entry["ms"]["median"])
    return entry | {"bytes": n_bytes, "rate": rate, "percent": percent}


def add_ratio(entry: Entry, baseline: Entry) -> None:
    """Add "ratio", the baseline's time over the entry's, and "called_ratio", where both have the times."""
    for time in ("ms", "called_ms"):
        if time in entry and time in baseline:
            entry[time.replace("ms", "ratio")] = baseline[time]["median"] / entry[time]["median"]


def by_pass(entries: Mapping[str, Mapping[str, Entry]], baseline: str) -> dict[str, dict[str, Entry]]:
    """Return entries by pass and implementation, each with its ratio to the baseline."""
    passes = {one: {name: entry[one] for name, entry in entries.items()} for one in PASSES}
    for found in passes.values():
        for entry in found.values():
            add_ratio(entry, found[baseline])
    return passes


def measure_each(
    implementations: Mapping[str, Callable[[], Calls]],
    entry_of: Callable[[Callable[[], Any]], Entry],
    baseline: str,
) -> dict[str, Any]:
    """Check and time implementations; return "passes", by pass and implementation, or "error".

    Each function of `implementations` returns the calls; it raises an error if there are none, which makes
    the entries "missing". `entry_of` times a call. Each entry has its ratio to the entry of `baseline`.
    """
    entries: dict[str, dict[str, Entry]] = {}
    for name, prepare in implementations.items():
        try:
            calls = prepare()
        except Exception as error:
            entries[name] = {one: {"missing": why(error)} for one in PASSES}
            continue
        if calls.check is not None and (wrong := failure(calls.check)):
            return {"error": f"{name}: {wrong}"}
        entries[name] = {one: attempt(partial(entry_of, call)) for one, call in calls.passes.items()}
    return {"passes": by_pass(entries, baseline)}


def measure_peer(
    bench: Bench, peer: Implementation, case: Case, outputs: Tensors
) -> tuple[dict[str, Entry], Calls | None]:
    """Return an entry for each pass, with "off" if outputs differ; and the peer's calls."""

    def everywhere(reason: str) -> tuple[dict[str, Entry], None]:
        return {one: {"missing": reason} for one in case.calls.passes}, None

    if not peer.installed:
        return everywhere("not installed")
    try:
        calls = peer.calls(*case.arguments)
        off = max(map(difference, calls.outputs(), outputs)) if peer.same else 0.0
    except Exception as error:
        return everywhere(why(error))
    entries = {}
    for name, call in calls.passes.items():
        entry = attempt(partial(timed, bench, call, wall_clock=calls.waits, replayed=True))
        entries[name] = entry | ({"off": off} if off > CLOSE else {})
    return entries, calls


def measure_case(
    bench: Bench, case: Case, peers: Sequence[Implementation], *, memory: bool = False
) -> dict[str, Any]:
    """Check and time linrec, and time the peers; return "passes" and peaks, or "error"."""
    if wrong := failure(case.check):
        return {"error": wrong}
    passes: dict[str, Entry] = {}
    for name, call in case.calls.passes.items():
        if case.n_bytes:
            entry = beside_yardstick(bench, call, case.n_bytes[name], case.dtype)
        else:
            entry = timed(bench, call, replayed=True)
        passes[name] = entry | {"peers": {}}
    result: dict[str, Any] = {"passes": passes}
    if memory:
        result["peak_bytes"] = bench.peak_of(case.calls.passes[BOTH])
    outputs = case.calls.outputs() if peers else ()
    for peer in peers:
        entries, calls = measure_peer(bench, peer, case, outputs)
        for name, entry in entries.items():
            add_ratio(entry, passes[name])
            passes[name]["peers"][peer.name] = entry
        if memory and calls is not None and "ms" in entries[BOTH]:
            peak = bench.peak_of(calls.passes[BOTH])
            result.setdefault("peers_peak_bytes", {})[peer.name] = peak
    return result


def difference(output: Tensor, right: Tensor) -> float:
    """Return the largest difference over the largest value; infinite where the output is not a number."""
    error = (output.to(right.device) - right).abs().max() / right.abs().max()
    return float(error.nan_to_num(nan=torch.inf))
