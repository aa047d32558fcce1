"""Handling of Ctrl-C at the end of a training step."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request to stop; a context manager.

    Within the context, `requested` becomes true at the first signal; a second SIGINT raises
    KeyboardInterrupt. Outside the main thread, Python does not allow signal handlers, and `requested` stays
    false.

    Args:
        told: called at the first signal.

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
        # torchrun forwards a signal and then sends another signal, so call back only once
        if not self.requested and self._told is not None:
            self._told()
        self.requested = True
