"""What is measured: operations, sizes and dtypes, with the speed that each is to reach."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from linrec.errors import unknown

Shape = tuple[int, int, int]
Targets = tuple[float | None, float | None]

PASSES = ("forward", "forward+backward")

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "c64": torch.complex64}


class Named(Protocol):
    """What has a name that --rows takes."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    Args:
        operation: a key of `perf.operations.OPERATIONS`.
        shape: (batch, time, channels).
        dtype: a key of `DTYPES`.
        targets: percent of the yardstick's rate, for each of `PASSES`; None where nothing is asked.
    """

    operation: str
    shape: Shape
    dtype: str
    targets: Targets

    @property
    def name(self) -> str:
        """What `--rows` takes: "scan-f32-8x4096x2048"."""
        return "-".join((self.operation, self.dtype, "x".join(map(str, self.shape))))


_LARGE, _LONG, _LONGEST, _SMALL = (8, 4096, 2048), (1, 65536, 2048), (1, 1048576, 64), (32, 1024, 512)
# as many numbers each, at first, then as many channels as fit with a million steps
_CONVOLVED = (
    (16, 1024, 768),
    (4, 4096, 768),
    (1, 16384, 768),
    (1, 65536, 768),
    (1, 262144, 192),
    (1, 1048576, 48),
)

CUDA_ROWS = (
    Row("scan", _LARGE, "f32", (90, 85)),
    Row("scan", _LARGE, "bf16", (80, 75)),
    Row("scan", _LONG, "f32", (80, 75)),
    Row("scan", _LONG, "bf16", (65, 60)),
    Row("scan", _LONGEST, "f32", (80, 75)),
    Row("scan", _LONGEST, "bf16", (65, 60)),
    Row("scan", _SMALL, "f32", (75, 70)),
    Row("scan", _SMALL, "bf16", (60, 55)),
    Row("scan", _LARGE, "c64", (85, 80)),
    Row("gate_loop", _LARGE, "f32", (80, 70)),
    Row("gate_loop", _LARGE, "bf16", (60, 50)),
    Row("selective", _LARGE, "bf16", (None, 55)),
    *(Row("conv", shape, dtype, (None, None)) for shape in _CONVOLVED for dtype in ("f32", "bf16")),
)

CPU_ROWS = tuple(
    Row(operation, (8, time, 512), dtype, targets)
    for time in (1024, 4096)
    for operation, dtype, targets in (
        ("scan", "f32", (80, 70)),
        ("scan", "c64", (65, None)),
        ("gate_loop", "f32", (50, None)),
        ("selective", "f32", (None, None)),
        ("conv", "f32", (None, None)),
    )
)

CUDA_LINES = ("memory-f32", "memory-bf16", "memory-conv", "step", "step-captured", "accuracy", "compile")
CPU_LINES = ("accuracy",)


def rows_of(device_type: str, *, quick: bool = False) -> list[Row]:
    """Return the rows of a device; `quick` keeps their operations and dtypes, at a size of no meaning."""
    rows = CUDA_ROWS if device_type == "cuda" else CPU_ROWS
    if not quick:
        return list(rows)
    kinds = dict.fromkeys((row.operation, row.dtype) for row in rows)
    return [Row(operation, (2, 64, 16), dtype, (50, 50)) for operation, dtype in kinds]


def lines_of(device_type: str, *, quick: bool = False) -> list[str]:
    """Return the names of what is measured besides the rows; `quick` leaves out what takes minutes."""
    lines = CUDA_LINES if device_type == "cuda" else CPU_LINES
    return [line for line in lines if not (quick and line in ("step-captured", "compile"))]


def select(names: Sequence[str], rows: Sequence[R], lines: Sequence[str]) -> tuple[list[R], list[str]]:
    """Return the rows and lines of these names, all when there are none.

    Raises:
        ValueError: a name that does not exist; the message gives the nearest one.
    """
    choices = [*(row.name for row in rows), *lines]
    for name in names:
        if name not in choices:
            raise unknown("row", name, choices)
    wanted = names or choices
    return [row for row in rows if row.name in wanted], [line for line in lines if line in wanted]
