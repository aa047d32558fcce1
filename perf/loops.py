"""`python -m perf loops`: the sLSTM's loop over time, beside torch's LSTM of the same width."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from linrec.nn.slstm_steps import slstm_steps
from perf import engine
from perf.command import Named, RowCommand
from perf.engine import BOTH, DTYPES, FORWARD, Calls, Record, Tensors
from perf.operations import normal
from perf.table import Part, Table, errors, implementations_of
from perf.timing import Bench, UnsuitedError

CHECKED = "h and the gradients of Wx and R, against the loop in float64"
BACKENDS = {"fused": "triton", "loop": "torch"}


@dataclass(frozen=True)
class LoopRow(Named):
    """Sizes of a loop; `dtype` is the recurrent weights' dtype, the gates have float32."""

    batch: int
    size: int
    dtype: str
    time: int = 300
    heads: int = 4

    # such as "b16-d64-bf16"
    template = "b{row.batch}-d{row.size}-{row.dtype}"


@dataclass(frozen=True)
class Loops(RowCommand):
    """Speed of the sLSTM's kernel beside the loop in torch operations and torch's LSTM of the same width."""

    def all_rows(self) -> list[LoopRow]:
        dtypes = ("f32", "bf16") if self.device == "cuda" else ("f32",)
        if self.quick:
            return [LoopRow(2, 4, dtype, time=3, heads=2) for dtype in dtypes]
        sizes = [(batch, size) for batch in (16, 128) for size in (64, 128, 256)]
        return [LoopRow(*size, dtype) for size in sizes for dtype in dtypes]

    def measure(self, bench: Bench, row: LoopRow) -> Record:
        inputs, dy = make(row, bench.device)
        width, dtype = row.heads * row.size, DTYPES[row.dtype]

        def ours(name: str) -> Calls:
            if name == "fused" and not bench.on_cuda:
                raise UnsuitedError("runs on CUDA alone")
            function = partial(run, backend=BACKENDS[name])

            def check() -> None:
                wide = tuple(x.double() for x in inputs)
                expected = engine.outputs_and_gradients(partial(run, backend="torch"), wide, dy.double())
                found = engine.outputs_and_gradients(function, inputs, dy)
                engine.assert_all_agree(("h", "dWx", "dR"), found, expected, dtype)

            return engine.calls_of(function, inputs, dy, check=check)

        def lstm() -> Calls:
            layer = nn.LSTM(width, width, batch_first=True, device=bench.device, dtype=dtype)
            return layer_calls(layer, dy.flatten(2).to(dtype))

        implementations = {name: partial(ours, name) for name in BACKENDS} | {"lstm": lstm}

        def launched(bench: Bench, calls: Calls, one: str) -> Record:
            return engine.launched(bench, calls.passes[one])

        found = engine.measure_each(bench, implementations, "loop", launched)
        bench.release()
        return {**row.head(), "checked": CHECKED, **found}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        yield Table(
            "milliseconds of a call on the device and as Python launches it; times as fast as the loop",
            "row {name} | pass {pass} | {implementation} | ms {ms[median]:.3f} | "
            "called {called_ms[median]:.3f} | x {ratio:.1f} | called x {called_ratio:.1f}",
            implementations_of(results["rows"]),
            left=3,
            wrap=("ms",),
        )
        yield from errors(results["rows"])


def make(row: LoopRow, device: torch.device) -> tuple[Tensors, Tensor]:
    """Return Wx (b, t, 4, h, d) and R (h, d, 4 d), and the gradient of h."""
    random = torch.Generator(device).manual_seed(1)
    shape = (row.batch, row.time, row.heads, row.size)
    Wx = normal((*shape[:2], 4, *shape[2:]), torch.float32, random)
    R = normal((row.heads, row.size, 4 * row.size), torch.float32, random) / row.size**0.5
    return (Wx, R.to(DTYPES[row.dtype])), normal(shape, torch.float32, random)


def run(Wx: Tensor, R: Tensor, *, backend: str) -> Tensor:
    zeros = torch.zeros_like(Wx[:, 0, 0], dtype=torch.promote_types(Wx.dtype, torch.float32))
    start = (zeros, zeros, zeros, torch.full_like(zeros, -torch.inf))
    return slstm_steps(Wx, R, start, backend=backend)[0]


def layer_calls(layer: nn.RNNBase, x: Tensor) -> Calls:
    """Return the calls of a recurrent layer of torch, which also projects its inputs."""
    weights = list(layer.parameters())
    given = x.clone().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)[0]

    def both() -> Tensors:
        return torch.autograd.grad(layer(given)[0], [given, *weights], x)

    return Calls({FORWARD: forward, BOTH: both}, lambda: (forward(),))
