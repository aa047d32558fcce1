"""The sLSTM's loop over time: rows, inputs, correctness, measurement, and torch's LSTM of the same width."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linrec.nn.slstm_steps import slstm_steps
from linrec.testing import assert_agree
from perf.memory import release, why
from perf.operations import normal
from perf.ops import failure
from perf.peers import Calls, torch_calls
from perf.rows import DTYPES, PASSES
from perf.timing import Budget, measure

CHECKED = "h and the gradients of Wx and R, against the loop in float64"
# the names of the measurements in JSON
FUSED, LOOP, LSTM = "fused", "loop", "lstm"
NAMES = (FUSED, LOOP, LSTM)


@dataclass(frozen=True)
class LoopRow:
    """Sizes of a loop; `dtype` is that of the recurrent weights, beside gates in float32."""

    batch: int
    size: int
    dtype: str
    time: int = 300
    heads: int = 4

    @property
    def name(self) -> str:
        """The name that --rows takes, such as "b16-d64-bf16"."""
        return f"b{self.batch}-d{self.size}-{self.dtype}"


def loop_rows_of(device_type: str, *, quick: bool = False) -> list[LoopRow]:
    """Return the rows of a device; `quick` keeps the dtypes, at a size of no meaning."""
    dtypes = ("f32", "bf16") if device_type == "cuda" else ("f32",)
    if quick:
        return [LoopRow(2, 4, dtype, time=3, heads=2) for dtype in dtypes]
    return [LoopRow(batch, size, dtype) for batch in (16, 128) for size in (64, 128, 256) for dtype in dtypes]


def make(row: LoopRow, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return Wx (b, t, 4, h, d) and R (h, d, 4 d), and the gradient of h."""
    random = torch.Generator(device).manual_seed(1)
    shape = (row.batch, row.time, row.heads, row.size)
    Wx = normal((*shape[:2], 4, *shape[2:]), torch.float32, random)
    R = normal((row.heads, row.size, 4 * row.size), torch.float32, random) / row.size**0.5
    return (Wx, R.to(DTYPES[row.dtype])), normal(shape, torch.float32, random)


def run(Wx: Tensor, R: Tensor, *, backend: str) -> Tensor:
    """Return h of every step, from the state of a new sequence."""
    zeros = torch.zeros_like(Wx[:, 0, 0], dtype=torch.promote_types(Wx.dtype, torch.float32))
    start = (zeros, zeros, zeros, torch.full_like(zeros, -torch.inf))
    return slstm_steps(Wx, R, start, backend=backend)[0]


def check_loop(row: LoopRow, inputs: tuple[Tensor, Tensor], dy: Tensor, backend: str) -> None:
    """Compare outputs and gradients with the loop in double precision.

    Raises:
        AssertionError: they differ by more than the tolerance of the weights' dtype.
    """

    def outcome(inputs: tuple[Tensor, ...], dy: Tensor, backend: str) -> tuple[Tensor, ...]:
        calls = torch_calls(partial(run, backend=backend), inputs, dy)
        return calls.output(), *calls.both()

    expected = outcome(tuple(x.double() for x in inputs), dy.double(), "torch")
    found = outcome(inputs, dy, backend)
    for name, mine, right in zip(("h", "dWx", "dR"), found, expected, strict=True):
        assert_agree(mine, right, name, dtype=DTYPES[row.dtype])


def measure_loop(row: LoopRow, device: torch.device, budget: Budget) -> dict[str, Any]:
    """Check and time the kernel and the loop, and time torch's LSTM.

    Returns:
        What JSON holds of the row: "passes" has, for each of `PASSES` and of `NAMES`, "ms" of the device and
        "called_ms" as Python launches it, and "ratio" to the loop; or "missing". With "error" where linrec's
        are wrong or fail.
    """
    result: dict[str, Any] = {"name": row.name, **dataclasses.asdict(row), "checked": CHECKED}
    inputs, dy = make(row, device)
    entries: dict[str, dict[str, Any]] = {}
    for name, backend in ((FUSED, "triton"), (LOOP, "torch")):
        if name == FUSED and device.type != "cuda":
            entries[name] = {one: {"missing": "runs on CUDA alone"} for one in PASSES}
            continue
        if wrong := failure(partial(check_loop, row, inputs, dy, backend)):
            return result | {"error": f"{name}: {wrong}"}
        entries[name] = _timed(torch_calls(partial(run, backend=backend), inputs, dy), device, budget)
    try:
        width, dtype = row.heads * row.size, DTYPES[row.dtype]
        lstm = nn.LSTM(width, width, batch_first=True, device=device, dtype=dtype)
        entries[LSTM] = _timed(layer_calls(lstm, dy.flatten(2).to(dtype)), device, budget)
    except Exception as error:
        entries[LSTM] = {one: {"missing": why(error)} for one in PASSES}
    release(device)
    for name in PASSES:
        for entry in entries.values():
            if "ms" in entry[name]:
                for time in ("ms", "called_ms"):
                    ratio = entries[LOOP][name][time]["median"] / entry[name][time]["median"]
                    entry[name][time.replace("ms", "ratio")] = ratio
    return result | {"passes": {one: {name: entries[name][one] for name in NAMES} for one in PASSES}}


def layer_calls(layer: nn.RNNBase, x: Tensor) -> Calls:
    """Return the calls of a recurrent layer of torch, which also projects its inputs."""
    weights = list(layer.parameters())

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)[0]

    given = x.clone().requires_grad_()
    return Calls(forward, lambda: torch.autograd.grad(layer(given)[0], [given, *weights], x), forward)


def _timed(calls: Calls, device: torch.device, budget: Budget) -> dict[str, Any]:
    def times(call: Callable[[], Any]) -> dict[str, Any]:
        replayed, called = (measure(call, device, budget, replayed=again) for again in (True, False))
        return {"ms": dataclasses.asdict(replayed), "called_ms": dataclasses.asdict(called)}

    return {name: times(call) for name, call in zip(PASSES, (calls.forward, calls.both), strict=True)}
