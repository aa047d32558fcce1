"""Ctrl-C that waits for the end of the step."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request; a context manager.

    While it is open, `requested` tells that someone asked to stop; a second SIGINT stops at once, as Python
    does. Outside the main thread, where Python allows no handlers, it never sees a request.

    Args:
        told: is called when the request comes.

    Example:
        >>> with Interrupt() as interrupt:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     interrupt.requested
        True
    """

    def __init__(self, told: Callable[[], None] | None = None) -> None:
        self.requested, self._told = False, told
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

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        # torchrun passes a signal on, and sends another
        if not self.requested and self._told is not None:
            self._told()
        self.requested = True
