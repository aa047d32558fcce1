"""Streams that somebody gives: a file, a file that grows, or standard input."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch

from linrec.errors import DataError
from linrec.files import reason
from linrec.lab.streams.base import Regime
from linrec.learning import Piece

__all__ = ["GivenStream"]

# seconds between two looks at a file that grows
WAIT = 0.2


@dataclass(kw_only=True)
class GivenStream:
    """Predict the next byte of a text, or the next row of a table of numbers.

    A file whose name ends in .csv is a table: each line has the same number of numbers, separated by commas.
    Any other file, and standard input, is a text.

    Args:
        path: the file; None is standard input.
        follow: whether to wait for more at the end of the file, until the process is stopped.

    Raises:
        DataError: the file cannot be read, a line of a table is not a row of numbers, or the file ends in the
            middle of a row.
    """

    path: Path | None = None
    follow: bool = False
    rows: ClassVar[int] = 1
    bounds: ClassVar[Mapping[str, float]] = {}

    step: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False, repr=False)
    _last: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.is_table = self.path is not None and Path(self.path).suffix == ".csv"
        self.vocab_size = None if self.is_table else 256
        self.n_features = None
        if self.is_table and (first := self._values(1)):
            self._last, self.n_features = first[0], len(first[0])
        elif self.is_table:
            raise DataError(f"{self.path} must have a row of numbers to begin with; it is empty.")
        self.n_outputs = self.n_features or 256

    @property
    def name(self) -> str:
        """The file's name."""
        return "standard input" if self.path is None else Path(self.path).name

    def regimes(self, steps: int) -> list[Regime]:
        """Return the one regime that is known."""
        return [Regime(0, self.name)]

    def read(self, n: int) -> Piece | None:
        """Return the next steps, at most n; None at the end."""
        values = self._values(n if self._last else n + 1)
        values = ([self._last] if self._last else []) + values
        if len(values) < 2:
            self._last = values[0] if values else []
            return None
        self._last, self.step = values[-1], self.step + len(values) - 1
        if self.is_table:
            numbers = torch.from_numpy(np.array(values, np.float32))[None]
            return Piece(numbers[:, :-1], numbers[:, 1:])
        tokens = torch.tensor([[int(value[0]) for value in values]])
        return Piece(tokens[:, :-1], tokens[:, 1:])

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the place in the file, and the value read last."""
        return {"step": self.step, "offset": self._offset, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a place of the file; standard input continues with its next byte."""
        self.step, self._offset, self._last = state["step"], state["offset"], list(state["last"])

    def _values(self, n: int) -> list[list[float]]:
        """Return the next values: bytes, or rows of numbers; fewer at the end."""
        try:
            with contextlib.ExitStack() as stack:
                file: BinaryIO = sys.stdin.buffer
                if self.path is not None:
                    file = stack.enter_context(Path(self.path).expanduser().open("rb"))
                    file.seek(self._offset)
                return [self._row(part) for part in self._parts(file, n)]
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {reason(error)}.") from error

    def _parts(self, file: BinaryIO, n: int) -> Iterator[bytes]:
        """Yield at most n bytes, or lines of a table; wait for them with `follow`."""
        held = b""
        while n:
            part = file.readline() if self.is_table else file.read(1)
            held += part
            whole = held.endswith(b"\n") if self.is_table else bool(held)
            if whole:
                self._offset += len(held)
                yield held
                held, n = b"", n - 1
            elif self.follow:
                time.sleep(WAIT)
            elif held:
                # without a newline, the last line may be cut
                raise DataError(
                    f"{self.path} ends in the middle of a row, at byte {self._offset + len(held)}. End the "
                    "last row with a newline, or pass --follow to wait for the rest."
                )
            else:
                return

    def _row(self, line: bytes) -> list[float]:
        """Return the numbers of a line of a table, or a byte."""
        if not self.is_table:
            return [float(line[0])]
        try:
            row = [float(word) for word in line.split(b",")]
        except ValueError:
            row = []
        if not row or self.n_features not in (None, len(row)):
            expected = "numbers" if self.n_features is None else f"{self.n_features} numbers"
            raise DataError(
                f"{self.path} must have {expected} in each line, separated by commas; got {line[:60]!r} at "
                f"byte {self._offset - len(line)}."
            )
        return row
