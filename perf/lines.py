"""Measures what is one number and no row: memory, a training step, accuracy, the time to compile."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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
from perf.operations import OPERATIONS, make, outputs_and_gradients
from perf.peers import reason
from perf.rows import Row, rows_of
from perf.timing import Budget, Timing, measure
from perf.training import make_step

ROOT = Path(__file__).resolve().parents[1]


def measure_line(name: str, device: torch.device, budget: Budget, *, quick: bool) -> dict[str, Any]:
    """Measure one line.

    Returns:
        What JSON holds of it: "name", "about", "value", "unit", "target" (at most), "met" and details; with
        "error" and without "value" where it fails.
    """
    result: dict[str, Any] = {"name": name}
    try:
        result |= _LINES[name](device, budget, quick)
    except Exception as error:
        return result | {"error": f"failed: {reason(error)}"}
    return result | {"met": result["value"] <= result["target"]}


def memory(device: torch.device, budget: Budget, quick: bool, *, dtype: str) -> dict[str, Any]:
    """Peak of forward and backward, over inputs, output and the gradients of all of them."""
    row = Row("gate_loop", (2, 64, 16) if quick else (8, 4096, 2048), dtype, (None, None))
    run = OPERATIONS["gate_loop"].run
    inputs, dy = make(row, device)
    # the first call also takes what it keeps for all later ones
    outputs_and_gradients(run, inputs, dy)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    size = dy.numel() * dy.element_size()
    others = torch.cuda.memory_allocated(device) - (len(inputs) + 1) * size
    outputs_and_gradients(run, inputs, dy)
    peak = torch.cuda.max_memory_allocated(device) - others
    # inputs and their gradients, y and dy
    needed = (2 * len(inputs) + 2) * size
    about = f"{row.name}: peak memory of forward+backward / (inputs, output, gradients of both)"
    return {
        "about": about,
        "value": peak / needed,
        "unit": "x",
        "target": 1.15,
        "peak_bytes": peak,
        "needed_bytes": needed,
    }


def memory_of_long_conv(device: torch.device, budget: Budget, quick: bool) -> dict[str, Any]:
    """Peak of forward and backward beside the inputs, over the inputs."""
    rows = [row for row in rows_of("cuda", quick=quick) if row.operation == "conv"]
    ratios = {}
    for row in rows:
        run = OPERATIONS["conv"].run
        inputs, dy = make(row, device)
        # the first call also takes what it keeps for all later ones
        outputs_and_gradients(run, inputs, dy)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        outputs_and_gradients(run, inputs, dy)
        taken = torch.cuda.max_memory_allocated(device) - before
        ratios[row.name] = taken / sum(x.numel() * x.element_size() for x in inputs)
    return {
        "about": "conv: what forward+backward take, results included / (u, K); the largest row",
        "value": max(ratios.values()),
        "unit": "x",
        "target": 4.0,
        "rows": ratios,
    }


def step(device: torch.device, budget: Budget, quick: bool, *, captured: bool) -> dict[str, Any]:
    """One training step of the Memory Horizon model, by linrec's kernels and by its torch backend."""
    kernels = _time_step(device, budget, quick, captured=captured)
    # the one place where the layer calls the operator
    with mock.patch("linrec.mixers.gate_loop.gate_loop", partial(gate_loop, backend="torch")):
        plain = _time_step(device, budget, quick, captured=captured)
    how = "compiled and captured, as `linrec train` runs it" if captured else "eager"
    return {
        "about": f"training step of memory-horizon, {how}: kernels / torch backend",
        "value": kernels.median / plain.median,
        "unit": "x",
        "target": 1 / 3,
        "kernels_ms": dataclasses.asdict(kernels),
        "torch_ms": dataclasses.asdict(plain),
    }


def _time_step(device: torch.device, budget: Budget, quick: bool, *, captured: bool) -> Timing:
    config = get_recipe("memory-horizon")
    assert isinstance(config.model, ModelConfig)
    loop = dataclasses.replace(
        config.loop,
        device="cuda" if device.type == "cuda" else "cpu",
        compile="on" if captured else "off",
    )
    batch, length = (2, 32) if quick else (loop.batch_size, 1024)
    _, take = make_step(partial(LanguageModel, config.model), config.optim, loop)
    inputs = torch.randint(config.model.vocab_size, (batch, length), device=device)
    targets = torch.randint(50, (batch, length), device=device)
    with matmul_precision(loop.matmul_precision):
        return measure(lambda: take(inputs, targets), device, budget)


def accuracy(device: torch.device, budget: Budget, quick: bool) -> dict[str, Any]:
    """Error of the float32 scan over that of a float32 loop, where the state forgets slowly."""
    shape = (2, 1024, 8) if quick else (2, 65536, 64)
    random = torch.Generator(device).manual_seed(0)
    a = 1 - 1e-3 * torch.rand(shape, device=device, generator=random)
    # the interval is open: 1 itself would be no decay
    a = a.clamp(max=1 - torch.finfo(a.dtype).eps / 2)
    x = torch.randn(shape, device=device, generator=random)
    with torch.no_grad():
        mine = scan(a, x)[0].cpu()
        # a step launches too little for a GPU: both loops run on the CPU
        a, x = a.cpu(), x.cpu()
        loop = scan(a, x, backend="reference")[0]
        exact = scan(a.double(), x.double(), backend="reference")[0]
    errors = {name: _errors(y, exact) for name, y in (("linrec", mine), ("loop", loop))}
    ratios = [errors["linrec"][kind] / errors["loop"][kind] for kind in ("rms", "largest")]
    return {
        "about": f"float32 error of scan {shape}, |a| in (0.999, 1) / that of a float32 loop",
        "value": max(ratios),
        "unit": "x",
        "target": 2.0,
        "relative_errors": errors,
    }


def _errors(y: Tensor, exact: Tensor) -> dict[str, float]:
    difference = y.double() - exact
    return {
        "rms": float(difference.norm() / exact.norm()),
        "largest": float(difference.abs().max() / exact.abs().max()),
    }


def compile_time(device: torch.device, budget: Budget, quick: bool) -> dict[str, Any]:
    """Seconds of the first forward and backward pass in a new process that finds nothing compiled."""
    seconds = {}
    for operation in OPERATIONS:
        with _empty_caches() as environment:
            finished = subprocess.run(
                [sys.executable, "-m", "perf.first_call", operation, device.type],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
            )
        if finished.returncode:
            raise RuntimeError(f"{operation}: {(finished.stderr.strip().splitlines() or ['no message'])[-1]}")
        seconds[operation] = float(finished.stdout.split()[-1])
    return {
        "about": "first forward+backward of a new process, nothing compiled: the slower operation",
        "value": max(seconds.values()),
        "unit": "s",
        "target": 20.0,
        "seconds": seconds,
    }


@contextlib.contextmanager
def _empty_caches() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        # where linrec is not installed, it is found as this process found it
        path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "NUMBA_CACHE_DIR": f"{folder}/numba"}
        yield {**os.environ, **caches, "PYTHONPATH": path}


_LINES: dict[str, Callable[[torch.device, Budget, bool], dict[str, Any]]] = {
    "memory-f32": partial(memory, dtype="f32"),
    "memory-bf16": partial(memory, dtype="bf16"),
    "memory-conv": memory_of_long_conv,
    "step": partial(step, captured=False),
    "step-captured": partial(step, captured=True),
    "accuracy": accuracy,
    "compile": compile_time,
}
