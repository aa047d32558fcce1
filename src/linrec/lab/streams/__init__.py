"""Streams for learning online: endless, seen once, each with the losses of simple predictors."""

from linrec.errors import unknown
from linrec.lab.streams.base import Regime, Stream
from linrec.lab.streams.signals import BouncingGlyphs, MackeyGlassDrift, Sines, TracePatterning
from linrec.lab.streams.symbols import AddMemory, DelayCopy, Texts

__all__ = [
    "AddMemory", "BouncingGlyphs", "DelayCopy", "MackeyGlassDrift", "Regime", "Sines", "Stream",
    "Texts", "TracePatterning", "get", "names",
]  # fmt: skip

_STREAMS: dict[str, type[Stream]] = {
    stream.name: stream
    for stream in (AddMemory, DelayCopy, Texts, Sines, MackeyGlassDrift, TracePatterning, BouncingGlyphs)
}


def names() -> list[str]:
    """Return the names of all streams.

    Example:
        >>> names()[:2]
        ['add-memory', 'delay-copy']
    """
    return [*_STREAMS]


def get(name: str) -> type[Stream]:
    """Return the class of a stream; raise ValueError with the nearest name for an unknown one."""
    if name not in _STREAMS:
        raise unknown("stream", name, names())
    return _STREAMS[name]
