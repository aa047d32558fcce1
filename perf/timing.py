"""Time and memory of calls, and the rates of a device to compare them with."""

import ctypes
import gc
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from linrec.ops.core.garbage import uncollected

OUT_OF_MEMORY = "out of memory"
# calls of a turn, in `Bench.beside_add`
TURN = 4


class UnsuitedError(Exception):
    """An implementation lacks an operation or does not take these inputs; the message says which."""


class Budget(NamedTuple):
    """Milliseconds for which a call is repeated: first unmeasured, then measured."""

    warmup_ms: float = 25.0
    measured_ms: float = 100.0


class Windows(NamedTuple):
    """Number of windows in which calls are counted, and the seconds of each."""

    windows: int = 5
    seconds: float = 1.0


BUDGET, WINDOWS = Budget(), Windows()


class Timing(NamedTuple):
    """Milliseconds of one call: the median, and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


class Rate(NamedTuple):
    """Calls per second of the median, slowest and fastest window, and the calls of a window."""

    median: float
    lowest: float
    highest: float
    calls: int

    def tokens(self, per_call: int) -> dict[str, float]:
        """Return tokens per second as JSON holds them, for calls of `per_call` tokens."""
        return {name: getattr(self, name) * per_call for name in ("median", "lowest", "highest")}


class Steps(NamedTuple):
    first_seconds: float
    rate: Rate
    held_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Bench:
    """A device, and how long calls are measured on it.

    Args:
        device: the device.
        budget: how long a call is repeated.
        windows: how long steps are counted.
        copy: bytes per second of a copy on the device, the yardstick of operators; None compares each call
            with an addition that moves as many bytes.
        product: operations per second of a large matrix product, the yardstick of models.
    """

    device: torch.device
    budget: Budget = BUDGET
    windows: Windows = WINDOWS
    copy: float | None = None
    product: float = float("nan")

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def measure(
        self, function: Callable[[], Any], *, wall_clock: bool = False, replayed: bool = False
    ) -> Timing:
        """Time a function; the first call may compile and is not timed.

        CUDA events measure the time, and the device's cache is cleared before each call. Elsewhere, and with
        `wall_clock` for CUDA functions that wait for their own results, the wall clock measures it. A call
        that takes longer than the whole budget is measured once. With `replayed`, CUDA times the replay of
        the call's graph, without the time that Python takes to launch the kernels, if it can be captured.
        """
        budget = self.budget
        self.time_once(function)
        by_events = self.on_cuda and not wall_clock
        if by_events and replayed and (graph := _captured(function)) is not None:
            function = graph.replay
        if (once := self.time_once(function)) > budget.warmup_ms + budget.measured_ms:
            return Timing(once, once, once)
        if by_events:
            # imported here: Triton is installed with CUDA alone
            from triton.testing import do_bench

            quantiles = [0.5, 0.2, 0.8]
            times = do_bench(function, warmup=budget.warmup_ms, rep=budget.measured_ms, quantiles=quantiles)
            return Timing(*times)
        _repeat(function, budget.warmup_ms, fewest=1)
        return _timing(_repeat(function, budget.measured_ms, fewest=5))

    def steps(
        self,
        call: Callable[[], Any],
        *,
        warm: int,
        settle: Callable[[], Any] = lambda: None,
        longest_ms: float = float("inf"),
    ) -> Steps:
        """Time a training step; the first may compile, is timed apart, and its memory does not count.

        `warm` steps follow it. `settle` runs before the memory that is held between two steps is read. A step
        that takes longer than `longest_ms` is timed once.
        """
        first = self.time_once(call) / 1e3
        settle()
        self.release()
        held = self.peak_bytes()
        for _ in range(warm):
            call()
        if (once := self.time_once(call)) > longest_ms:
            rate = Rate(1e3 / once, 1e3 / once, 1e3 / once, 1)
        else:
            rate = self.calls_per_second(call)
        return Steps(first, rate, held, self.peak_bytes())

    def calls_per_second(self, function: Callable[[], Any]) -> Rate:
        """Count calls of a compiled function by the wall clock, back to back as in training.

        The end of a window waits for the device, a call does not. Each window has at least one call.
        """
        self.wait()
        calls = max(1, round(self.windows.seconds * 1e3 / self.time_once(function)))
        rates = []
        for _ in range(self.windows.windows):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            self.wait()
            rates.append(calls / (time.perf_counter() - start))
        return Rate(statistics.median(rates), min(rates), max(rates), calls)

    def time_once(self, function: Callable[[], Any]) -> float:
        """Return the wall-clock milliseconds of one call, until the device is done."""
        start = time.perf_counter()
        function()
        self.wait()
        return (time.perf_counter() - start) * 1e3

    def wait(self) -> None:
        """Wait until a CUDA device is done; calls on the CPU return when they are."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Free unreferenced memory, cycles included, and start a new peak; on CUDA alone."""
        if self.on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Return the peak bytes of tensors since `release`; None on the CPU, where they are not counted."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_cuda else None

    def peak_of(self, call: Callable[[], Any]) -> int | None:
        """Return the peak bytes of a call, its results included, beyond the bytes allocated before it."""
        self.release()
        before = self.peak_bytes()
        results = call()
        peak = self.peak_bytes()
        del results
        return None if peak is None or before is None else peak - before

    def copy_rate(self, n_bytes: int = 2**30) -> float:
        """Return the bytes per second, read and written, of a copy on the device that no cache holds."""
        source = torch.randn(n_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * n_bytes / (self.measure(lambda: target.copy_(source)).median * 1e-3)

    def matmul_rate(self, dtype: torch.dtype, size: int) -> float:
        """Return the floating-point operations per second of a product of two square matrices."""
        left, right = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return 2 * size**3 / (self.measure(lambda: left @ right).median * 1e-3)

    def with_copy(self, *, quick: bool) -> tuple["Bench", dict[str, Any]]:
        """Return the bench with the yardstick of operators, a copy on CUDA or additions, and its record."""
        if not self.on_cuda:
            return self, {"yardstick": "torch.add(x, y, out=z)", "keeps_freed_memory": keep_freed_memory()}
        copy = self.copy_rate(2**20 if quick else 2**30)
        return replace(self, copy=copy), {"yardstick": "a copy on the device", "copy_rate": copy}

    def with_product(self, dtype: torch.dtype, *, quick: bool) -> tuple["Bench", dict[str, Any]]:
        """Return the bench with the yardstick of models, and its record."""
        size = 64 if quick else 8192 if self.on_cuda else 1024
        rate = self.matmul_rate(dtype, size)
        return replace(self, product=rate), {"size": size, "dtype": str(dtype), "rate": rate}

    def beside_add(
        self, function: Callable[[], Any], n_bytes: int, dtype: torch.dtype
    ) -> tuple[Timing, float]:
        """Time a function on the CPU, and a `torch.add(x, y, out=z)` that moves as many bytes.

        The two take turns of a few calls, because the load of the machine changes within seconds. Returns the
        function's times, and the bytes that the addition reads and writes per second.
        """
        elements = max(1, n_bytes // (3 * dtype.itemsize))
        x, y = (torch.randn(elements, dtype=dtype) for _ in range(2))
        z = torch.empty_like(x)
        times: list[float] = []
        of_add: list[float] = []
        while not times or sum(times) < self.budget.warmup_ms + self.budget.measured_ms:
            # the first call of a turn finds the other function's data in the caches
            of_add += _repeat(lambda: torch.add(x, y, out=z), 0, fewest=TURN + 1)[1:]
            times += _repeat(function, 0, fewest=TURN + 1)[1:]
        return _timing(times), 3 * elements * dtype.itemsize / (statistics.median(of_add) * 1e-3)


def _captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with uncollected(), torch.cuda.graph(graph):
            function()
    except Exception:
        # any error means "cannot be captured": the plain call worked
        torch.cuda.synchronize()
        return None
    return graph


def _repeat(function: Callable[[], Any], total_ms: float, *, fewest: int) -> list[float]:
    times: list[float] = []
    while len(times) < fewest or sum(times) < total_ms:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _timing(times: list[float]) -> Timing:
    ordered = sorted(times)
    p20, p80 = (ordered[round(part * (len(ordered) - 1))] for part in (0.2, 0.8))
    return Timing(statistics.median(ordered), p20, p80)


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next allocation; return whether it does.

    By default each call begins with the system zeroing the pages of large tensors, which takes as long as the
    recurrence. The addition of `Bench.beside_add` allocates its output before.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    m_trim_threshold, m_mmap_max = -1, -4
    library = ctypes.CDLL(None)
    return bool(library.mallopt(m_mmap_max, 0) and library.mallopt(m_trim_threshold, 2**31 - 1))


def share(amount: float, rate: float, milliseconds: float) -> float:
    """Return the part of a rate per second that an amount in so many milliseconds reaches."""
    return amount / rate / milliseconds * 1e3


def why(error: Exception) -> str:
    """Return an error as one short line, and print its traceback unless the line says it all."""
    found: BaseException | None = error
    while found is not None:
        # Triton and cuBLAS have no error type for it
        told = any(words in str(found) for words in (OUT_OF_MEMORY, "CUBLAS_STATUS_ALLOC_FAILED"))
        if told or isinstance(found, torch.OutOfMemoryError):
            return OUT_OF_MEMORY
        found = found.__cause__ or found.__context__
    if isinstance(error, UnsuitedError):
        return str(error)
    traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}".strip()
    line = " ".join(text.splitlines()[0].split())
    return line if len(line) <= 120 else line[:117] + "..."
