"""The numbers of `perf ops` beside its rows: memory, a training step, accuracy, the time to compile.

`python -m perf.lines OPERATION DEVICE` prints the seconds of a process's first forward and backward pass.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from linrec.lab.train import get_recipe
from linrec.lab.train.fabric import matmul_precision
from linrec.models import LanguageModel, ModelConfig
from linrec.ops import gate_loop, scan
from perf.engine import outputs_and_gradients
from perf.operations import OPERATIONS, Row, make
from perf.timing import Bench, Timing, why
from perf.training import make_step

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Line:
    """A number with a greatest value that is asked.

    Args:
        name: the name of its row.
        measure: returns "about", "value" and its parts, given the bench, and whether sizes are tiny.
        target: the largest value that is asked.
        unit: the unit of both.
        on_cpu: whether it is measured on the CPU too.
        slow: whether it takes minutes, and `--quick` leaves it out.
    """

    name: str
    measure: Callable[[Bench, bool], dict[str, Any]]
    target: float
    unit: str = "x"
    on_cpu: bool = False
    slow: bool = False

    # not a field: the list of its record
    key = "lines"

    def measured(self, bench: Bench, *, quick: bool) -> dict[str, Any]:
        try:
            found = self.measure(bench, quick)
        except Exception as error:
            return {"name": self.name, "error": f"failed: {why(error)}"}
        found |= {"unit": self.unit, "target": self.target, "met": found["value"] <= self.target}
        return {"name": self.name, **found}


def peak_bytes_of(bench: Bench, row: Row) -> tuple[int, int, int]:
    """Return the peak of forward and backward beside the inputs, and the bytes of the inputs and of dy."""
    inputs, dy = make(row, bench.device)
    call = partial(outputs_and_gradients, OPERATIONS[row.operation].run, inputs, dy)
    # the first call allocates memory that all later calls share
    call()
    bench.wait()
    peak = bench.peak_of(call)
    if peak is None:
        raise RuntimeError(f"the memory of {bench.device.type} is not counted")
    return peak, sum(x.numel() * x.element_size() for x in inputs), dy.numel() * dy.element_size()


def memory(bench: Bench, quick: bool, *, dtype: str) -> dict[str, Any]:
    """Peak of forward and backward, over inputs, output and the gradients of all of them."""
    row = Row("gate_loop", (2, 64, 16) if quick else (8, 4096, 2048), dtype)
    peak, of_inputs, of_dy = peak_bytes_of(bench, row)
    # inputs and their gradients, y and dy
    peak, needed = peak + of_inputs + of_dy, 2 * (of_inputs + of_dy)
    about = f"{row.name}: peak memory of forward+backward / (inputs, output, gradients of both)"
    return {"about": about, "value": peak / needed, "peak_bytes": peak, "needed_bytes": needed}


def memory_of_long_conv(bench: Bench, quick: bool) -> dict[str, Any]:
    """Peak of forward and backward beside the inputs, over the inputs."""
    # imported here: `perf.ops` measures these numbers
    from perf.ops import Ops

    ratios = {}
    for row in Ops("cuda", quick).all_rows():
        if isinstance(row, Row) and row.operation == "conv":
            peak, of_inputs, _ = peak_bytes_of(bench, row)
            ratios[row.name] = peak / of_inputs
    about = "conv: what forward+backward take, results included / (u, K); the largest row"
    return {"about": about, "value": max(ratios.values()), "rows": ratios}


def step(bench: Bench, quick: bool, *, captured: bool) -> dict[str, Any]:
    """One training step of the Memory Horizon model, by linrec's kernels and by its torch backend."""
    kernels = _time_step(bench, quick, captured=captured)
    # the one place where the layer calls the operator
    with mock.patch("linrec.mixers.gate_loop.gate_loop", partial(gate_loop, backend="torch")):
        plain = _time_step(bench, quick, captured=captured)
    how = "compiled and captured, as `linrec train` runs it" if captured else "eager"
    return {
        "about": f"training step of memory-horizon, {how}: kernels / torch backend",
        "value": kernels.median / plain.median,
        "kernels_ms": kernels._asdict(),
        "torch_ms": plain._asdict(),
    }


