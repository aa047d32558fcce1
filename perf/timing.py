"""Medians of times, and the rates of memory that they are compared with."""

import ctypes
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COPY_BYTES = 2**30
TURN = 4


@dataclass(frozen=True)
class Budget:
    """How long each function is run, in milliseconds: unmeasured before, and measured."""

    warmup_ms: float = 25.0
    measured_ms: float = 100.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median, and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Rate:
    """Calls per second in windows of so many calls: the median window, the slowest and the fastest."""

    median: float
    lowest: float
    highest: float
    calls: int


def measure(
    function: Callable[[], Any],
    device: torch.device,
    budget: Budget,
    *,
    wall_clock: bool = False,
    replayed: bool = False,
) -> Timing:
    """Time a function.

    On CUDA by events on the device, with its cache cleared before each call; elsewhere by the clock on the
    wall, which `wall_clock` asks for on CUDA too: of a function that waits for its own results. The first
    call, which may compile, is not timed. What takes longer than the whole budget is measured once.

    With `replayed`, a CUDA graph of the call is what is timed there: the device alone, not what Python takes
    to launch it. A call that cannot be captured is timed as it is.
    """
    time_once(function, device)
    on_device = device.type == "cuda" and not wall_clock
    if on_device and replayed and (graph := _captured(function)) is not None:
        function = graph.replay
    if (once := time_once(function, device)) > budget.warmup_ms + budget.measured_ms:
        return Timing(once, once, once)
    if on_device:
        # imported here: Triton is where CUDA is
        from triton.testing import do_bench

        quantiles = [0.5, 0.2, 0.8]
        times = do_bench(function, warmup=budget.warmup_ms, rep=budget.measured_ms, quantiles=quantiles)
        return Timing(*times)
    _repeat(function, budget.warmup_ms, fewest=1)
    times = sorted(_repeat(function, budget.measured_ms, fewest=5))
    return Timing(statistics.median(times), _percentile(times, 0.2), _percentile(times, 0.8))


def tokens_per_second(rate: "Rate", per_call: int) -> dict[str, float]:
    """Return the median, lowest and highest speed of calls of so many tokens, as JSON holds them."""
    return {
        "median": rate.median * per_call,
        "lowest": rate.lowest * per_call,
        "highest": rate.highest * per_call,
    }


def calls_per_second(
    function: Callable[[], Any], device: torch.device, *, windows: int = 5, seconds: float = 0.1
) -> Rate:
    """Count calls by the clock on the wall, call after call as in training; a window's end alone is awaited.

    Args:
        function: what has been called before, so that nothing is left to compile.
        device: where it computes.
        windows: windows to measure.
        seconds: how long each should be; it has one call at least.
    """
    wait(device)
    calls = max(1, round(seconds * 1e3 / time_once(function, device)))
    rates = []
    for _ in range(windows):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        wait(device)
        rates.append(calls / (time.perf_counter() - start))
    return Rate(statistics.median(rates), min(rates), max(rates), calls)


def _captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except Exception:
        # whatever it is that cannot be captured: the call itself works
        torch.cuda.synchronize()
        return None
    return graph


def time_once(function: Callable[[], Any], device: torch.device) -> float:
    """Return the milliseconds of one call by the clock on the wall, until the device is done."""
    start = time.perf_counter()
    function()
    wait(device)
    return (time.perf_counter() - start) * 1e3


def wait(device: torch.device) -> None:
    """Wait for the device to finish; the CPU already has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repeat(function: Callable[[], Any], total_ms: float, *, fewest: int) -> list[float]:
    times: list[float] = []
    while len(times) < fewest or sum(times) < total_ms:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _percentile(ordered: list[float], part: float) -> float:
    return ordered[round(part * (len(ordered) - 1))]


def percent_of(n_bytes: int, milliseconds: float, rate: float) -> float:
    """Return how much of a rate (bytes per second) a call reached that had to move so many bytes.

    Example:
        >>> percent_of(2_000_000, 1.0, 4e9)
        50.0
    """
    return 100 * n_bytes / (milliseconds * 1e-3) / rate


def copy_rate(device: torch.device, budget: Budget, n_bytes: int = COPY_BYTES) -> float:
    """Return bytes read and written per second by a copy on the device, of a buffer that no cache holds."""
    source = torch.randn(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / (measure(lambda: target.copy_(source), device, budget).median * 1e-3)


def matmul_rate(device: torch.device, dtype: torch.dtype, budget: Budget, size: int) -> float:
    """Return floating-point operations per second of a product of two square matrices of random numbers."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (measure(lambda: left @ right, device, budget).median * 1e-3)


def beside_add(
    function: Callable[[], Any], n_bytes: int, dtype: torch.dtype, budget: Budget
) -> tuple[Timing, float]:
    """Time a function on the CPU, and a `torch.add(x, y, out=z)` that moves as many bytes.

    As many, so that caches hold as much of both. In turns of a few calls each: what else the machine does
    changes within seconds, and would change one of them alone.

    Returns:
        The function's times, and the bytes that the addition reads and writes per second.
    """
    elements = max(1, n_bytes // (3 * dtype.itemsize))
    x, y, z = (
        torch.randn(elements, dtype=dtype),
        torch.randn(elements, dtype=dtype),
        torch.empty(elements, dtype=dtype),
    )
    times: tuple[list[float], list[float]] = ([], [])
    while not times[0] or sum(times[0]) < budget.warmup_ms + budget.measured_ms:
        for call, found in ((lambda: torch.add(x, y, out=z), times[1]), (function, times[0])):
            # the first call of a turn finds the other one's data in the caches
            found += _repeat(call, 0, fewest=TURN + 1)[1:]
    ordered = sorted(times[0])
    timing = Timing(statistics.median(ordered), _percentile(ordered, 0.2), _percentile(ordered, 0.8))
    return timing, 3 * elements * dtype.itemsize / (statistics.median(times[1]) * 1e-3)


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for the next allocation; return whether it does.

    It would otherwise give every large tensor back to the system, and each call would begin with the system
    zeroing new pages, which takes as long as the recurrence itself: no property of the operation, and no part
    of the addition that it is compared with, which has its output given.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    m_trim_threshold, m_mmap_max = -1, -4
    library = ctypes.CDLL(None)
    return bool(library.mallopt(m_mmap_max, 0) and library.mallopt(m_trim_threshold, 2**31 - 1))
