"""Until all operators are on `core`."""

from typing import Any

from linrec.ops.core.handlers import TimeSplit, handlers
from linrec.ops.core.handlers import refuse_split_time as refuse  # noqa: F401


def __getattr__(name: str) -> Any:
    if name == "current":
        return next((handler for handler in reversed(handlers) if isinstance(handler, TimeSplit)), None)
    raise AttributeError(name)