def _time_step(bench: Bench, quick: bool, *, captured: bool) -> Timing:
    config = get_recipe("memory-horizon")
    assert isinstance(config.model, ModelConfig)
    loop = dataclasses.replace(
        config.loop,
        device="cuda" if bench.on_cuda else "cpu",
        compile="on" if captured else "off",
    )
    batch, length = (2, 32) if quick else (loop.batch_size, 1024)
    _, take = make_step(partial(LanguageModel, config.model), config.optim, loop)
    inputs = torch.randint(config.model.vocab_size, (batch, length), device=bench.device)
    targets = torch.randint(50, (batch, length), device=bench.device)
    with matmul_precision(loop.matmul_precision):
        return bench.measure(lambda: take(inputs, targets))


def accuracy(bench: Bench, quick: bool) -> dict[str, Any]:
    """Error of the float32 scan over the error of a float32 loop, where the state forgets slowly."""
    shape = (2, 1024, 8) if quick else (2, 65536, 64)
    random = torch.Generator(bench.device).manual_seed(0)
    a = 1 - 1e-3 * torch.rand(shape, device=bench.device, generator=random)
    # the interval is open: 1 is no decay
    a = a.clamp(max=1 - torch.finfo(a.dtype).eps / 2)
    x = torch.randn(shape, device=bench.device, generator=random)
    with torch.no_grad():
        mine = scan(a, x)[0].cpu()
        # a step is too little work for a GPU: both loops run on the CPU
        a, x = a.cpu(), x.cpu()
        loop = scan(a, x, backend="reference")[0]
        exact = scan(a.double(), x.double(), backend="reference")[0]
    errors = {name: _errors(y, exact) for name, y in (("linrec", mine), ("loop", loop))}
    ratios = [errors["linrec"][kind] / errors["loop"][kind] for kind in ("rms", "largest")]
    about = f"float32 error of scan {shape}, |a| in (0.999, 1) / that of a float32 loop"
    return {"about": about, "value": max(ratios), "relative_errors": errors}


def _errors(y: Tensor, exact: Tensor) -> dict[str, float]:
    difference = y.double() - exact
    return {
        "rms": float(difference.norm() / exact.norm()),
        "largest": float(difference.abs().max() / exact.abs().max()),
    }


def compile_time(bench: Bench, quick: bool) -> dict[str, Any]:
    """Seconds of the first forward and backward pass in a new process with empty caches of kernels."""
    seconds = {}
    for operation in OPERATIONS:
        with _empty_caches() as environment:
            finished = subprocess.run(
                [sys.executable, "-m", "perf.lines", operation, bench.device.type],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
            )
        if finished.returncode:
            raise RuntimeError(f"{operation}: {(finished.stderr.strip().splitlines() or ['no message'])[-1]}")
        seconds[operation] = float(finished.stdout.split()[-1])
    about = "first forward+backward of a new process, nothing compiled: the slower operation"
    return {"about": about, "value": max(seconds.values()), "seconds": seconds}


@contextlib.contextmanager
def _empty_caches() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        # the new process finds linrec where this one did, installed or not
        path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "NUMBA_CACHE_DIR": f"{folder}/numba"}
        yield {**os.environ, **caches, "PYTHONPATH": path}


def first_call(bench: Bench, operation: str) -> float:
    """Return the seconds from the call to its gradients, compilation included, in a started torch."""
    inputs, dy = make(Row(operation, (32, 1024, 512), "f32"), bench.device)
    bench.wait()
    return bench.time_once(partial(outputs_and_gradients, OPERATIONS[operation].run, inputs, dy)) / 1e3


LINES = (
    Line("memory-f32", partial(memory, dtype="f32"), 1.15),
    Line("memory-bf16", partial(memory, dtype="bf16"), 1.15),
    Line("memory-conv", memory_of_long_conv, 4.0),
    Line("step", partial(step, captured=False), 1 / 3),
    Line("step-captured", partial(step, captured=True), 1 / 3, slow=True),
    Line("accuracy", accuracy, 2.0, on_cpu=True),
    Line("compile", compile_time, 20.0, unit="s", slow=True),
)

if __name__ == "__main__":
    print(first_call(Bench(torch.device(sys.argv[2])), sys.argv[1]))
