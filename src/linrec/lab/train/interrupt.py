"""Handling of Ctrl-C at the end of a training step."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from linrec.lab.train.processes import is_lost


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request to stop; a context manager.

    Within the context, `requested` becomes true at the first signal. A second SIGINT goes to the handler from
    before the context, which raises KeyboardInterrupt by default. So does the first SIGINT while `waits` is
    false. Outside the main thread, Python does not allow signal handlers, and `requested` stays false.

    Args:
        told: called at the first signal.
        waits: whether a request to stop waits for the end of a step; this attribute may change.

    Example:
        >>> with Interrupt() as interrupt:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     interrupt.requested
        True
    """

    def __init__(self, told: Callable[[], None] | None = None, *, waits: bool = True) -> None:
        self.requested, self.waits, self._told = False, waits, told
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                self._before[name] = signal.signal(name, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)  # type: ignore[arg-type]
        if self._before and error is not None and is_lost(error):
            # torchrun ends the processes that are left, which first say how to continue
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self.requested or not self.waits):
            before = self._before[signal.SIGINT]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt
        # torchrun forwards a signal and then sends another signal, so call back only once
        if not self.requested and self._told is not None:
            self._told()
        self.requested = True
