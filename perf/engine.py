"""The measurements of all commands: implementations on the same inputs, and the records of their times.

An entry of a record is one time, `{"ms": {"median", "p20", "p80"}}`, with more numbers beside it; or
`{"missing": reason}`. "ratio" is the time of the baseline over the entry's. A record with "error" has no
entries: the result was wrong, or failed.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from linrec.testing import assert_agree
from perf.timing import Bench, UnsuitedError, share, why

Tensors: TypeAlias = tuple[Tensor, ...]
Record: TypeAlias = dict[str, Any]

PASSES = FORWARD, BOTH = "forward", "forward+backward"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "c64": torch.complex64}
# a larger difference of a peer's outputs from linrec's, relative to the largest output, is reported
CLOSE = 0.05


@dataclass(frozen=True)
class Calls:
    """The calls of an implementation on given inputs.

    Args:
        passes: the call to time, by the name of the pass.
        outputs: computes the outputs in torch's layout, for comparison.
        waits: whether the calls wait for their results, on a stream that is not torch's.
        same: whether they compute what linrec computes; softmax attention does not.
        check: raises AssertionError if the results are wrong; None compares nothing.
        n_bytes: the fewest bytes that each pass reads and writes, to compare it with a yardstick.
        dtype: the dtype of the addition that is the yardstick on the CPU.
    """

    passes: Mapping[str, Callable[[], Any]]
    outputs: Callable[[], Tensors]
    waits: bool = False
    same: bool = True
    check: Callable[[], None] | None = None
    n_bytes: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Implementation:
    """An implementation that `--peers` measures and `--without` leaves out.

    Args:
        name: heads its column.
        about: a description of one line.
        module: the module that it needs.
        prepare: returns the calls from the operation's name, its inputs, and more tensors. It converts the
            inputs to the layout that the implementation takes, before the clock starts.
        operations: the operations that it has; empty for all.
        device: the only type of device that it is measured on, if there is one.
    """

    name: str
    about: str
    module: str
    prepare: Callable[..., Calls]
    operations: tuple[str, ...] = ()
    device: str | None = None

    @property
    def installed(self) -> bool:
        """Whether its module can be found; it may still fail."""
        return importlib.util.find_spec(self.module) is not None

    def calls(self, operation: str, inputs: Tensors, *more: Tensor) -> Calls:
        """Return the calls, or raise UnsuitedError for an operation or a device that it lacks."""
        if self.operations and operation not in self.operations:
            raise UnsuitedError(f"has no {operation}")
        if not self.installed:
            raise UnsuitedError("not installed")
        if self.device is not None and inputs[0].device.type != self.device:
            where = "runs on CUDA" if self.device == "cuda" else "is measured on the CPU"
            raise UnsuitedError(f"{where} alone")
        return self.prepare(operation, inputs, *more)


def calls_of(
    function: Callable[..., Tensor],
    inputs: Tensors,
    dy: Tensor,
    output: Callable[[Tensor], Tensor] = lambda y: y,
    **more: Any,
) -> Calls:
    """Return forward without gradients, and forward with the gradients of all inputs from dy.

    `output` converts y to the layout of linrec's output; `more` are further fields of the calls.
    """
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    plain = tuple(x.detach() for x in inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*plain)

    def both() -> Tensors:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return Calls({FORWARD: forward, BOTH: both}, lambda: (output(forward()),), **more)


def outputs_and_gradients(function: Callable[..., Tensor], inputs: Tensors, dy: Tensor) -> Tensors:
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
    return ["y", *(f"gradient of input {number}" for number in range(1, len(inputs) + 1))]


def failure(check: Callable[[], None] | None) -> str | None:
    """Run a check; return the reason not to time the checked function, None if it is right."""
    try:
        if check is not None:
            check()
    except AssertionError as error:
        return f"wrong, so not timed: {' '.join(str(error).split())}"
    except Exception as error:
        return f"failed, so not timed: {why(error)}"
    return None


def attempt(measurement: Callable[[], Record]) -> Record:
    """Return an entry; one with "missing", the reason, where the measurement fails."""
    try:
        return measurement()
    except Exception as error:
        return {"missing": why(error)}


def timed(bench: Bench, call: Callable[[], Any], **how: bool) -> Record:
    """Return the entry of a call; `how` are keyword arguments of `Bench.measure`."""
    return {"ms": bench.measure(call, **how)._asdict()}


def launched(bench: Bench, call: Callable[[], Any]) -> Record:
    """Return the entry of a call with its time on the device, and as Python launches it."""
    return timed(bench, call, replayed=True) | {"called_ms": timed(bench, call)["ms"]}


def beside_yardstick(bench: Bench, call: Callable[[], Any], n_bytes: int, dtype: torch.dtype) -> Record:
    """Return the entry of a call that moves so many bytes, beside the yardstick.

    "called_ms" is the time as Python launches the call, "rate" the yardstick's, "percent" the part of it.
    """
    if bench.copy is None:
        timing, rate = bench.beside_add(call, n_bytes, dtype)
        entry = {"ms": timing._asdict(), "called_ms": timing._asdict()}
    else:
        entry, rate = launched(bench, call), bench.copy
    percent = 100 * share(n_bytes, rate, entry["ms"]["median"])
    return entry | {"bytes": n_bytes, "rate": rate, "percent": percent}


def add_ratio(entry: Record, baseline: Record) -> None:
    """Add "ratio", the baseline's time over the entry's, and "called_ratio", where both have the times."""
    for time in ("ms", "called_ms"):
        if time in entry and time in baseline:
            entry[time.replace("ms", "ratio")] = baseline[time]["median"] / entry[time]["median"]


def entry_of_call(bench: Bench, calls: Calls, one: str) -> Record:
    """Return the entry of a pass on the device, beside the yardstick if its bytes are known."""
    if calls.n_bytes:
        return beside_yardstick(bench, calls.passes[one], calls.n_bytes[one], calls.dtype)
    return timed(bench, calls.passes[one], wall_clock=calls.waits, replayed=True)


def measure_each(
    bench: Bench,
    implementations: Mapping[str, Callable[[], Calls]],
    baseline: str,
    entry_of: Callable[[Bench, Calls, str], Record] = entry_of_call,
    *,
    compared: bool = False,
    memory: bool = False,
) -> Record:
    """Check and time implementations; return "passes", by pass and implementation, or "error".

    `implementations` are functions that return the calls; an error of theirs makes the entries "missing".
    `entry_of` times a pass; "ratio" is to the time of `baseline`. With `compared`, the baseline comes first,
    and an entry whose outputs differ from those of the baseline has "off", the difference. With `memory`,
    "peaks" are those of forward and backward, beyond the inputs.
    """
    passes: dict[str, dict[str, Record]] = {}
    peaks: dict[str, int | None] = {}
    outputs: Tensors = ()
    for name, prepare in implementations.items():
        try:
            calls, off = prepare(), 0.0
            if compared and name != baseline and calls.same:
                off = max(map(difference, calls.outputs(), outputs))
        except Exception as error:
            for one in passes or PASSES:
                passes.setdefault(one, {})[name] = {"missing": why(error)}
            continue
        if wrong := failure(calls.check):
            return {"error": f"{name}: {wrong}"}
        if compared and name == baseline:
            outputs = calls.outputs()
        for one in calls.passes:
            entry = attempt(partial(entry_of, bench, calls, one))
            if compared and name == baseline and "missing" in entry:
                return {"error": f"{name}: {entry['missing']}"}
            passes.setdefault(one, {})[name] = entry | ({"off": off} if off > CLOSE else {})
        if memory and "ms" in passes[BOTH][name]:
            peaks[name] = bench.peak_of(calls.passes[BOTH])
    for entries in passes.values():
        for entry in entries.values():
            add_ratio(entry, entries[baseline])
    return {"passes": passes} | ({"peaks": peaks} if memory else {})


def difference(output: Tensor, right: Tensor) -> float:
    """Return the largest difference over the largest value; infinite where the output is not a number."""
    error = (output.to(right.device) - right).abs().max() / right.abs().max()
    return float(error.nan_to_num(nan=torch.inf))
